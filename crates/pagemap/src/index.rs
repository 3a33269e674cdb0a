//! From a content's hash to blocks that may hold it.
//!
//! A table of fixed size without locks: a hash has two buckets of eight places, one cache line each, and an entry goes
//! into the emptier one. An entry is a block's number and half of its hash; whether the block still holds that content
//! is asked of [`Contents`](crate::contents::Contents) each time. So nothing need be taken out when a block changes:
//! the entry is stale, and its place is used again by the next one that finds both buckets full.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::contents::{Contents, Fingerprint};
use crate::zeroed;

/// Places of a bucket: as many as a cache line holds.
const PLACES: usize = 8;

/// Places for each two blocks that shall be indexed: at two thirds of the places used, hardly a bucket pair overflows.
const PLACES_PER_TWO_BLOCKS: u64 = 3;

/// Entries that one content has at most: a second one stays when the first block is overwritten, and a content that
/// thousands of blocks share must not push out others.
const SAME_CONTENT_MAX: usize = 2;

/// Entry 0 is none; an entry's upper half is the fingerprint's lower half made odd, so none is 0.
const NONE: u64 = 0;

/// The table.
pub(crate) struct Index {
    places: Box<[AtomicU64]>,
    replaced: AtomicU64,
}

impl Index {
    /// A table for this many blocks.
    pub(crate) fn new(blocks_max: u64) -> Index {
        let buckets = (blocks_max.saturating_mul(PLACES_PER_TWO_BLOCKS) / 2).div_ceil(PLACES as u64).max(2);
        let places = usize::try_from(buckets).unwrap_or(usize::MAX >> 8).saturating_mul(PLACES);
        Index { places: zeroed::of_64_bits(places), replaced: AtomicU64::new(0) }
    }

    /// Enters a block whose content has just become this one.
    pub(crate) fn insert(&self, block: u32, fingerprint: Fingerprint, contents: &Contents) {
        let entry = entry(block, fingerprint);
        let buckets = self.buckets(fingerprint);
        let mut same = 0;
        let mut last_same = None;
        for place in buckets.into_iter().flatten() {
            let found = place.load(Ordering::Relaxed);
            if found == entry {
                return;
            }
            if found >> 32 == entry >> 32 && contents.get(found as u32) == Some(fingerprint) {
                same += 1;
                last_same = Some(place);
            }
        }
        let place = match last_same {
            Some(place) if same >= SAME_CONTENT_MAX => place,
            _ => free(buckets).unwrap_or_else(|| self.make_room(fingerprint, contents)),
        };
        place.store(entry, Ordering::Relaxed);
    }

    /// A block that holds this content now.
    pub(crate) fn find(&self, fingerprint: Fingerprint, contents: &Contents) -> Option<u32> {
        let wanted = entry(0, fingerprint);
        for bucket in self.buckets(fingerprint) {
            for place in bucket {
                let found = place.load(Ordering::Relaxed);
                if found >> 32 == wanted >> 32 && contents.get(found as u32) == Some(fingerprint) {
                    return Some(found as u32);
                }
            }
        }
        None
    }

    /// What the table takes when all is touched, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        std::mem::size_of_val(&*self.places) as u64
    }

    /// Entries of contents that were pushed out by others although they held.
    pub(crate) fn replaced(&self) -> u64 {
        self.replaced.load(Ordering::Relaxed)
    }

    /// A place in full buckets: what is stale goes, else one that the hash chooses.
    fn make_room(&self, fingerprint: Fingerprint, contents: &Contents) -> &AtomicU64 {
        let buckets = self.buckets(fingerprint);
        for place in buckets.into_iter().flatten() {
            let found = place.load(Ordering::Relaxed);
            if contents.get(found as u32).is_none_or(|fingerprint| entry(found as u32, fingerprint) != found) {
                // All that are stale, so that the emptier bucket is the right one again.
                place.store(NONE, Ordering::Relaxed);
            }
        }
        free(buckets).unwrap_or_else(|| {
            self.replaced.fetch_add(1, Ordering::Relaxed);
            let choice = (fingerprint.bits() >> 29) as usize % (2 * PLACES);
            &buckets[choice / PLACES][choice % PLACES]
        })
    }

    fn buckets(&self, fingerprint: Fingerprint) -> [&[AtomicU64]; 2] {
        let count = self.places.len() / PLACES;
        let first = scale(fingerprint.bits(), count);
        // The halves change places: another number from the same bits, without another hash.
        let second = scale(fingerprint.bits().rotate_left(32), count);
        let second = if second == first { (first + 1) % count } else { second };
        [first, second].map(|bucket| &self.places[bucket * PLACES..][..PLACES])
    }
}

/// A free place of the emptier bucket.
fn free(buckets: [&[AtomicU64]; 2]) -> Option<&AtomicU64> {
    let is_free = |place: &&AtomicU64| place.load(Ordering::Relaxed) == NONE;
    let emptier = buckets.into_iter().max_by_key(|bucket| bucket.iter().filter(is_free).count())?;
    emptier.iter().find(is_free)
}

/// A number below `count`, evenly, from the upper bits of `bits`.
fn scale(bits: u64, count: usize) -> usize {
    ((u128::from(bits) * count as u128) >> 64) as usize
}

fn entry(block: u32, fingerprint: Fingerprint) -> u64 {
    (fingerprint.bits() | 1) << 32 | u64::from(block)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(number: u64) -> Fingerprint {
        Fingerprint::of(crate::content_hash(1, &number.to_le_bytes()))
    }

    #[test]
    fn all_blocks_that_there_is_room_for_are_found() {
        let blocks = 20_000;
        let (index, contents) = (Index::new(blocks), Contents::new(blocks));
        for block in 0..blocks as u32 {
            contents.set(block, fingerprint(block.into()));
            index.insert(block, fingerprint(block.into()), &contents);
        }
        for block in 0..blocks as u32 {
            assert_eq!(index.find(fingerprint(block.into()), &contents), Some(block));
        }
        assert_eq!(index.replaced(), 0);
    }

    #[test]
    fn overwritten_contents_make_room_and_are_not_found() {
        let blocks = 1000;
        let (index, contents) = (Index::new(blocks), Contents::new(blocks));
        for round in 0..50 {
            for block in 0..blocks as u32 {
                let fingerprint = fingerprint(round * blocks + u64::from(block));
                contents.set(block, fingerprint);
                index.insert(block, fingerprint, &contents);
            }
        }
        assert_eq!(index.find(fingerprint(0), &contents), None);
        let is_found =
            |block: &u32| index.find(fingerprint(49 * blocks + u64::from(*block)), &contents) == Some(*block);
        let found = (0..blocks as u32).filter(is_found).count();
        assert!(found >= 980, "{found} of {blocks} blocks are found");
    }

    #[test]
    fn a_content_of_many_blocks_takes_two_places_and_outlives_one_of_them() {
        let (index, contents) = (Index::new(16), Contents::new(4096));
        for block in 0..1000 {
            contents.set(block, fingerprint(1));
            index.insert(block, fingerprint(1), &contents);
        }
        let used = index.places.iter().filter(|place| place.load(Ordering::Relaxed) != NONE).count();
        assert_eq!(used, SAME_CONTENT_MAX);
        let first = index.find(fingerprint(1), &contents).unwrap();
        contents.set(first, fingerprint(2));
        let second = index.find(fingerprint(1), &contents).unwrap();
        assert_ne!(first, second);
    }
}
