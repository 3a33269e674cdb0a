//! Who is filling what.

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard};

use crate::image::FileNumber;

/// Files share this many locks.
const SHARDS: usize = 64;

/// The chunks that threads are filling right now; as many entries as there are such threads.
#[derive(Debug)]
pub(crate) struct InFlight {
    shards: Vec<Shard>,
}

#[derive(Debug, Default)]
pub(crate) struct Shard {
    claimed: Mutex<Vec<Range<u64>>>,
    released: Condvar,
}

impl InFlight {
    pub fn new() -> InFlight {
        InFlight { shards: (0..SHARDS).map(|_| Shard::default()).collect() }
    }

    pub fn shard(&self, file: FileNumber) -> &Shard {
        &self.shards[file.0 as usize % SHARDS]
    }

    /// Lets everybody who waits look again.
    pub fn wake_all(&self) {
        for shard in &self.shards {
            let _claimed = shard.lock();
            shard.released.notify_all();
        }
    }
}

impl Shard {
    pub fn lock(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.claimed.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Waits until some claim is released.
    pub fn wait<'a>(&self, claimed: MutexGuard<'a, Vec<Range<u64>>>) -> MutexGuard<'a, Vec<Range<u64>>> {
        self.released.wait(claimed).unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Claims `chunks`, which nobody else has.
    pub fn claim(&self, mut claimed: MutexGuard<'_, Vec<Range<u64>>>, chunks: Range<u64>) -> Claim<'_> {
        claimed.push(chunks.clone());
        Claim { shard: self, chunks }
    }
}

/// The right to fill these chunks, until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    shard: &'a Shard,
    pub chunks: Range<u64>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut claimed = self.shard.lock();
        claimed.retain(|chunks| *chunks != self.chunks);
        self.shard.released.notify_all();
    }
}
