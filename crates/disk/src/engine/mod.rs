//! The storage core: what happens to a disk's bytes.
//!
//! ```text
//! request -> read / write / zero      look up places, use the data file        (many threads)
//!            snapshots                epochs and snapshots: frozen maps        (cut: all stripes, for an instant)
//!            commit                   data durable, then the journal           (one at a time, in groups)
//!            checkpoint               a new map and an empty journal           (background)
//!            reclaim                  places nobody needs any more             (background)
//! ```
//! Locks are taken in this order: committer, stripes' `io` (ascending), snapshots, stripes' `map`. A request holds one
//! stripe at a time. What it does with places happens under its stripe's `io`, so that a cut, which takes all of them,
//! has no write in the middle.

mod background;
mod base_blocks;
mod changes;
mod checkpoint;
mod commit;
mod grace;
mod observe;
mod open;
mod read;
mod reclaim;
mod snapshots;
mod statistics;
#[cfg(test)]
mod tests;
mod view;
pub(crate) mod workers;
mod write;
mod zero;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::format::checkpoint::Checkpoint;
use crate::format::header::Header;
use crate::format::journal::Note;
use crate::format::load::{numbers, recent_name};
use crate::format::recent::{self, Slot};
use crate::lease::Lease;
use crate::map::{Alike, Entry, State, Tree};
use crate::source::Source;
use crate::space::Space;
use crate::storage::{Folder, StoredFile};
use crate::{BLOCK_BYTES, DiskError, Observer, Requester, SECTOR_BYTES, WriteRecord};

pub(crate) use background::{Signal, run as tend};
use changes::Changes;
use commit::Committer;
use grace::{Grace, Inside};
use open::FAILED;
pub(crate) use open::{create, dead_lists, failed};
use snapshots::SnapshotTable;
pub(crate) use view::Elsewhere;
pub use view::View;

/// Runs of changes that wait for a commit: from here on the background commits.
const PENDING_RUNS_WAKE: usize = 1 << 16;
/// From here on who writes commits.
const PENDING_RUNS_MAX: usize = 1 << 20;

/// Whether a request may wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaitPolicy<'a> {
    /// For as long as it takes, or until its requester withdraws it.
    Wait(Option<&'a Requester>),
    /// Not for a source, nor for a page that is not in memory.
    NoWait,
}

impl<'a> WaitPolicy<'a> {
    fn requester(self) -> Option<&'a Requester> {
        match self {
            WaitPolicy::Wait(requester) => requester,
            WaitPolicy::NoWait => None,
        }
    }
}

/// An open disk.
pub(crate) struct Core {
    folder: Folder,
    pub(crate) header: Header,
    data: StoredFile,
    pub(crate) base: Option<Arc<dyn Source>>,
    observer: Option<Arc<dyn Observer>>,
    record_writes: bool,
    seed: u64,
    identity: u64,
    stripes: Box<[Stripe]>,
    space: Space,
    /// Taken last.
    alike: Mutex<Alike>,
    grace: Grace,
    changes: Changes,
    snapshots: Mutex<SnapshotTable>,
    /// The current epoch's number: births of what is written now.
    epoch: AtomicU32,
    /// The newest frozen map that is kept; what was born up to then may be needed by it. 0 when none is.
    newest_kept: AtomicU32,
    /// Places that no map names since some change that waits for a commit.
    freed: Mutex<Vec<u32>>,
    /// Places that no durable map names.
    reclaimable: Mutex<Vec<u32>>,
    pending_runs: AtomicUsize,
    data_changed: AtomicBool,
    /// Records of writes that are kept, and whether there were too many in the current epoch.
    recorded: AtomicUsize,
    overflowed: AtomicBool,
    recent: RwLock<Recent>,
    committer: Mutex<Committer>,
    flushes: AtomicU64,
    synchronizations: AtomicU64,
    /// A checkpoint that is begun and not written: its journal is the newest one.
    checkpointing: Mutex<Option<Checkpoint>>,
    checkpoints: AtomicU64,
    journal_bytes: AtomicU64,
    failure: OnceLock<String>,
    lease: Mutex<Option<Lease>>,
    pub(crate) generation: u64,
    pub(crate) was_closed: bool,
    pub(crate) signal: Signal,
}

/// One of the parts into which a disk's blocks are spread.
#[derive(Default)]
struct Stripe {
    /// Shared by requests that do whole blocks or write in place, exclusive where a block's old content is merged with
    /// new one, or where the order of writes is recorded. It holds that record.
    io: RwLock<Vec<WriteRecord>>,
    map: RwLock<Mapped>,
    counters: Counters,
}

/// A stripe's part of the map.
#[derive(Default)]
struct Mapped {
    tree: Tree,
    /// Changes since the last commit.
    pending: Vec<Note>,
}

#[derive(Default)]
#[repr(align(128))]
struct Counters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    discards: AtomicU64,
    discarded_bytes: AtomicU64,
}

/// The newest journal's `recent` file.
struct Recent {
    file: StoredFile,
    number: u64,
    /// Where the next change goes.
    end: AtomicU64,
}

/// A stripe's `io`, one way or the other.
enum Working<'a> {
    Together(#[expect(dead_code, reason = "held for its lock")] RwLockReadGuard<'a, Vec<WriteRecord>>),
    Alone(RwLockWriteGuard<'a, Vec<WriteRecord>>),
}

/// A change that is at work: neither its places are given to others meanwhile, nor is it withdrawn.
struct Changer<'a> {
    _inside: Inside<'a>,
    _working: Option<RwLockReadGuard<'a, bool>>,
}

