//! What each block holds, as 64 bits of its hash.
//!
//! Blocks lie together in extents of 4 MiB of disk, which are made when the first of their blocks passes. So many
//! threads record at once: an extent's numbers are atomic, and only making or dropping one locks its shard for writing.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{RwLock, RwLockReadGuard};

use crate::{ContentHash, zeroed};

/// Blocks of an extent: 4 MiB of disk.
pub(crate) const EXTENT_BLOCKS: u32 = 1024;

/// More shards than processors that a guest's queues keep busy.
const SHARDS: u32 = 64;

/// What is stored for a block of which nothing is known.
const UNKNOWN: u64 = 0;

/// The hash of a content as it is stored: never that of an unknown one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    /// The lower half of a content's hash; a zero counts as a one, which costs half a bit of one content.
    pub(crate) fn of(hash: ContentHash) -> Fingerprint {
        Fingerprint((hash as u64).max(1))
    }

    pub(crate) fn from_bits(bits: u64) -> Option<Fingerprint> {
        (bits != UNKNOWN).then_some(Fingerprint(bits))
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }
}

/// The contents of all blocks.
pub(crate) struct Contents {
    shards: Box<[RwLock<Shard>]>,
    /// Extents that a shard keeps; above it the one is dropped that was recorded longest ago.
    extents_per_shard_max: usize,
    dropped_extents: AtomicU64,
}

#[derive(Default)]
struct Shard {
    extents: HashMap<u32, Extent>,
    /// The order in which extents are asked whether they may go.
    clock: VecDeque<u32>,
}

struct Extent {
    fingerprints: Box<[AtomicU64]>,
    /// Recorded since the clock came by.
    fresh: AtomicBool,
}

impl Contents {
    /// Room for at least this many blocks; each of the shards keeps one extent at least.
    pub(crate) fn new(blocks_max: u64) -> Contents {
        let extents = blocks_max.div_ceil(u64::from(EXTENT_BLOCKS));
        let per_shard = extents.div_ceil(u64::from(SHARDS)).max(1);
        Contents {
            shards: (0..SHARDS).map(|_| RwLock::default()).collect(),
            extents_per_shard_max: usize::try_from(per_shard).unwrap_or(usize::MAX),
            dropped_extents: AtomicU64::new(0),
        }
    }

    /// Records what a block holds. Returns whether it held that before, as far as is known.
    pub(crate) fn set(&self, block: u32, fingerprint: Fingerprint) -> bool {
        let number = block / EXTENT_BLOCKS;
        loop {
            let shard = self.read(number);
            if let Some(extent) = shard.extents.get(&number) {
                if !extent.fresh.load(Ordering::Relaxed) {
                    extent.fresh.store(true, Ordering::Relaxed);
                }
                return extent.place(block).swap(fingerprint.0, Ordering::AcqRel) == fingerprint.0;
            }
            drop(shard);
            self.make(number);
        }
    }

    /// What a block holds, if that is known.
    pub(crate) fn get(&self, block: u32) -> Option<Fingerprint> {
        let number = block / EXTENT_BLOCKS;
        let shard = self.read(number);
        Fingerprint::from_bits(shard.extents.get(&number)?.place(block).load(Ordering::Acquire))
    }

    /// Forgets what these blocks hold.
    pub(crate) fn forget(&self, blocks: Range<u64>) {
        let extent_blocks = u64::from(EXTENT_BLOCKS);
        let mut next = blocks.start;
        while next < blocks.end {
            let Ok(number) = u32::try_from(next / extent_blocks) else { return };
            let end = blocks.end.min((u64::from(number) + 1) * extent_blocks);
            if let Some(extent) = self.read(number).extents.get(&number) {
                for block in next..end {
                    extent.fingerprints[(block % extent_blocks) as usize].store(UNKNOWN, Ordering::Release);
                }
            }
            next = end;
        }
    }

    /// Calls `each` with every extent's number and fingerprints, one shard after the other; numbers ascend within a
    /// shard only.
    pub(crate) fn each_extent<E>(&self, mut each: impl FnMut(u32, &[AtomicU64]) -> Result<(), E>) -> Result<(), E> {
        for shard in &self.shards {
            let shard = shard.read().expect("nothing panics while it holds a shard");
            let mut numbers: Vec<u32> = shard.extents.keys().copied().collect();
            numbers.sort_unstable();
            for number in numbers {
                let extent = &shard.extents[&number];
                each(number, &extent.fingerprints)?;
            }
        }
        Ok(())
    }

    /// Blocks whose content is known. Counts them all: not for each request.
    pub(crate) fn known(&self) -> u64 {
        let mut known = 0;
        let counted: Result<(), std::convert::Infallible> = self.each_extent(|_, fingerprints| {
            known +=
                fingerprints.iter().filter(|fingerprint| fingerprint.load(Ordering::Relaxed) != UNKNOWN).count() as u64;
            Ok(())
        });
        match counted {
            Ok(()) => known,
        }
    }

    /// Extents that are there now.
    pub(crate) fn extents(&self) -> u64 {
        let count = |shard: &RwLock<Shard>| shard.read().expect("nothing panics while it holds a shard").extents.len();
        self.shards.iter().map(count).sum::<usize>() as u64
    }

    /// Extents that were dropped because there was no room.
    pub(crate) fn dropped_extents(&self) -> u64 {
        self.dropped_extents.load(Ordering::Relaxed)
    }

    fn make(&self, number: u32) {
        let mut shard = self.shard(number).write().expect("nothing panics while it holds a shard");
        if shard.extents.contains_key(&number) {
            return;
        }
        if shard.extents.len() >= self.extents_per_shard_max {
            shard.drop_oldest();
            self.dropped_extents.fetch_add(1, Ordering::Relaxed);
        }
        let fingerprints = zeroed::of_64_bits(EXTENT_BLOCKS as usize);
        shard.extents.insert(number, Extent { fingerprints, fresh: AtomicBool::new(true) });
        shard.clock.push_back(number);
    }

    fn read(&self, number: u32) -> RwLockReadGuard<'_, Shard> {
        self.shard(number).read().expect("nothing panics while it holds a shard")
    }

    fn shard(&self, number: u32) -> &RwLock<Shard> {
        &self.shards[(number % SHARDS) as usize]
    }
}

impl Shard {
    /// Drops the first extent of the clock that was not recorded since its last turn. Two turns find one: the first
    /// makes all stale.
    fn drop_oldest(&mut self) {
        for _ in 0..=self.clock.len() {
            let Some(number) = self.clock.pop_front() else { return };
            let fresh = self.extents.get(&number).is_some_and(|extent| extent.fresh.swap(false, Ordering::Relaxed));
            if !fresh {
                self.extents.remove(&number);
                return;
            }
            self.clock.push_back(number);
        }
    }
}

impl Extent {
    fn place(&self, block: u32) -> &AtomicU64 {
        &self.fingerprints[(block % EXTENT_BLOCKS) as usize]
    }
}
