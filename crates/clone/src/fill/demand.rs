//! The clone's own accesses: each waits until what it wants is there.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::fstat;

use super::filling::{FillError, Filling};
use super::pool::WorkerPool;
use crate::fanotify::{
    Access, AccessUnderWay, Event, EventBuffer, Group, GroupNumber, Heartbeat, Journal, JournalEntry, JournalSlot,
    Verdict, accesses_under_way, descriptors_max,
};
use crate::image::FileNumber;
use crate::{ByteRange, CHUNK_BYTES, CloneError};

/// Threads that fill for accesses whose content is not in memory.
const WORKERS: usize = 8;
/// Accesses that wait for such a thread; the next one waits in the kernel's queue.
const WAITING_MAX: usize = 256;
/// The listener's heartbeat comes at least this often.
const BEAT_EVERY: Duration = Duration::from_millis(100);
/// How soon after the last access of a dead process is settled new ones are read.
const TAKE_OVER_CHECK: Duration = Duration::from_millis(1);
/// Numbers that are swept between two beats.
const SWEEP_STEP: usize = 1 << 16;

/// Where a clone's accesses come from.
#[derive(Debug, Clone)]
pub struct DemandGroup {
    /// The clone's group; its marks are the caller's.
    pub group: Arc<Group>,
    /// Its number in the journal.
    pub number: GroupNumber,
    /// Where accesses in work are written down.
    pub journal: Arc<Journal>,
    /// Where the processes work that wait.
    pub data_directory: PathBuf,
}

/// Threads that answer a clone's accesses. Accesses by this process itself are allowed at once. When the filling fails
/// nothing is answered any more: the clone's processes wait until they are killed, and must be before the group's last
/// holder is gone.
#[derive(Debug)]
pub struct DemandListener {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl DemandListener {
    /// Starts to answer.
    ///
    /// With `take_over`, for a group whose listener died with its process: first what the journal says was read and not
    /// answered, then whatever else was. That is among what its processes are doing: all of it is brought. Where it
    /// cannot be told it is denied.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: no thread can be started.
    pub fn start(demand: DemandGroup, filling: Arc<Filling>, take_over: bool) -> Result<DemandListener, CloneError> {
        let stop = Arc::new(AtomicBool::new(false));
        let answerer = Arc::new(Answerer {
            group: Arc::clone(&demand.group),
            journal: Arc::clone(&demand.journal),
            told_bytes: AtomicU64::new(filling.progress().filled_bytes),
            filling,
            held: Mutex::new(Vec::new()),
        });
        let work = {
            let answerer = Arc::clone(&answerer);
            WorkerPool::start("clone-demand", WORKERS, WAITING_MAX, move |waiter| answerer.resolve(waiter))?
        };
        let heartbeat = demand.journal.heartbeat_slot();
        if heartbeat.is_none() {
            tracing::warn!("a clone's listener is not watched: too many heartbeats");
        }
        let heartbeat = Heartbeat::start(heartbeat)?;
        let listener = Listener { demand, answerer, pool: work, heartbeat, stop: Arc::clone(&stop) };
        let thread = std::thread::Builder::new()
            .name("clone-listener".to_owned())
            .spawn(move || listener.run(take_over))
            .map_err(CloneError::kernel("start a thread"))?;
        Ok(DemandListener { stop, thread: Some(thread) })
    }
}

impl Drop for DemandListener {
    /// Answers what was read, and reads no more.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Listener {
    demand: DemandGroup,
    answerer: Arc<Answerer>,
    // Ends before the pool, which may take long to end.
    heartbeat: Heartbeat,
    pool: WorkerPool<Waiter>,
    stop: Arc<AtomicBool>,
}

impl Listener {
    fn run(&self, take_over: bool) {
        let beat = || self.heartbeat.beat();
        if take_over {
            self.take_over(&beat);
        }
        let mut buffer = EventBuffer::default();
        while !self.stop.load(Ordering::Acquire) {
            beat();
            if self.answerer.filling.failure().is_some() {
                std::thread::sleep(BEAT_EVERY);
                continue;
            }
            match self.demand.group.read(&mut buffer, BEAT_EVERY) {
                Ok(events) => {
                    // All are written down before the first one may wait for a disk.
                    let waiter = |event| Waiter::new(&self.demand, &self.answerer.filling, event);
                    let waiters: Vec<Waiter> = events.into_iter().map(waiter).collect();
                    waiters.into_iter().for_each(|waiter| self.take(waiter, &beat));
                }
                Err(error) => {
                    tracing::error!(%error, "an access of a clone may have failed");
                    std::thread::sleep(BEAT_EVERY);
                }
            }
        }
    }

