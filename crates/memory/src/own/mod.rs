//! Level `own`: clean pages of a server without our extension are dropped by way of its own buffer table.
//!
//! The agent finds the buffer pool of a stock server in its shared memory (`process`, `pool`), chooses pages that are
//! on disk and that nobody uses, those first that were used least, and gives their memory back (`batch`). The server
//! reads such a page again when it wants it; it needs no change and does not know. Memory that it reads again must be
//! dropped again: a target holds only while [`shrink_to`](Own::shrink_to) is called again and again.
//!
//! # Risk
//!
//! It is built only with the feature `own`, and used only where the configuration says so, because a mistake here is
//! the server's:
//! - While memory is given back, some headers of the server are locked by us, as its own processes lock them for some
//!   instructions. A process that wants such a buffer meanwhile waits by sleeping a millisecond. If the agent is killed
//!   (`kill -9`, the OOM killer) or stopped in just that moment, some tenths of a millisecond long, the header stays
//!   locked, and whoever wants it ends after some minutes with "stuck spinlock": the server restarts and recovers from
//!   its log. Nothing committed is lost.
//! - So a batch is bounded in buffers and time, the thread is real-time and takes no signals meanwhile, and the
//!   process' memory is kept in RAM.
//! - It writes into the server's memory by knowing how versions 15 to 18 lay it out. Everything is checked before
//!   (version, that each header says its own number, that the parts of all headers fit together, that pages are where
//!   they should be), and what does not fit is refused: other versions, builds for debugging, huge pages.
//!
//! What it cannot do: dirty pages stay (a `CHECKPOINT` before makes them clean), pinned ones too; the pool's size as
//! the server sees it does not change, so its clock sweep runs over buffers without content as over others.

mod batch;
mod elf;
mod header;
mod pool;
mod process;
mod real_time;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use batch::Pace;
use header::USAGE_MAX;
use pool::{Pool, Resident};
use real_time::LockedMemory;

use crate::{Bytes, MemoryError};

/// Ways over all buffers with one usage count: the first drops what it believes to be enough, but a buffer that shares
/// its pages with others gives back less than it has, and pages are read meanwhile.
const SWEEPS_MAX: u32 = 3;

/// What the pool has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Figures {
    /// All of the pool, `shared_buffers`.
    pub pool_bytes: Bytes,
    /// What of it is in RAM.
    pub resident_bytes: Bytes,
    /// Pages that must be written before they can be dropped.
    pub dirty_bytes: Bytes,
    /// Pages that are in use at this moment.
    pub pinned_bytes: Bytes,
    /// Pages that were used at least twice lately: about what is needed.
    pub working_set_bytes: Bytes,
}

/// What was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dropped {
    /// What of the pool was in RAM before.
    pub resident_before_bytes: Bytes,
    /// And afterwards: above the target when pages are dirty or in use.
    pub resident_bytes: Bytes,
    /// Memory that was given back; pages may have been read again meanwhile.
    pub bytes: Bytes,
    /// In so many batches.
    pub batches: u64,
    /// The longest time for which headers were locked.
    pub held_microseconds_max: u64,
    /// How long all of it took.
    pub microseconds: u64,
    /// False when the thread could not be made real-time: an ordinary process could hold it up while headers are
    /// locked.
    pub real_time: bool,
}

/// The buffer pool of one server, seen from outside.
#[derive(Debug)]
pub struct Own {
    data_directory: PathBuf,
}

impl Own {
    /// For the server of this data directory, which must run: all that will be relied on is checked.
    ///
    /// # Errors
    /// [`MemoryError::NotAllowed`]: a server that is not touched, with the reason;
    /// [`MemoryError::NoServer`].
    pub fn open(data_directory: &Path) -> Result<Own, MemoryError> {
        Pool::attach(data_directory)?;
        Ok(Own { data_directory: data_directory.to_owned() })
    }

