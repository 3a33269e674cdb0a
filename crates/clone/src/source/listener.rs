//! The thread that reads what the kernel asks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::access_dispatcher::{AccessDispatcher, WaitMode};
use super::pending_save::Waiting;
use super::workers::{AbortOnPanic, Workers};
use crate::CloneError;
use crate::fanotify::{Event, EventBuffer, GroupNumber, Heartbeat, Journal, JournalEntry, Verdict};
use crate::image::FileIdentity;

/// The source's group in the journal; clones have others.
pub const SOURCE_GROUP: GroupNumber = GroupNumber(0);

/// A gate that is closed for longer opens by itself, and the freeze is void.
pub const GATE_CLOSED_MAX: Duration = Duration::from_secs(5);

/// How long it waits for the next access before it shows that it lives.
const LISTEN_INTERVAL: Duration = Duration::from_millis(100);
/// So long it saves at once what it has heard together. What takes longer waits for a disk: what of the rest must be
/// saved is for the workers.
const OWN_SAVES_TIME_MAX: Duration = Duration::from_millis(100);
/// After a reading that failed, so that a lasting failure does not burn a processor.
const FAILURE_INTERVAL: Duration = Duration::from_millis(5);

/// The thread; when this is dropped it ends once nothing comes any more, and with it the workers.
pub(super) struct Listener {
    workers: Arc<Workers>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    pub(super) fn start(dispatcher: &Arc<AccessDispatcher>, journal: &Arc<Journal>) -> Result<Listener, CloneError> {
        let workers = Arc::new(Workers::start(dispatcher)?);
        let stop = Arc::new(AtomicBool::new(false));
        let listener = ListenerThread {
            dispatcher: Arc::clone(dispatcher),
            journal: Arc::clone(journal),
            workers: Arc::clone(&workers),
            stop: Arc::clone(&stop),
            // Without one, when the journal has no room for one more, this thread is not watched.
            heartbeat: Heartbeat::start(journal.heartbeat_slot())?,
        };
        let thread = std::thread::Builder::new()
            .name("source-listener".to_owned())
            .spawn(move || listener.listen())
            .map_err(CloneError::kernel("start a thread"))?;
        Ok(Listener { workers, stop, thread: Some(thread) })
    }

    /// Resolves accesses that were held at the gate.
    pub(super) fn resolve_all(&self, held: Vec<Waiting>) {
        for waiting in held {
            self.workers.hand_over(waiting, || ());
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct ListenerThread {
    dispatcher: Arc<AccessDispatcher>,
    journal: Arc<Journal>,
    workers: Arc<Workers>,
    stop: Arc<AtomicBool>,
    heartbeat: Heartbeat,
}

impl ListenerThread {
    fn listen(&self) {
        let _guard = AbortOnPanic;
        let mut buffer = EventBuffer::default();
        loop {
            self.supervise();
            let stopping = self.stop.load(Ordering::Acquire);
            match self.dispatcher.group.read(&mut buffer, LISTEN_INTERVAL) {
                Ok(events) if events.is_empty() && stopping => return,
                // All are written down before the first one may wait for a disk.
                Ok(events) => {
                    let recorded: Vec<Waiting> = events.into_iter().filter_map(|event| self.record(event)).collect();
                    let since = Instant::now();
                    recorded.into_iter().for_each(|waiting| self.resolve(waiting, since));
                }
                Err(error) => {
                    tracing::error!(%error, "the source's accesses cannot be read");
                    std::thread::sleep(FAILURE_INTERVAL);
                }
            }
            self.open_stuck_gate();
        }
    }

    /// Writes an access down; none when it is answered.
    fn record(&self, event: Event) -> Option<Waiting> {
        if event.process_id == std::process::id() {
            if let Err(error) = self.dispatcher.group.answer(event.number, Verdict::Allow) {
                tracing::error!(%error, "an access of this process itself may wait for ever");
            }
            return None;
        }
        self.dispatcher.count_access();
        let since = Instant::now();
        let identity = FileIdentity::of_descriptor(&event.descriptor).unwrap_or_else(|error| {
            // Nobody can tell what it would overwrite.
            self.dispatcher
                .leave_all_out(&format!("a file that the source accesses cannot be told from others: {error}"));
            FileIdentity { device: 0, inode: 0, born_nanoseconds: 0 }
        });
        let slot = self.journal.begin(JournalEntry {
            group: SOURCE_GROUP,
            number: event.number,
            process_id: event.process_id,
            device: identity.device,
            inode: identity.inode,
            access: event.access,
        });
        Some(Waiting { event, identity, slot, since, saving: false })
    }

    /// One of those that were heard together and are resolved since then.
    fn resolve(&self, waiting: Waiting, since: Instant) {
        let is_early = since.elapsed() < OWN_SAVES_TIME_MAX;
        let wait_mode = if is_early { WaitMode::NoWait } else { WaitMode::Exhausted };
        // It may write: what the kernel takes at once as a rule it takes late when a disk has too much to do.
        if let Some(waiting) = self.heartbeat.during(|| self.dispatcher.resolve(waiting, wait_mode)) {
            self.workers.hand_over(waiting, || {
                self.supervise();
                self.open_stuck_gate();
            });
        }
    }

    /// What must go on while this thread waits for room, too.
    fn supervise(&self) {
        self.heartbeat.beat();
        self.workers.replace_stuck();
    }

    /// Whoever closed the gate has forgotten it, or hangs: the source must not.
    fn open_stuck_gate(&self) {
        let since = self.dispatcher.gate().closed_since;
        if since.is_some_and(|since| since.elapsed() > GATE_CLOSED_MAX) {
            tracing::error!("a freeze takes too long; the source goes on");
            let (_, held) = self.dispatcher.open();
            for waiting in held {
                self.workers.hand_over(waiting, || self.supervise());
            }
        }
    }
}
