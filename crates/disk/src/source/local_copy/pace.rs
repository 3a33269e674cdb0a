//! How fast the background may go: within a limit, and out of the way of those who wait for the source now.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::header::CLUSTER_BYTES;

/// For so long after a reader had to wait, the background asks for one thing at a time: more reads are likely to
/// follow.
const COURTESY: Duration = Duration::from_millis(50);

/// Clusters fetched at a time when nothing limits the background.
const RUN_CLUSTERS_MAX: u64 = 16;

/// With a limit, so many steps a second: smaller ones are smoother, larger ones cheaper.
const STEPS_PER_SECOND: u64 = 10;

struct State {
    limit_bytes_per_second: Option<u64>,
    /// When the limit allows the next step.
    free_at: Instant,
    /// Readers that wait for the source.
    waiting: usize,
    waited_at: Option<Instant>,
    is_closed: bool,
}

/// The pace.
pub(super) struct Pace {
    state: Mutex<State>,
    changed: Condvar,
}

impl Pace {
    pub(super) fn new(limit_bytes_per_second: Option<u64>) -> Pace {
        let state =
            State { limit_bytes_per_second, free_at: Instant::now(), waiting: 0, waited_at: None, is_closed: false };
        Pace { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn limit_bytes_per_second(&self) -> Option<u64> {
        self.state().limit_bytes_per_second
    }

    pub(super) fn set_limit(&self, bytes_per_second: Option<u64>) {
        let mut state = self.state();
        state.limit_bytes_per_second = bytes_per_second;
        // What the old limit had booked ahead does not bind the new one.
        state.free_at = Instant::now();
        drop(state);
        self.changed.notify_all();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }

    /// How many clusters to fetch in one step.
    pub(super) fn run_clusters(&self) -> u64 {
        match self.state().limit_bytes_per_second {
            None => RUN_CLUSTERS_MAX,
            Some(limit) => (limit / STEPS_PER_SECOND / CLUSTER_BYTES).clamp(1, RUN_CLUSTERS_MAX),
        }
    }

    /// A reader waits for the source until what this returns is dropped.
    pub(super) fn reader(&self) -> Reader<'_> {
        self.state().waiting += 1;
        Reader(self)
    }

    /// Waits until the background may begin a step; false when it shall end. `is_first` marks the one thread that goes
    /// on, a step at a time, while readers wait.
    pub(super) fn begin_step(&self, is_first: bool) -> bool {
        let mut state = self.state();
        loop {
            let now = Instant::now();
            let courtesy = match state.waited_at {
                _ if is_first => None,
                _ if state.waiting > 0 => Some(COURTESY),
                Some(waited_at) => Some(COURTESY.saturating_sub(now - waited_at)).filter(|left| !left.is_zero()),
                None => None,
            };
            let limit = match state.limit_bytes_per_second {
                // Nothing at all, until that changes.
                Some(0) => Some(Duration::MAX),
                Some(_) => Some(state.free_at.saturating_duration_since(now)).filter(|left| !left.is_zero()),
                None => None,
            };
            let pause = match (courtesy, limit) {
                _ if state.is_closed => return false,
                (None, None) => return true,
                (Some(one), Some(other)) => one.max(other),
                (Some(only), None) | (None, Some(only)) => only,
            };
            // Woken early nothing is lost: the reasons to wait are looked at again.
            let waited = self.changed.wait_timeout(state, pause.min(Duration::from_secs(3600)));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Books what a step takes, before it is taken.
    pub(super) fn book(&self, bytes: u64) {
        let mut state = self.state();
        if let Some(limit) = state.limit_bytes_per_second.filter(|limit| *limit > 0) {
            let takes = Duration::from_secs_f64(bytes as f64 / limit as f64);
            state.free_at = state.free_at.max(Instant::now()) + takes;
        }
    }

    /// Waits, or ends with false when the background shall end.
    pub(super) fn rest(&self, pause: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.state(), pause, |state| !state.is_closed);
        !waited.unwrap_or_else(PoisonError::into_inner).0.is_closed
    }
}

/// A reader that waits.
pub(super) struct Reader<'a>(&'a Pace);

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.waiting -= 1;
        state.waited_at = Some(Instant::now());
    }
}
