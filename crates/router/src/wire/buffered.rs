//! How many bytes of messages the router holds: what lies in its connections' buffers, and long messages outside of
//! them, wherever they are.
//!
//! One number for the process, as its memory is one. A connection tells of changes of [`GRAIN_BYTES`] only, so that
//! short statements cost nothing.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytes::{Bytes, BytesMut};

/// What one connection may hold without being counted, in bytes.
const GRAIN_BYTES: usize = 16 * 1024;

static BUFFERED: AtomicUsize = AtomicUsize::new(0);

/// Bytes that are held now.
pub fn buffered_bytes() -> usize {
    BUFFERED.load(Relaxed)
}

/// What one holder has told of. Dropped, it holds nothing.
#[derive(Debug, Default)]
pub(super) struct Tally(usize);

impl Tally {
    /// It holds `bytes` now.
    pub fn note(&mut self, bytes: usize) {
        if bytes.abs_diff(self.0) < GRAIN_BYTES && (bytes > 0 || self.0 == 0) {
            return;
        }
        BUFFERED.fetch_add(bytes, Relaxed);
        BUFFERED.fetch_sub(self.0, Relaxed);
        self.0 = bytes;
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.note(0);
    }
}

/// A long message, counted once however many have it.
struct Long {
    bytes: BytesMut,
    _tally: Tally,
}

impl AsRef<[u8]> for Long {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// `bytes`, counted until nobody has any of them.
pub(super) fn counted(bytes: BytesMut) -> Bytes {
    let mut tally = Tally::default();
    tally.note(bytes.len());
    Bytes::from_owner(Long { bytes, _tally: tally })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The only test that looks at the number; with others in one process it would see theirs.
    ///
    /// What the router's buffers and messages longer than 256 KiB hold now is counted, each byte once.
    ///
    /// Spec: L1
    #[test]
    fn f87_what_is_held_is_counted_once_and_as_long_as_somebody_has_it() {
        const LONG: usize = 1 << 20;
        let mut connection = Tally::default();
        connection.note(GRAIN_BYTES - 1);
        assert_eq!(buffered_bytes(), 0);
        connection.note(3 * GRAIN_BYTES);
        connection.note(3 * GRAIN_BYTES + 1);
        let message = counted(BytesMut::zeroed(LONG));
        let part = message.slice(5..);
        drop(message);
        assert_eq!(buffered_bytes(), 3 * GRAIN_BYTES + LONG);
        drop(part);
        assert_eq!(buffered_bytes(), 3 * GRAIN_BYTES);
        connection.note(0);
        assert_eq!(buffered_bytes(), 0);
        connection.note(LONG);
        drop(connection);
        assert_eq!(buffered_bytes(), 0);
    }
}
