//! Bytes of a stream that wait for the rest of their frame, or for room at the other end.

/// What is read of QEMU's stream at once, and what is written to it: some hundred frames.
const BUFFER_BYTES: usize = 256 << 10;

/// Bytes of a stream.
pub(super) struct Buffer {
    bytes: Vec<u8>,
    begin: usize,
    pub(super) end: usize,
}

impl Buffer {
    pub(super) fn new() -> Buffer {
        Buffer { bytes: vec![0; BUFFER_BYTES], begin: 0, end: 0 }
    }

    pub(super) fn filled(&self) -> &[u8] {
        &self.bytes[self.begin..self.end]
    }

    pub(super) fn consume(&mut self, bytes: usize) {
        self.begin += bytes;
        if self.begin == self.end {
            self.clear();
        }
    }

    pub(super) fn clear(&mut self) {
        (self.begin, self.end) = (0, 0);
    }

    /// So much room behind what is there, made by moving that where it has to be.
    pub(super) fn room(&mut self, bytes: usize) -> Option<&mut [u8]> {
        if self.bytes.len() - self.end < bytes && self.begin > 0 {
            self.bytes.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        let end = self.end;
        (self.bytes.len() - end >= bytes).then(|| &mut self.bytes[end..])
    }
}
