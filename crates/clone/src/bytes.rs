//! Ranges of a file, in bytes and in chunks.

use serde::{Deserialize, Serialize};

/// The unit in which files are filled: PostgreSQL's page. What is smaller could be torn by a writer, what is larger
/// would be saved for nothing.
pub const CHUNK_BYTES: u64 = 8192;

/// A range of a file: `start` included, `end` not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteRange {
    /// The first byte.
    pub start: u64,
    /// The byte after the last one; `u64::MAX` is the end of the file, wherever that is.
    pub end: u64,
}

impl ByteRange {
    /// All of a file.
    pub const WHOLE: ByteRange = ByteRange { start: 0, end: u64::MAX };

    /// `length_bytes` from `start` on.
    pub fn new(start: u64, length_bytes: u64) -> ByteRange {
        ByteRange { start, end: start.saturating_add(length_bytes) }
    }

    /// The numbers of the chunks of a file of `size_bytes` that this touches: first, and one after the last.
    pub fn chunks(self, size_bytes: u64) -> (u64, u64) {
        let end = self.end.min(size_bytes);
        if self.start >= end {
            return (0, 0);
        }
        (self.start / CHUNK_BYTES, end.div_ceil(CHUNK_BYTES))
    }
}

impl From<std::ops::Range<u64>> for ByteRange {
    fn from(range: std::ops::Range<u64>) -> ByteRange {
        ByteRange { start: range.start, end: range.end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_a_range_stay_inside_the_file() {
        let cases = [
            (ByteRange::new(0, 1), 8192, (0, 1)),
            (ByteRange::new(8191, 2), 20_000, (0, 2)),
            (ByteRange::WHOLE, 20_000, (0, 3)),
            (ByteRange::new(16_384, 8192), 20_000, (2, 3)),
            (ByteRange::new(24_576, 8192), 20_000, (0, 0)),
            (ByteRange::WHOLE, 0, (0, 0)),
            (ByteRange::new(u64::MAX, 5), u64::MAX, (0, 0)),
        ];
        for (range, size_bytes, expected) in cases {
            assert_eq!(range.chunks(size_bytes), expected, "{range:?} of {size_bytes}");
        }
    }
}
