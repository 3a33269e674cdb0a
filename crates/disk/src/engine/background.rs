//! What an open disk does of its own accord.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::{Core, PENDING_RUNS_WAKE, checkpoint};
use crate::DiskError;

/// How long released space may wait for a flush that commits it.
const TICK: Duration = Duration::from_millis(500);

/// How long to leave a full or failing file system alone.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(5);

/// Wakes the background, or ends it.
#[derive(Default)]
pub(crate) struct Signal {
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Signal {
    pub(crate) fn wake(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0 = true;
        self.changed.notify_one();
    }

    pub(crate) fn end(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.changed.notify_one();
    }

    /// Waits until there may be something to do; `false` at the end. Nobody wakes it from a pause.
    fn wait(&self, pause: Duration) -> bool {
        let is_pause = !pause.is_zero();
        let waits = |(is_woken, is_ended): &mut (bool, bool)| (is_pause || !*is_woken) && !*is_ended;
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = self.changed.wait_timeout_while(state, TICK.max(pause), waits);
        let mut state = outcome.unwrap_or_else(PoisonError::into_inner).0;
        state.0 = false;
        !state.1
    }
}

/// The background's thread: until the signal's end.
pub(crate) fn run(core: &Arc<Core>, needs_checkpoint: bool) {
    let mut needs_checkpoint = needs_checkpoint;
    let mut pause = Duration::ZERO;
    while needs_checkpoint && pause.is_zero() || core.signal.wait(pause) {
        pause = match core.tend(needs_checkpoint) {
            Ok(()) => {
                needs_checkpoint = false;
                Duration::ZERO
            }
            Err(error) => {
                tracing::warn!(%error, "a disk's housekeeping waits");
                PAUSE_AFTER_FAILURE
            }
        };
    }
}

impl Core {
    /// All that is to do now.
    fn tend(&self, needs_checkpoint: bool) -> Result<(), DiskError> {
        self.remove_released(false);
        let pending = self.pending_runs.load(Ordering::Relaxed);
        let is_failed = self.failure.get().is_some();
        if !is_failed && (pending >= PENDING_RUNS_WAKE || !self.freed().is_empty()) {
            self.commit(&[])?;
        }
        self.reclaim();
        let is_long = {
            let committer = self.committer();
            let recent = self.recent.read().unwrap_or_else(PoisonError::into_inner);
            committer.end > self.journal_bytes_max(&committer)
                || recent.end.load(Ordering::Relaxed) > checkpoint::RECENT_BYTES_MAX
        };
        if !is_failed && (needs_checkpoint || is_long) { self.checkpoint() } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A full file system is left alone, however often a commit wants a checkpoint; the end is heard at once.
    ///
    /// Spec: L2
    #[test]
    fn b8_nobody_wakes_the_background_from_its_pause() {
        let signal = Signal::default();
        let pause = TICK + Duration::from_millis(50);
        signal.wake();
        let begun = Instant::now();
        assert!(signal.wait(Duration::ZERO));
        assert!(begun.elapsed() < TICK);
        signal.wake();
        let begun = Instant::now();
        assert!(signal.wait(pause));
        assert!(begun.elapsed() >= pause);
        signal.end();
        assert!(!signal.wait(Duration::from_secs(600)));
    }
}