impl Stripe {
    fn together(&self) -> RwLockReadGuard<'_, Vec<WriteRecord>> {
        self.io.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn alone(&self) -> RwLockWriteGuard<'_, Vec<WriteRecord>> {
        self.io.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn map(&self) -> RwLockReadGuard<'_, Mapped> {
        self.map.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn map_mut(&self) -> RwLockWriteGuard<'_, Mapped> {
        self.map.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mapped {
    /// Notes a change for the journal; whether it is a run of its own.
    fn note(&mut self, block: u32, count: u32, state: State) -> bool {
        if let Some(Note::Run { block: last, count: length, state: before }) = self.pending.last_mut()
            && *last + *length == block
            && before.advanced(*length) == state
        {
            *length += count;
            return false;
        }
        self.pending.push(Note::Run { block, count, state });
        true
    }
}

impl Core {
    /// The stripe's place among the requests at work; an error once the disk is closed.
    fn enter(&self, stripe: usize) -> Result<Inside<'_>, DiskError> {
        self.grace.enter(stripe).ok_or(DiskError::Closed)
    }

    /// The same for a change, which its requester may withdraw until here and not before it has left.
    fn enter_to_change<'a>(
        &'a self,
        stripe: usize,
        requester: Option<&'a Requester>,
    ) -> Result<Changer<'a>, DiskError> {
        let inside = self.enter(stripe)?;
        let working = requester.map(|requester| requester.working().ok_or(DiskError::Withdrawn)).transpose()?;
        Ok(Changer { _inside: inside, _working: working })
    }

    pub(crate) fn describe(&self) -> String {
        self.folder.path_of("").display().to_string()
    }

    pub(crate) fn check_open(&self) -> Result<(), DiskError> {
        if self.grace.is_closed() { Err(DiskError::Closed) } else { Ok(()) }
    }

    /// Refuses to change anything once a failure has made the files' content doubtful.
    fn check_writable(&self) -> Result<(), DiskError> {
        match self.failure.get() {
            None => Ok(()),
            Some(reason) => Err(DiskError::ReadOnly { reason: reason.clone() }),
        }
    }

    /// Whoever cannot make bytes durable does not know what the file holds: nothing is written any more.
    fn fail(&self, error: DiskError) -> DiskError {
        tracing::error!(%error, directory = self.describe(), "the disk is read only from now on");
        if self.failure.set(error.to_string()).is_ok()
            && let Err(error) = self.mark_failed(&error.to_string())
        {
            tracing::error!(
                %error,
                directory = self.describe(),
                "the failure is not noted for who opens the disk next"
            );
        }
        error
    }

    /// The next holder must neither believe what the kernel has in memory nor what this one told it.
    fn mark_failed(&self, reason: &str) -> Result<(), DiskError> {
        self.folder.create_file(FAILED)?.write_at(0, reason.as_bytes())?;
        self.recent.read().unwrap_or_else(PoisonError::into_inner).file.set_len(0)?;
        for number in numbers(&self.folder.names()?, "recent") {
            self.folder.remove(&recent_name(number))?;
        }
        self.data.forget_cached();
        Ok(())
    }

    /// Refuses what is not whole sectors within the disk.
    pub(crate) fn check_range(&self, offset: u64, length: u64) -> Result<(), DiskError> {
        let size_bytes = self.header.size_bytes;
        let is_within = offset.checked_add(length).is_some_and(|end| end <= size_bytes);
        if is_within && offset.is_multiple_of(SECTOR_BYTES) && length.is_multiple_of(SECTOR_BYTES) {
            return Ok(());
        }
        Err(DiskError::OutOfRange { offset, length, size_bytes })
    }

    /// Whether a block's content may be overwritten where it is: no frozen map needs it.
    fn is_own(&self, entry: Entry) -> bool {
        matches!(entry.state(), State::Data(_)) && entry.birth() > self.newest_kept.load(Ordering::Relaxed)
    }

    /// How a block without data is noted: without a base, absent is zero.
    fn emptiness(&self) -> State {
        if self.base.is_some() { State::Zero } else { State::Absent }
    }

    fn current_epoch(&self) -> u32 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Notes a change for the next commit. Counted under the map's lock: what stands there is always counted, also for
    /// another change that only makes its run longer.
    fn note(&self, map: &mut Mapped, block: u32, count: u32, state: State) {
        if map.note(block, count, state) {
            let before = self.pending_runs.fetch_add(1, Ordering::Release);
            if before == PENDING_RUNS_WAKE {
                self.signal.wake();
            }
        }
    }

    /// Tells a successor of changes, under the map's lock: so that those of one block are in order.
    fn tell_successor(&self, runs: impl Iterator<Item = (u32, u32, State)>) -> Result<(), DiskError> {
        let (mut slots, birth) = (Vec::with_capacity(1), self.current_epoch());
        for (block, count, state) in runs {
            slots.push(Slot { block, count, state, birth });
        }
        // All of them or none: when this fails their places are given to others.
        let bytes = recent::encode(self.identity, &slots);
        let recent = self.recent.read().unwrap_or_else(PoisonError::into_inner);
        let end = recent.end.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        recent.file.write_at(end, &bytes)
    }

    /// Lets who changed much pay for it, outside all locks.
    fn relieve(&self) -> Result<(), DiskError> {
        if self.pending_runs.load(Ordering::Relaxed) < PENDING_RUNS_MAX { Ok(()) } else { self.commit(&[]) }
    }

    /// After data was written, and before that is acknowledged. Who finds the mark set finds it before the flush that
    /// takes it away, and so before that flush synchronizes: both are sequentially consistent.
    fn mark_data_changed(&self) {
        if !self.data_changed.load(Ordering::SeqCst) {
            self.data_changed.store(true, Ordering::SeqCst);
        }
    }
}

/// The byte of the data file where a place begins.
fn byte_of(place: u32) -> u64 {
    u64::from(place) * BLOCK_BYTES
}
