//! Which bit of the bitmap is which chunk of which file.

use std::ops::Range;

use crate::image::{FileNumber, Image};
use crate::{ByteRange, CHUNK_BYTES};

/// The first bit of each file; a file begins at a new word, so that its bits can be counted by words.
#[derive(Debug)]
pub(crate) struct Layout {
    /// One for each file: first bit, frozen size in bytes.
    files: Vec<(u64, u64)>,
    bits: u64,
}

impl Layout {
    pub fn new(image: &Image) -> Layout {
        let mut bits = 0;
        let mut files = Vec::with_capacity(image.files.len());
        for file in &image.files {
            files.push((bits, file.size_bytes));
            bits += file.size_bytes.div_ceil(CHUNK_BYTES).next_multiple_of(u64::from(u64::BITS));
        }
        Layout { files, bits }
    }

    /// Bits in all.
    pub fn bits(&self) -> u64 {
        self.bits
    }

    pub fn files_count(&self) -> usize {
        self.files.len()
    }

    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.1).sum()
    }

    /// The bits of the chunks that `range` touches.
    pub fn chunks(&self, file: FileNumber, range: ByteRange) -> Range<u64> {
        let (first, size_bytes) = self.files[file.0 as usize];
        let (start, end) = range.chunks(size_bytes);
        first + start..first + end
    }

    /// The bytes of `chunks` of `file`, not beyond its end.
    pub fn bytes(&self, file: FileNumber, chunks: &Range<u64>) -> Range<u64> {
        let (first, size_bytes) = self.files[file.0 as usize];
        let end = (chunks.end - first) * CHUNK_BYTES;
        (chunks.start - first) * CHUNK_BYTES..end.min(size_bytes)
    }
}
