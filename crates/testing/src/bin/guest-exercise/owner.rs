//! What one thread owns of the device, and what must be there.
//!
//! The span is dealt out in stripes, one thread after the other: neighbouring stripes are others', so that requests of
//! different threads touch each other's blocks but no sector is written by two.

use super::sector::{Found, SECTOR_BYTES, Stamp};

/// A stripe: larger than the largest request that a block layer makes of it, smaller than what is shared unfairly.
pub(crate) const STRIPE_SECTORS: u64 = 256;

/// What a sector must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// Nobody has written it in this run.
    Unknown,
    /// It was discarded or zeroed.
    Zeros,
    /// It was written that often.
    Written(u64),
}

/// One thread's sectors.
pub(crate) struct Owner {
    seed: u64,
    index: u64,
    threads: u64,
    /// In the order of the thread's own sectors.
    contents: Vec<Content>,
}

impl Owner {
    pub(crate) fn new(seed: u64, index: u64, threads: u64, span_sectors: u64) -> Owner {
        let stripes = (span_sectors / STRIPE_SECTORS).saturating_sub(index).div_ceil(threads);
        let sectors = usize::try_from(stripes * STRIPE_SECTORS).unwrap_or(0);
        Owner { seed, index, threads, contents: vec![Content::Unknown; sectors] }
    }

    /// How many sectors are its own.
    pub(crate) fn sectors(&self) -> u64 {
        self.contents.len() as u64
    }

    /// The device's sector of one of its own.
    pub(crate) fn sector(&self, own: u64) -> u64 {
        let stripe = own / STRIPE_SECTORS * self.threads + self.index;
        stripe * STRIPE_SECTORS + own % STRIPE_SECTORS
    }

    /// What its own sectors from `own` on must hold.
    pub(crate) fn contents(&mut self, own: u64, count: u64) -> &mut [Content] {
        &mut self.contents[own as usize..(own + count) as usize]
    }

    /// What must be in a sector that is written for the time `generation`.
    pub(crate) fn stamp(&self, own: u64, generation: u64) -> Stamp {
        Stamp { seed: self.seed, sector: self.sector(own), generation }
    }

    /// What is wrong with what is found in one of its own; None when nothing is, or nothing is known.
    pub(crate) fn check(&self, own: u64, found: Found) -> Option<String> {
        let expected = self.contents[own as usize];
        let right = match expected {
            Content::Unknown => true,
            Content::Zeros => found == Found::Zeros,
            Content::Written(generation) => found == Found::Whole(self.stamp(own, generation)),
        };
        let sector = self.sector(own);
        (!right).then(|| {
            format!("sector {sector} (byte {}): {expected:?} expected, {found:?} found", sector * SECTOR_BYTES as u64)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_stripe_has_one_owner() {
        let span = 10 * STRIPE_SECTORS + 3;
        let mut seen = HashSet::new();
        for index in 0..3 {
            let owner = Owner::new(1, index, 3, span);
            for own in 0..owner.sectors() {
                assert!(owner.sector(own) < span && seen.insert(owner.sector(own)));
            }
        }
        assert_eq!(seen.len() as u64, 10 * STRIPE_SECTORS);
    }

    #[test]
    fn old_misplaced_and_damaged_contents_are_wrong() {
        let mut owner = Owner::new(9, 1, 2, 4 * STRIPE_SECTORS);
        assert_eq!(owner.check(5, Found::Foreign), None);
        owner.contents(5, 1)[0] = Content::Written(2);
        assert_eq!(owner.check(5, Found::Whole(owner.stamp(5, 2))), None);
        for wrong in [
            Found::Whole(owner.stamp(5, 1)),
            Found::Whole(owner.stamp(6, 2)),
            Found::Damaged(owner.stamp(5, 2)),
            Found::Zeros,
        ] {
            assert!(owner.check(5, wrong).is_some(), "{wrong:?}");
        }
        owner.contents(5, 1)[0] = Content::Zeros;
        assert_eq!(owner.check(5, Found::Zeros), None);
        assert!(owner.check(5, Found::Whole(owner.stamp(5, 2))).is_some());
    }
}
