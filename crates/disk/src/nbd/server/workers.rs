//! Threads of one connection for what may wait and what the disk's own workers do not do: reads of snapshots, states of extents.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use tracing::warn;

/// Threads of one connection; they come as they are needed and stay until it ends. More wait in the queue, which is bounded by what a
/// connection may have in flight.
const THREADS_MAX: usize = 8;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    is_over: bool,
}

#[derive(Default)]
struct Pool {
    state: Mutex<State>,
    changed: Condvar,
}

impl Pool {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.state();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.state();
                continue;
            }
            if state.is_over {
                state.threads -= 1;
                return;
            }
            state.idle += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

/// The threads. What was begun or waits when this is dropped is still done.
#[derive(Default)]
pub(super) struct Workers {
    pool: Arc<Pool>,
}

impl Workers {
    /// Does it soon. Never waits itself.
    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.pool.state();
        state.jobs.push_back(Box::new(job));
        if state.idle >= state.jobs.len() || state.threads == THREADS_MAX {
            self.pool.changed.notify_one();
            return;
        }
        let pool = Arc::clone(&self.pool);
        match thread::Builder::new().name("nbd-work".into()).spawn(move || pool.work()) {
            Ok(_) => state.threads += 1,
            Err(error) if state.threads > 0 => warn!(%error, "no further thread for requests"),
            Err(error) => {
                warn!(%error, "no thread for requests");
                // Dropped, a job tells its client that it failed; outside the lock, since that may come back here.
                let jobs = std::mem::take(&mut state.jobs);
                drop(state);
                drop(jobs);
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.pool.state().is_over = true;
        self.pool.changed.notify_all();
    }
}
