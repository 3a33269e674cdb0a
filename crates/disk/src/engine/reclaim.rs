//! Places that nobody needs any more become free, and their space goes back to the file system.

use std::sync::PoisonError;

use super::{Core, byte_of};
use crate::BLOCK_BYTES;

impl Core {
    /// Frees places that no durable map names, once no request can still reach them. One caller at a time.
    pub(super) fn reclaim(&self) {
        let mut places = std::mem::take(&mut *self.reclaimable.lock().unwrap_or_else(PoisonError::into_inner));
        if places.is_empty() {
            return;
        }
        self.grace.wait();
        places.sort_unstable();
        for run in places.chunk_by(|one, next| one + 1 == *next) {
            // The space is given back before the place is: nobody writes there meanwhile.
            if let Err(error) = self.data.punch(byte_of(run[0]), run.len() as u64 * BLOCK_BYTES) {
                tracing::warn!(%error, "freed space is not given back until it is used again");
            }
            run.iter().for_each(|place| self.space.free(*place));
        }
    }

    /// After a crash: whatever lies in places that no map names goes back to the file system. Where that cannot be, as
    /// on a full one, they keep it until they are used again: a place is always written whole before it is read.
    pub(super) fn clear_free_space(&self) {
        let (ranges, end) = self.space.free_ranges();
        let cleared = ranges
            .into_iter()
            .try_for_each(|range| self.data.punch(range.start * BLOCK_BYTES, (range.end - range.start) * BLOCK_BYTES));
        let cleared = cleared.and_then(|()| match self.data.len()? > end * BLOCK_BYTES {
            true => self.data.set_len(end * BLOCK_BYTES),
            false => Ok(()),
        });
        if let Err(error) = cleared {
            tracing::warn!(%error, "the space of what a crash has left is not given back until it is used again");
        }
    }
}
