//! Which chunks are filled, in memory that a restarted process finds again.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use super::layout::Layout;
use crate::CloneError;
use crate::fanotify::SharedWords;
use crate::image::Image;

const WORD_BITS: u64 = u64::BITS as u64;

/// One bit a chunk; bits are only ever set. A word behind them says whether the clone, or the image for one elsewhere,
/// was given up: from then on the source overwrites what it lacks, and whoever comes later must not go on.
#[derive(Debug)]
pub struct SharedBitmap {
    shared: SharedWords,
}

impl SharedBitmap {
    /// For an image of which nothing is filled.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: no memory.
    pub fn create(image: &Image) -> Result<SharedBitmap, CloneError> {
        let words = Layout::new(image).bits().div_ceil(WORD_BITS) as usize;
        Ok(SharedBitmap { shared: SharedWords::create("onecopy-filled", words + 1)? })
    }

    /// The one that another process made.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: `descriptor` is no such memory.
    pub fn open(descriptor: OwnedFd) -> Result<SharedBitmap, CloneError> {
        let shared = SharedWords::open(descriptor)?;
        if shared.words().is_empty() {
            return Err(CloneError::kernel("share memory")(std::io::ErrorKind::InvalidInput.into()));
        }
        Ok(SharedBitmap { shared })
    }

    /// For whoever opens it later: nothing is to be gone on with.
    pub(crate) fn give_up(&self) {
        self.given_up().store(1, Release);
    }

    /// Whether some process gave up.
    pub(crate) fn is_given_up(&self) -> bool {
        self.given_up().load(Acquire) != 0
    }

    fn given_up(&self) -> &AtomicU64 {
        &self.shared.words()[self.words().len()]
    }

    /// How many bits there is room for.
    pub(crate) fn bits(&self) -> u64 {
        self.words().len() as u64 * WORD_BITS
    }

    pub(crate) fn is_set(&self, bit: u64) -> bool {
        self.words()[(bit / WORD_BITS) as usize].load(Acquire) & (1 << (bit % WORD_BITS)) != 0
    }

    /// False if it was set already.
    pub(crate) fn set(&self, bit: u64) -> bool {
        let mask = 1 << (bit % WORD_BITS);
        self.words()[(bit / WORD_BITS) as usize].fetch_or(mask, AcqRel) & mask == 0
    }

    /// The first bit in `range` that is not set.
    pub(crate) fn next_missing(&self, range: Range<u64>) -> Option<u64> {
        self.find(range, |word| !word)
    }

    /// The first bit in `range` that is set.
    pub(crate) fn next_set(&self, range: Range<u64>) -> Option<u64> {
        self.find(range, |word| word)
    }

    fn find(&self, range: Range<u64>, wanted: impl Fn(u64) -> u64) -> Option<u64> {
        let mut bit = range.start;
        while bit < range.end {
            let word = wanted(self.words()[(bit / WORD_BITS) as usize].load(Acquire)) >> (bit % WORD_BITS);
            if word != 0 {
                let found = bit + u64::from(word.trailing_zeros());
                return (found < range.end).then_some(found);
            }
            bit = (bit / WORD_BITS + 1) * WORD_BITS;
        }
        None
    }

    fn words(&self) -> &[AtomicU64] {
        let words = self.shared.words();
        &words[..words.len() - 1]
    }
}

impl AsFd for SharedBitmap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.as_fd()
    }
}