    /// Settles what a dead process left. New accesses are read only after that: theirs could have the same numbers.
    fn take_over(&self, beat: &dyn Fn()) {
        let left = self.demand.journal.take_over(self.demand.number);
        let unresolved = Arc::new(());
        for (entry, slot) in left {
            let waiter = Waiter::left(&self.answerer.filling, &entry, slot, Arc::clone(&unresolved));
            self.pool.submit(waiter, beat);
        }
        while Arc::strong_count(&unresolved) > 1 && self.answerer.filling.failure().is_none() {
            std::thread::sleep(TAKE_OVER_CHECK);
            beat();
        }
        if self.answerer.filling.failure().is_some() {
            return;
        }
        let verdict = match self.bring_under_way(beat) {
            Some(Ok(())) => Verdict::Allow,
            // Nothing is answered any more.
            Some(Err(FillError::Discarded(_))) => return,
            None => Verdict::DenyIo,
        };
        if let Err(error) = self.answer_unknown(verdict, beat) {
            tracing::error!(%error, "accesses of a clone may wait for ever");
        }
    }

    /// Brings what the clone's processes are accessing at this moment; none when that cannot be told.
    fn bring_under_way(&self, beat: &dyn Fn()) -> Option<Result<(), FillError>> {
        let under_way = accesses_under_way(&self.demand.data_directory)?;
        let filling = &self.answerer.filling;
        let bring = || {
            under_way.iter().try_for_each(|AccessUnderWay { device, inode, access }| {
                let Some(file) = filling.number_of(*device, *inode) else { return Ok(()) };
                match *access {
                    Access::Range(range) => filling.ensure(file, range),
                    // Of all that is beyond the new end nobody knows whether it will be cut.
                    Access::Truncation { size_bytes } => {
                        filling.ensure(file, ByteRange { start: size_bytes / CHUNK_BYTES * CHUNK_BYTES, end: u64::MAX })
                    }
                }
            })
        };
        // It may take long, and this thread's heartbeat must go on.
        std::thread::scope(|scope| {
            let bringing = scope.spawn(bring);
            while !bringing.is_finished() {
                beat();
                std::thread::sleep(TAKE_OVER_CHECK);
            }
            bringing.join().ok()
        })
    }

    fn answer_unknown(&self, verdict: Verdict, beat: &dyn Fn()) -> Result<(), CloneError> {
        let numbers_end = i32::try_from(descriptors_max()).unwrap_or(i32::MAX);
        for start in (0..numbers_end).step_by(SWEEP_STEP) {
            beat();
            let end = start.saturating_add(SWEEP_STEP as i32).min(numbers_end);
            let found = self.demand.group.sweep_range(start..end, verdict)?;
            if !found.is_empty() {
                tracing::warn!(count = found.len(), ?verdict, "accesses that a dead process had not written down");
            }
        }
        Ok(())
    }

