//! A heartbeat that goes on while its thread is at work that may wait for a disk: who works is not taken for dead. Not
//! for ever: who waits for longer than a disk may take hangs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::journal::HeartbeatSlot;
use crate::CloneError;

/// How often the heartbeat comes beside its thread: some times before the keeper takes it for still.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
/// One piece of work may take so long, as a save that others do may.
const WORK_TIME_MAX: Duration = Duration::from_secs(5);

/// The heartbeat of one thread. Without a heartbeat nothing beats, and all else is the same.
#[derive(Debug)]
pub struct Heartbeat {
    slot: Option<Arc<HeartbeatSlot>>,
    work: Arc<Work>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Work {
    /// When this was made.
    origin: Instant,
    /// When the present work was begun, in milliseconds since then and one more; 0: the thread is at none.
    begun_ms: AtomicU64,
    time_max: Duration,
    /// How often it was looked whether a heartbeat is due.
    looks: AtomicU64,
    stop: AtomicBool,
}

impl Heartbeat {
    /// Beats `slot` while its thread works.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: no thread can be started.
    pub fn start(slot: Option<HeartbeatSlot>) -> Result<Heartbeat, CloneError> {
        Heartbeat::start_with(slot, HEARTBEAT_INTERVAL, WORK_TIME_MAX)
    }

    fn start_with(
        slot: Option<HeartbeatSlot>,
        interval: Duration,
        time_max: Duration,
    ) -> Result<Heartbeat, CloneError> {
        let slot = slot.map(Arc::new);
        let (begun_ms, looks, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let work = Arc::new(Work { origin: Instant::now(), begun_ms, time_max, looks, stop });
        let beside = slot.clone().map(|slot| {
            let work = Arc::clone(&work);
            let thread = std::thread::Builder::new().name("clone-heartbeat".to_owned());
            thread.spawn(move || beat_beside(&slot, &work, interval)).map_err(CloneError::kernel("start a thread"))
        });
        Ok(Heartbeat { slot, work, thread: beside.transpose()? })
    }

    /// The thread lives.
    pub fn beat(&self) {
        if let Some(slot) = &self.slot {
            slot.beat();
        }
    }

    /// Does `work`, which may wait for a disk.
    pub fn during<R>(&self, work: impl FnOnce() -> R) -> R {
        self.beat();
        self.work.begun_ms.store(self.work.now_ms(), Ordering::Release);
        let done = work();
        self.work.begun_ms.store(0, Ordering::Release);
        done
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.work.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Work {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }

    /// Whether the thread is at work that has not taken too long yet.
    fn goes_on(&self) -> bool {
        match self.begun_ms.load(Ordering::Acquire) {
            0 => false,
            begun_ms => Duration::from_millis(self.now_ms().saturating_sub(begun_ms)) < self.time_max,
        }
    }
}

fn beat_beside(slot: &HeartbeatSlot, work: &Work, interval: Duration) {
    while !work.stop.load(Ordering::Acquire) {
        if work.goes_on() {
            slot.beat();
        }
        work.looks.fetch_add(1, Ordering::Release);
        std::thread::park_timeout(interval);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fanotify::Journal;

    const INTERVAL: Duration = Duration::from_millis(1);
    /// As good as for ever.
    const LONG: Duration = Duration::from_secs(3600);

    fn wait(until: impl Fn() -> bool) {
        let begin = Instant::now();
        while !until() {
            assert!(begin.elapsed() < Duration::from_secs(60));
            std::thread::sleep(INTERVAL);
        }
    }

    #[test]
    fn a_heart_beats_beside_work_and_not_beside_a_thread_that_is_at_none() {
        let journal = Arc::new(Journal::create().unwrap());
        let heartbeat = Heartbeat::start_with(journal.heartbeat_slot(), INTERVAL, LONG).unwrap();
        let looked = |times: u64| {
            let before = heartbeat.work.looks.load(Ordering::Acquire);
            wait(|| heartbeat.work.looks.load(Ordering::Acquire) > before + times);
        };
        let idle = journal.heartbeats();
        looked(20);
        assert_eq!(journal.heartbeats(), idle, "a thread that hangs somewhere else is dead");
        heartbeat.during(|| {
            let before = journal.heartbeats();
            wait(|| journal.heartbeats() > before);
        });
        // One that was under way when the work ended.
        looked(2);
        let after = journal.heartbeats();
        looked(20);
        assert_eq!(journal.heartbeats(), after);
    }

    #[test]
    fn work_that_takes_too_long_is_left_to_the_keeper() {
        let journal = Arc::new(Journal::create().unwrap());
        let heartbeat = Heartbeat::start_with(journal.heartbeat_slot(), INTERVAL, Duration::ZERO).unwrap();
        heartbeat.during(|| {
            let (before, looks) = (journal.heartbeats(), heartbeat.work.looks.load(Ordering::Acquire));
            wait(|| heartbeat.work.looks.load(Ordering::Acquire) > looks + 20);
            assert_eq!(journal.heartbeats(), before);
        });
    }

    #[test]
    fn without_a_heart_work_is_done_all_the_same() {
        assert_eq!(Heartbeat::start(None).unwrap().during(|| 7), 7);
    }
}
