//! Threads of one connection for what may wait and what the disk's own workers do not do: reads of snapshots, states of
//! extents.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use tracing::warn;

use super::Place;

/// Threads of one connection; they come as they are needed and stay until it ends. More wait in the queue, which is
/// bounded by what a connection may have in flight.
const THREADS_MAX: usize = 8;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// The connection's; each thread has it, too. None once the connection is over.
    place: Option<Arc<Place>>,
}

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
            if state.place.is_none() {
                state.threads -= 1;
                return;
            }
            state.idle += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

/// The threads. Each keeps the connection's place until it has ended, however long what it does takes.
pub(super) struct Workers {
    pool: Arc<Pool>,
}

impl Workers {
    pub(super) fn new(place: Arc<Place>) -> Workers {
        let state = State { place: Some(place), ..State::default() };
        Workers { pool: Arc::new(Pool { state: Mutex::new(state), changed: Condvar::new() }) }
    }

    /// Does it soon, or never once the connection is over. Never waits itself.
    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.pool.state();
        let Some(place) = state.place.clone() else { return };
        state.jobs.push_back(Box::new(job));
        if state.idle >= state.jobs.len() || state.threads == THREADS_MAX {
            self.pool.changed.notify_one();
            return;
        }
        let pool = Arc::clone(&self.pool);
        let spawned = thread::Builder::new().name("nbd-work".into()).spawn(move || {
            pool.work();
            drop(place);
        });
        match spawned {
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

    /// The connection is over: what was begun is still done, what waits is dropped.
    pub(super) fn end(&self) {
        let mut state = self.pool.state();
        let (jobs, place) = (std::mem::take(&mut state.jobs), state.place.take());
        drop(state);
        self.pool.changed.notify_all();
        drop((jobs, place));
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.end();
    }
}
