//! Which places of the data file are in use.
//!
//! A block's own place is preferred, so that a disk without snapshots is a raw image; what does not fit there goes
//! behind the disk's end. Nothing of this is in a file: it follows from the maps.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One bit a place.
pub(crate) struct Space {
    /// Places that are blocks' own.
    home: Box<[AtomicU64]>,
    blocks: u64,
    places_max: u64,
    extra: Mutex<Extra>,
    used: AtomicU64,
}

/// Places behind the disk's end.
#[derive(Default)]
struct Extra {
    bits: Vec<u64>,
    /// The word where the search begins: places are given out in rising order.
    cursor: usize,
    used: u64,
}

impl Space {
    pub(crate) fn new(blocks: u64, places_max: u64) -> Space {
        let home = (0..blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Space { home, blocks, places_max, extra: Mutex::default(), used: AtomicU64::new(0) }
    }

    fn extra(&self) -> MutexGuard<'_, Extra> {
        self.extra.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place, if it is free.
    pub(crate) fn claim(&self, place: u32) -> bool {
        let place = u64::from(place);
        let (word, bit) = (place / 64, 1 << (place % 64));
        let claimed = if place < self.blocks {
            self.home[word as usize].fetch_or(bit, Ordering::Relaxed) & bit == 0
        } else {
            self.extra().claim(place - self.blocks)
        };
        self.used.fetch_add(u64::from(claimed), Ordering::Relaxed);
        claimed
    }

    /// A place for a block: its own when that is free. None when numbers have run out.
    pub(crate) fn take(&self, block: u64) -> Option<u32> {
        if self.claim(block as u32) {
            return Some(block as u32);
        }
        let mut extra = self.extra();
        // At the bound, once more from the beginning: there may be gaps.
        for _ in 0..2 {
            let place = self.blocks + extra.take();
            if place < self.places_max {
                self.used.fetch_add(1, Ordering::Relaxed);
                return Some(place as u32);
            }
            extra.free(place - self.blocks);
            extra.cursor = 0;
        }
        None
    }

    /// Makes a place free.
    pub(crate) fn free(&self, place: u32) {
        let place = u64::from(place);
        if place < self.blocks {
            self.home[(place / 64) as usize].fetch_and(!(1 << (place % 64)), Ordering::Relaxed);
        } else {
            self.extra().free(place - self.blocks);
        }
        self.used.fetch_sub(1, Ordering::Relaxed);
    }

    /// Places in use.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// All that lies below the highest place in use and is free, and the end of the highest one.
    pub(crate) fn free_ranges(&self) -> (Vec<Range<u64>>, u64) {
        let extra = self.extra();
        let highest = extra.bits.iter().rposition(|word| *word != 0);
        let end =
            self.blocks + highest.map_or(0, |word| word as u64 * 64 + 64 - u64::from(extra.bits[word].leading_zeros()));
        let is_used = |place: u64| match place.checked_sub(self.blocks) {
            None => self.home[(place / 64) as usize].load(Ordering::Relaxed) >> (place % 64) & 1 == 1,
            Some(extra_place) => extra.bits[(extra_place / 64) as usize] >> (extra_place % 64) & 1 == 1,
        };
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut place = 0;
        while place < end {
            // Most of a large disk is free: whole words are taken at once.
            let home = self.home.get((place / 64) as usize).map_or(1, |word| word.load(Ordering::Relaxed));
            let is_free_word = place.is_multiple_of(64) && place + 64 <= self.blocks && home == 0;
            let count = if is_free_word { 64 } else { 1 };
            if is_free_word || !is_used(place) {
                match ranges.last_mut() {
                    Some(last) if last.end == place => last.end += count,
                    _ => ranges.push(place..place + count),
                }
            }
            place += count;
        }
        (ranges, end)
    }
}

impl Extra {
    fn claim(&mut self, number: u64) -> bool {
        let (word, bit) = ((number / 64) as usize, 1 << (number % 64));
        if self.bits.len() <= word {
            self.bits.resize(word + 1, 0);
        }
        let is_free = self.bits[word] & bit == 0;
        self.bits[word] |= bit;
        self.used += u64::from(is_free);
        is_free
    }

    fn take(&mut self) -> u64 {
        let is_full = self.used == self.bits.len() as u64 * 64;
        let places = if is_full { None } else { Some(self.bits.len()) };
        let found = places.and_then(|words| {
            (0..words).map(|by| (self.cursor + by) % words).find(|word| self.bits[*word] != u64::MAX)
        });
        let word = found.unwrap_or(self.bits.len());
        let bit = self.bits.get(word).map_or(0, |bits| u64::from(bits.trailing_ones()));
        self.cursor = word;
        let number = word as u64 * 64 + bit;
        self.claim(number);
        number
    }

    fn free(&mut self, number: u64) {
        self.bits[(number / 64) as usize] &= !(1 << (number % 64));
        self.used -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_gets_its_own_place_first_and_then_one_behind_the_end() {
        let space = Space::new(100, 1000);
        assert_eq!(space.take(7), Some(7));
        assert_eq!(space.take(7), Some(100));
        assert_eq!(space.take(7), Some(101));
        space.free(7);
        space.free(100);
        assert_eq!((space.take(7), space.take(7), space.take(7)), (Some(7), Some(100), Some(102)));
        assert_eq!(space.used(), 4);
        assert!(!space.claim(102) && space.claim(104));
        assert_eq!(space.free_ranges(), (vec![0..7, 8..100, 103..104], 105));
    }

    #[test]
    fn numbers_run_out_at_the_bound() {
        let space = Space::new(64, 130);
        let places: Vec<u32> = std::iter::from_fn(|| space.take(0)).collect();
        assert_eq!(places.len(), 67);
        assert_eq!(space.used(), 67);
        space.free(places[5]);
        assert_eq!(space.take(0), Some(places[5]));
    }
}
