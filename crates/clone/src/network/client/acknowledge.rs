//! What the clone has and the source does not know yet.

use crate::fill::{Layout, SharedBitmap};
use crate::image::{FileNumber, Image};
use crate::network::protocol::{DELIVERED_RANGES_MAX, DeliveredRange};
use crate::{ByteRange, CloneError};

/// Finds it by comparing bitmaps: so it counts, too, what was given up by a truncation, or filled before this process
/// was started anew.
#[derive(Debug)]
pub struct Acknowledger {
    layout: Layout,
    files: u32,
    filled: SharedBitmap,
    told: SharedBitmap,
}

impl Acknowledger {
    /// `filled` is the filling's own bitmap.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn new(image: &Image, filled: SharedBitmap) -> Result<Acknowledger, CloneError> {
        let files = u32::try_from(image.files.len()).unwrap_or(u32::MAX);
        Ok(Acknowledger { layout: Layout::new(image), files, filled, told: SharedBitmap::create(image)? })
    }

    /// The next ranges, at most [`DELIVERED_RANGES_MAX`]; they count as told.
    pub fn next(&self) -> Vec<DeliveredRange> {
        let mut ranges = Vec::new();
        for file in (0..self.files).map(FileNumber) {
            let chunks = self.layout.chunks(file, ByteRange::WHOLE);
            let mut at = chunks.start;
            while let Some(filled) = self.filled.next_set(at..chunks.end) {
                let Some(first) = self.told.next_missing(filled..chunks.end) else { break };
                at = first;
                if !self.filled.is_set(first) {
                    continue;
                }
                if ranges.len() == DELIVERED_RANGES_MAX {
                    return ranges;
                }
                let end = self.filled.next_missing(first..chunks.end).unwrap_or(chunks.end);
                let end = self.told.next_set(first..end).unwrap_or(end);
                (first..end).for_each(|chunk| {
                    self.told.set(chunk);
                });
                ranges.push(DeliveredRange { file, first: first - chunks.start, count: end - first });
                at = end;
            }
        }
        ranges
    }

    /// Everything is to be told again: what was told last may not have arrived.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn again(&mut self, image: &Image) -> Result<(), CloneError> {
        self.told = SharedBitmap::create(image)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::manifest::tests::manifest;

    #[test]
    fn each_chunk_is_told_once() {
        let image = manifest(&[8192 * 100, 10, 0, 8192 * 3]).image;
        let (filled, own) = (SharedBitmap::create(&image).unwrap(), Layout::new(&image));
        let descriptor = std::os::fd::AsFd::as_fd(&filled).try_clone_to_owned().unwrap();
        let mut acknowledger = Acknowledger::new(&image, SharedBitmap::open(descriptor).unwrap()).unwrap();
        assert_eq!(acknowledger.next(), []);
        let set = |file, chunk| filled.set(own.chunks(FileNumber(file), ByteRange::WHOLE).start + chunk);
        let range = |file, first, count| DeliveredRange { file: FileNumber(file), first, count };
        (3..70).for_each(|chunk| assert!(set(0, chunk)));
        set(1, 0);
        assert_eq!(acknowledger.next(), [range(0, 3, 67), range(1, 0, 1)]);
        assert_eq!(acknowledger.next(), []);
        set(0, 2);
        set(0, 70);
        set(0, 99);
        set(3, 2);
        assert_eq!(acknowledger.next(), [range(0, 2, 1), range(0, 70, 1), range(0, 99, 1), range(3, 2, 1)]);
        acknowledger.again(&image).unwrap();
        assert_eq!(acknowledger.next(), [range(0, 2, 69), range(0, 99, 1), range(1, 0, 1), range(3, 2, 1)]);
    }

    #[test]
    fn one_message_holds_no_more_than_it_may() {
        let image = manifest(&[8192 * 20_000]).image;
        let filled = SharedBitmap::create(&image).unwrap();
        let start = Layout::new(&image).chunks(FileNumber(0), ByteRange::WHOLE).start;
        (0..20_000).step_by(2).for_each(|chunk| {
            filled.set(start + chunk);
        });
        let acknowledger = Acknowledger::new(&image, filled).unwrap();
        let counts: Vec<usize> = std::iter::from_fn(|| Some(acknowledger.next().len())).take(4).collect();
        assert_eq!(counts, [4096, 4096, 10_000 - 8192, 0]);
    }
}