    /// What the pool has now. Reads all headers: about 20 ms for 1 GB.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn figures(&self) -> Result<Figures, MemoryError> {
        let pool = Pool::attach(&self.data_directory)?;
        let resident = self.resident(&pool)?;
        let mut figures =
            Figures { pool_bytes: pool.size_bytes(), resident_bytes: resident.bytes, ..Figures::default() };
        for state in (0..pool.buffers).map(|buffer| pool.state(buffer)) {
            figures.dirty_bytes += if state.is_dirty() { pool.block_bytes } else { 0 };
            figures.pinned_bytes += if state.references() > 0 { pool.block_bytes } else { 0 };
            let needed = state.is_valid() && state.usage() >= 2;
            figures.working_set_bytes += if needed { pool.block_bytes } else { 0 };
        }
        Ok(figures)
    }

    /// Drops pages, those used least first, until at most `target_bytes` of the pool are in RAM or no more can be
    /// dropped. Blocks: about a second for 1 GB.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`MemoryError::File`]: the kernel did not take memory back.
    pub fn shrink_to(&self, target_bytes: Bytes) -> Result<Dropped, MemoryError> {
        let began = Instant::now();
        let pool = Pool::attach(&self.data_directory)?;
        let mut resident = self.resident(&pool)?;
        let mut dropped = Dropped {
            resident_before_bytes: resident.bytes,
            resident_bytes: resident.bytes,
            real_time: true,
            ..Dropped::default()
        };
        let _kept = LockedMemory::begin();
        let mut pace = Pace::new();
        'more: for usage in 0..=USAGE_MAX {
            for _ in 0..SWEEPS_MAX {
                let wanted = resident.bytes.saturating_sub(target_bytes);
                if wanted == 0 {
                    break 'more;
                }
                let sweep = Sweep { pool: &pool, resident: &resident, usage };
                let left = sweep.run(wanted, &mut pace, &mut dropped).map_err(self.failed("give back memory of"))?;
                resident = self.resident(&pool)?;
                if left > 0 {
                    break;
                }
            }
        }
        dropped.resident_bytes = resident.bytes;
        dropped.microseconds = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        Ok(dropped)
    }

    fn resident(&self, pool: &Pool) -> Result<Resident, MemoryError> {
        pool.resident().map_err(self.failed("look at memory of"))
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> MemoryError {
        MemoryError::file(action, &self.data_directory)
    }
}

/// One way over all buffers, from the last to the first.
struct Sweep<'a> {
    pool: &'a Pool,
    resident: &'a Resident,
    usage: u32,
}

impl Sweep<'_> {
    /// Drops until `wanted` bytes that were in RAM are dropped, or all buffers have been looked at. Says how much is
    /// left to drop then.
    fn run(&self, mut wanted: Bytes, pace: &mut Pace, dropped: &mut Dropped) -> io::Result<Bytes> {
        let mut end = self.pool.buffers;
        while wanted > 0 && end > 0 {
            let count = self.candidates_below(end, pace.buffers());
            if count == 0 {
                end -= 1;
                continue;
            }
            let first = end - count;
            end = first;
            if !self.is_worthwhile(first, count) {
                continue;
            }
            let done = batch::drop_pages(self.pool, first, count, self.usage)?;
            pace.learn(done.held);
            dropped.batches += 1;
            dropped.bytes += done.bytes;
            dropped.real_time &= done.real_time;
            let held = u64::try_from(done.held.as_micros()).unwrap_or(u64::MAX);
            dropped.held_microseconds_max = dropped.held_microseconds_max.max(held);
            let (place, length) = self.pool.place_of(first, done.buffers);
            wanted = wanted.saturating_sub(self.resident.bytes_of_whole_pages(place, length));
        }
        Ok(wanted)
    }

    /// Whether dropping these gives anything back: what holds a page may have it in swap.
    fn is_worthwhile(&self, first: u32, count: u32) -> bool {
        let (place, length) = self.pool.place_of(first, count);
        self.resident.bytes_of_whole_pages(place, length) > 0
            || (first..first + count).any(|buffer| self.pool.state(buffer).is_valid())
    }

    /// How many neighbours that end at `end` can be dropped, at most `count_max`.
    fn candidates_below(&self, end: u32, count_max: u32) -> u32 {
        let is_candidate = |buffer: &u32| {
            let state = self.pool.state(*buffer);
            let (place, length) = self.pool.place_of(*buffer, 1);
            // One without content may still share a page with a neighbour that is dropped now.
            let has_memory = state.is_valid() || self.resident.any(place, length);
            state.is_droppable() && state.usage() <= self.usage && has_memory
        };
        let first_max = end.saturating_sub(count_max);
        let count = (first_max..end).rev().take_while(is_candidate).count();
        u32::try_from(count).expect("at most as many as there are buffers")
    }
}