    fn take(&self, waiter: Waiter, beat: &dyn Fn()) {
        if waiter.process_id == std::process::id() {
            return self.answerer.allow(waiter);
        }
        let settled = match (waiter.file, waiter.access) {
            (None, _) => Ok(true),
            // It may write: what the kernel takes at once as a rule it takes late when a disk has too much to do.
            (Some(file), Access::Range(range)) => {
                self.heartbeat.during(|| self.answerer.filling.try_ensure_now(file, range))
            }
            (Some(_), Access::Truncation { .. }) => Ok(false),
        };
        match settled {
            Ok(true) => self.answerer.allow(waiter),
            Ok(false) => self.pool.submit(waiter, beat),
            Err(FillError::Discarded(_)) => self.answerer.hold(waiter),
        }
    }
}

struct Answerer {
    group: Arc<Group>,
    journal: Arc<Journal>,
    filling: Arc<Filling>,
    /// Bytes that were filled when progress was told last.
    told_bytes: AtomicU64,
    /// What was read and is never answered, after a failure; as many as there are processes of the clone.
    held: Mutex<Vec<Waiter>>,
}

impl Answerer {
    /// Brings what is wanted, however long it takes, and allows the access.
    fn resolve(&self, waiter: Waiter) {
        let brought = match (waiter.file, waiter.access) {
            (None, _) => Ok(()),
            (Some(file), Access::Range(range)) => self.filling.ensure(file, range),
            (Some(file), Access::Truncation { size_bytes }) => self.cut(file, size_bytes, waiter.process_id),
        };
        match brought {
            Ok(()) => self.allow(waiter),
            Err(FillError::Discarded(_)) => self.hold(waiter),
        }
    }

    fn cut(&self, file: FileNumber, size_bytes: u64, process_id: u32) -> Result<(), FillError> {
        self.filling.ensure_boundary(file, size_bytes)?;
        // Asked as late as can be: a process that was killed while it waited cuts nothing.
        match Event::truncates(process_id) {
            Some(true) => self.filling.forget_from(file, size_bytes),
            Some(false) => Ok(()),
            // With all of it there, either is right.
            None => {
                self.filling.ensure(file, ByteRange { start: size_bytes / CHUNK_BYTES * CHUNK_BYTES, end: u64::MAX })
            }
        }
    }

    fn allow(&self, waiter: Waiter) {
        // Before the answer: who has got it may see this process die at once, and knows that it achieved something.
        let filled_bytes = self.filling.progress().filled_bytes;
        if self.told_bytes.load(Ordering::Relaxed) != filled_bytes {
            self.told_bytes.store(filled_bytes, Ordering::Relaxed);
            self.journal.note_progress();
        }
        match self.group.answer(waiter.number, Verdict::Allow) {
            Ok(true) => {}
            // It was killed meanwhile, or a dead process had answered it already.
            Ok(false) => tracing::debug!(number = waiter.number, "an access no longer waits"),
            Err(error) => {
                tracing::error!(%error, "an access of a clone may wait for ever");
                self.hold(waiter);
            }
        }
    }

    fn hold(&self, waiter: Waiter) {
        self.held.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(waiter);
    }
}

/// An access that waits; dropped when it is answered: the journal's entry goes first, then the descriptor, whose number
/// the next access may get. Another order would let whoever goes on after a death take one for the other.
struct Waiter {
    number: i32,
    process_id: u32,
    file: Option<FileNumber>,
    access: Access,
    _slot: Option<JournalSlot>,
    _descriptor: Option<OwnedFd>,
    /// Counts those that were taken over and are not settled.
    _unresolved: Option<Arc<()>>,
}

impl Waiter {
    fn new(demand: &DemandGroup, filling: &Filling, event: Event) -> Waiter {
        let Event { descriptor, number, process_id, access } = event;
        let (device, inode) = fstat(&descriptor).map_or((0, 0), |metadata| (metadata.st_dev, metadata.st_ino));
        let entry = JournalEntry { group: demand.number, number, process_id, device, inode, access };
        Waiter {
            number,
            process_id,
            file: filling.number_of(device, inode),
            access,
            _slot: demand.journal.begin(entry),
            _descriptor: Some(descriptor),
            _unresolved: None,
        }
    }

    fn left(filling: &Filling, entry: &JournalEntry, slot: JournalSlot, unresolved: Arc<()>) -> Waiter {
        Waiter {
            number: entry.number,
            process_id: entry.process_id,
            file: filling.number_of(entry.device, entry.inode),
            access: entry.access,
            _descriptor: None,
            _slot: Some(slot),
            _unresolved: Some(unresolved),
        }
    }
}
