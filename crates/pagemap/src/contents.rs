//! What each block holds, as 64 bits of its hash.
//!
//! Blocks lie together in stretches of 4 MiB of disk, which are made when the first of their blocks passes. So many
//! threads record at once: a stretch's numbers are atomic, and only making or dropping one locks its shard for writing.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{RwLock, RwLockReadGuard};

use crate::zeroed;

/// Blocks of a stretch: 4 MiB of disk.
pub(crate) const STRETCH_BLOCKS: u32 = 1024;

/// More shards than processors that a guest's queues keep busy.
const SHARDS: u32 = 64;

/// What is stored for a block of which nothing is known.
const UNKNOWN: u64 = 0;

/// The hash of a content as it is stored: never that of an unknown one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Print(u64);

impl Print {
    /// The lower half of a content's hash; a zero counts as a one, which costs half a bit of one content.
    pub(crate) fn of(hash: u128) -> Print {
        Print((hash as u64).max(1))
    }

    pub(crate) fn from_bits(bits: u64) -> Option<Print> {
        (bits != UNKNOWN).then_some(Print(bits))
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }
}

/// The contents of all blocks.
pub(crate) struct Contents {
    shards: Box<[RwLock<Shard>]>,
    /// Stretches that a shard keeps; above it the one is dropped that was recorded longest ago.
    stretches_per_shard_max: usize,
    dropped_stretches: AtomicU64,
}

#[derive(Default)]
struct Shard {
    stretches: HashMap<u32, Stretch>,
    /// The order in which stretches are asked whether they may go.
    clock: VecDeque<u32>,
}

struct Stretch {
    prints: Box<[AtomicU64]>,
    /// Recorded since the clock came by.
    fresh: AtomicBool,
}

impl Contents {
    /// Room for at least this many blocks; each of the shards keeps one stretch at least.
    pub(crate) fn new(blocks_max: u64) -> Contents {
        let stretches = blocks_max.div_ceil(u64::from(STRETCH_BLOCKS));
        let per_shard = stretches.div_ceil(u64::from(SHARDS)).max(1);
        Contents {
            shards: (0..SHARDS).map(|_| RwLock::default()).collect(),
            stretches_per_shard_max: usize::try_from(per_shard).unwrap_or(usize::MAX),
            dropped_stretches: AtomicU64::new(0),
        }
    }

    /// Records what a block holds. Returns whether it held that before, as far as is known.
    pub(crate) fn set(&self, block: u32, print: Print) -> bool {
        let number = block / STRETCH_BLOCKS;
        loop {
            let shard = self.read(number);
            if let Some(stretch) = shard.stretches.get(&number) {
                if !stretch.fresh.load(Ordering::Relaxed) {
                    stretch.fresh.store(true, Ordering::Relaxed);
                }
                return stretch.place(block).swap(print.0, Ordering::AcqRel) == print.0;
            }
            drop(shard);
            self.make(number);
        }
    }

    /// What a block holds, if that is known.
    pub(crate) fn get(&self, block: u32) -> Option<Print> {
        let number = block / STRETCH_BLOCKS;
        let shard = self.read(number);
        Print::from_bits(shard.stretches.get(&number)?.place(block).load(Ordering::Acquire))
    }

    /// Forgets what these blocks hold.
    pub(crate) fn forget(&self, blocks: Range<u64>) {
        let stretch_blocks = u64::from(STRETCH_BLOCKS);
        let mut next = blocks.start;
        while next < blocks.end {
            let Ok(number) = u32::try_from(next / stretch_blocks) else { return };
            let end = blocks.end.min((u64::from(number) + 1) * stretch_blocks);
            if let Some(stretch) = self.read(number).stretches.get(&number) {
                for block in next..end {
                    stretch.prints[(block % stretch_blocks) as usize].store(UNKNOWN, Ordering::Release);
                }
            }
            next = end;
        }
    }

    /// Calls `each` with every stretch's number and prints, one shard after the other; numbers ascend within a shard
    /// only.
    pub(crate) fn each_stretch<E>(&self, mut each: impl FnMut(u32, &[AtomicU64]) -> Result<(), E>) -> Result<(), E> {
        for shard in &self.shards {
            let shard = shard.read().expect("nothing panics while it holds a shard");
            let mut numbers: Vec<u32> = shard.stretches.keys().copied().collect();
            numbers.sort_unstable();
            for number in numbers {
                let stretch = &shard.stretches[&number];
                each(number, &stretch.prints)?;
            }
        }
        Ok(())
    }

    /// Blocks whose content is known. Counts them all: not for each request.
    pub(crate) fn known(&self) -> u64 {
        let mut known = 0;
        let counted: Result<(), std::convert::Infallible> = self.each_stretch(|_, prints| {
            known += prints.iter().filter(|print| print.load(Ordering::Relaxed) != UNKNOWN).count() as u64;
            Ok(())
        });
        match counted {
            Ok(()) => known,
        }
    }

    /// Stretches that are there now.
    pub(crate) fn stretches(&self) -> u64 {
        let count =
            |shard: &RwLock<Shard>| shard.read().expect("nothing panics while it holds a shard").stretches.len();
        self.shards.iter().map(count).sum::<usize>() as u64
    }

    /// Stretches that were dropped because there was no room.
    pub(crate) fn dropped_stretches(&self) -> u64 {
        self.dropped_stretches.load(Ordering::Relaxed)
    }

    fn make(&self, number: u32) {
        let mut shard = self.shard(number).write().expect("nothing panics while it holds a shard");
        if shard.stretches.contains_key(&number) {
            return;
        }
        if shard.stretches.len() >= self.stretches_per_shard_max {
            shard.drop_oldest();
            self.dropped_stretches.fetch_add(1, Ordering::Relaxed);
        }
        let prints = zeroed::of_64_bits(STRETCH_BLOCKS as usize);
        shard.stretches.insert(number, Stretch { prints, fresh: AtomicBool::new(true) });
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
    /// Drops the first stretch of the clock that was not recorded since its last turn. Two turns find one: the first
    /// makes all stale.
    fn drop_oldest(&mut self) {
        for _ in 0..=self.clock.len() {
            let Some(number) = self.clock.pop_front() else { return };
            let fresh = self.stretches.get(&number).is_some_and(|stretch| stretch.fresh.swap(false, Ordering::Relaxed));
            if !fresh {
                self.stretches.remove(&number);
                return;
            }
            self.clock.push_back(number);
        }
    }
}

impl Stretch {
    fn place(&self, block: u32) -> &AtomicU64 {
        &self.prints[(block % STRETCH_BLOCKS) as usize]
    }
}
