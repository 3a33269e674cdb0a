//! Threads for requests that may wait.
//!
//! Three pools of threads, so that nobody waits behind what takes longer: what the local disk answers, what another
//! host answers, and flushes, of which all that wait are done as one.

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Core, View, WaitPolicy};
use crate::source::Source;
use crate::{Completion, DiskError, Request, Requester};

/// Requests that wait in one pool; who submits more waits for room. The servers have fewer in flight than this.
pub(crate) const QUEUE_MAX: usize = 4096;
const LOCAL_THREADS_MAX: usize = 4;
/// More than local ones: each waits for the network most of the time.
pub(crate) const REMOTE_THREADS_MAX: usize = 16;
/// Bytes that are zeroed at a time: then it is the others' turn, since one request may ask for 4 GiB.
pub(super) const ZERO_STEP_BYTES: u64 = 4 << 20;

type Result<T> = std::result::Result<T, DiskError>;

/// A request on its way.
struct Job {
    request: Request,
    /// It is flushed before it is answered.
    is_durable: bool,
    /// Bytes of it that are zeroed already.
    zeroed_bytes: u64,
    waiter: Arc<Waiter>,
}

/// Who waits for a request. Whoever takes the completion out calls it: its worker, or the close that waits no longer.
/// Of one that was withdrawn nobody calls it.
struct Waiter {
    requester: Option<Requester>,
    completion: Mutex<Option<Completion>>,
}

impl Waiter {
    fn has_withdrawn(&self) -> bool {
        self.requester.as_ref().is_some_and(Requester::has_withdrawn)
    }

    fn take(&self) -> Option<Completion> {
        self.completion.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn complete(&self, outcome: Result<Vec<u8>>) {
        if let Some(completion) = self.take().filter(|_| !self.has_withdrawn()) {
            completion(outcome);
        }
    }
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    running: Vec<Arc<Waiter>>,
    threads: usize,
    idle: usize,
    is_closed: bool,
}

struct Pool {
    name: &'static str,
    threads_max: usize,
    /// Where what is to be durable goes on; none in that pool itself.
    flush: Option<Arc<Pool>>,
    state: Mutex<State>,
    /// There is work, or no more to come.
    work: Condvar,
    /// Something was taken or done.
    progress: Condvar,
}

/// The pools of a disk.
pub(crate) struct Workers {
    core: Arc<Core>,
    local: Arc<Pool>,
    remote: Arc<Pool>,
    flush: Arc<Pool>,
}

/// What a worker is at. Whoever waits for it is answered also when the worker panics, and another can take its place.
struct InProgress<'a> {
    pool: &'a Pool,
    waiters: Vec<Arc<Waiter>>,
    /// What is left of it: it waits again, behind the others.
    left: Option<Job>,
}

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        let is_panicking = std::thread::panicking();
        let mut state = self.pool.state();
        state.running.retain(|running| !self.waiters.iter().any(|done| Arc::ptr_eq(running, done)));
        state.threads -= usize::from(is_panicking);
        // Once the pool is closed its completion was called. The room in the queue is the one that it had.
        let is_left = self.left.is_some() && !state.is_closed;
        state.jobs.extend(self.left.take().filter(|_| is_left));
        drop(state);
        if is_left {
            self.pool.work.notify_one();
        }
        for waiter in self.waiters.iter().filter(|_| is_panicking) {
            waiter.complete(Err(DiskError::Panicked));
        }
        self.pool.progress.notify_all();
    }
}

impl Pool {
    fn new(name: &'static str, threads_max: usize, flush: Option<Arc<Pool>>) -> Arc<Pool> {
        let (state, work, progress) = (Mutex::default(), Condvar::new(), Condvar::new());
        Arc::new(Pool { name, threads_max, flush, state, work, progress })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(self: &Arc<Pool>, core: &Arc<Core>, job: Job) {
        let mut state = self.state();
        while state.jobs.len() >= QUEUE_MAX && !state.is_closed && !job.waiter.has_withdrawn() {
            state = self.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.put(core, state, job);
    }

    fn put(self: &Arc<Pool>, core: &Arc<Core>, mut state: MutexGuard<'_, State>, job: Job) {
        if state.is_closed || job.waiter.has_withdrawn() {
            drop(state);
            return job.waiter.complete(Err(DiskError::Closed));
        }
        state.jobs.push_back(job);
        if state.idle < state.jobs.len() && state.threads < self.threads_max {
            let (pool, its_core) = (self.clone(), core.clone());
            let spawned = std::thread::Builder::new().name(self.name.into()).spawn(move || pool.work(&its_core));
            match spawned {
                Ok(_) => state.threads += 1,
                // The threads that are there do it, later. Without any it is done here.
                Err(error) if state.threads > 0 => tracing::warn!(%error, "a disk works with fewer threads"),
                Err(_) => {
                    let mut job = state.jobs.pop_back();
                    drop(state);
                    while let Some(step) = job {
                        job = match core.perform_all(vec![step]) {
                            Some(Left::Rest(rest) | Left::Flush(rest)) => Some(rest),
                            None => None,
                        };
                    }
                    return;
                }
            }
        }
        drop(state);
        self.work.notify_one();
    }

    /// The thread of a worker.
    fn work(&self, core: &Arc<Core>) {
        loop {
            let mut state = self.state();
            state.idle += 1;
            while state.jobs.is_empty() && !state.is_closed {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.idle -= 1;
            let count = if self.threads_max == 1 { state.jobs.len() } else { state.jobs.len().min(1) };
            let was_full = state.jobs.len() >= QUEUE_MAX;
            let jobs: Vec<Job> = state.jobs.drain(..count).collect();
            if was_full {
                self.progress.notify_all();
            }
            if jobs.is_empty() {
                state.threads -= 1;
                return;
            }
            state.running.extend(jobs.iter().map(|job| job.waiter.clone()));
            drop(state);
            let waiters = jobs.iter().map(|job| job.waiter.clone()).collect();
            let mut doing = InProgress { pool: self, waiters, left: None };
            match core.perform_all(jobs) {
                Some(Left::Rest(job)) => doing.left = Some(job),
                // Before it leaves this pool: a close waits for it in one of the two. It has had its room in a queue.
                Some(Left::Flush(job)) => {
                    if let Some(flush) = &self.flush {
                        flush.put(core, flush.state(), job);
                    }
                }
                None => {}
            }
        }
    }

    /// Waits until all is done, at most until the deadline; then takes nothing any more, and what is not done fails.
    fn close(&self, deadline: Instant) {
        let mut state = self.state();
        while !state.jobs.is_empty() || !state.running.is_empty() {
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                break;
            }
            state = self.progress.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_closed = true;
        let mut left = std::mem::take(&mut state.running);
        left.extend(state.jobs.drain(..).map(|job| job.waiter));
        drop(state);
        self.work.notify_all();
        self.progress.notify_all();
        left.iter().for_each(|waiter| waiter.complete(Err(DiskError::Closed)));
    }

    /// Lets go of what was withdrawn: it leaves the queue, and nobody is told of what is at work still.
    fn forget_withdrawn(&self) {
        let mut state = self.state();
        let (withdrawn, jobs) = std::mem::take(&mut state.jobs).into_iter().partition(|job| job.waiter.has_withdrawn());
        state.jobs = jobs;
        let unheard: Vec<_> =
            state.running.iter().filter(|waiter| waiter.has_withdrawn()).filter_map(|waiter| waiter.take()).collect();
        drop(state);
        self.progress.notify_all();
        // Outside the lock: with a completion may go what asks again.
        drop((withdrawn, unheard));
    }

    fn pending(&self) -> usize {
        let state = self.state();
        state.jobs.len() + state.running.len()
    }

    /// Whether something of this requester waits or is at work here.
    fn has(&self, requester: &Requester) -> bool {
        let state = self.state();
        let mut waiters = state.jobs.iter().map(|job| &job.waiter).chain(&state.running);
        waiters.any(|waiter| waiter.requester.as_ref().is_some_and(|own| own.is(requester)))
    }
}

impl Workers {
    pub(crate) fn new(core: Arc<Core>) -> Workers {
        let flush = Pool::new("disk-flush", 1, None);
        Workers {
            core,
            local: Pool::new("disk-local", LOCAL_THREADS_MAX, Some(flush.clone())),
            remote: Pool::new("disk-remote", REMOTE_THREADS_MAX, Some(flush.clone())),
            flush,
        }
    }

    /// With `is_durable` it is flushed before it is answered, as a flush is.
    pub(crate) fn submit(
        &self,
        request: Request,
        is_durable: bool,
        requester: Option<Requester>,
        completion: Completion,
    ) {
        let pool = match &request {
            Request::Flush => &self.flush,
            Request::Read { offset, length, .. } => self.pool(*offset, *length),
            Request::Write { offset, data, .. } => self.pool(*offset, data.len() as u64),
            // Whole blocks are zeros without a look at the base.
            Request::Discard { offset, length } | Request::WriteZeroes { offset, length, .. }
                if (offset | length).is_multiple_of(crate::BLOCK_BYTES) =>
            {
                &self.local
            }
            Request::Discard { offset, length } | Request::WriteZeroes { offset, length, .. } => {
                self.pool(*offset, *length)
            }
        };
        let waiter = Arc::new(Waiter { requester, completion: Mutex::new(Some(completion)) });
        let is_durable = is_durable && !matches!(request, Request::Flush);
        pool.submit(&self.core, Job { request, is_durable, zeroed_bytes: 0, waiter });
    }

    fn pool(&self, offset: u64, length: u64) -> &Arc<Pool> {
        // A partly written block needs the whole of the base's.
        let (begin, length) = (offset & !(crate::BLOCK_BYTES - 1), length.saturating_add(2 * crate::BLOCK_BYTES));
        let is_local = self.core.base.is_none() || View::current(self.core.clone()).is_local(begin, length);
        if is_local { &self.local } else { &self.remote }
    }

    /// Waits for what was submitted, for `wait_policy` at most, and then lets the rest fail.
    pub(crate) fn close(&self, wait_policy: Duration) {
        let deadline = Instant::now() + wait_policy;
        self.pools().into_iter().for_each(|pool| pool.close(deadline));
    }

    pub(crate) fn forget_withdrawn(&self) {
        self.pools().into_iter().for_each(|pool| pool.forget_withdrawn());
    }

    fn pools(&self) -> [&Pool; 3] {
        [&self.local, &self.remote, &self.flush]
    }

    /// Whether something of this requester waits for this host alone: it ends, however slow the disk.
    pub(crate) fn has_local(&self, requester: &Requester) -> bool {
        self.local.has(requester) || self.flush.has(requester)
    }

    pub(crate) fn pending(&self) -> usize {
        self.pools().into_iter().map(Pool::pending).sum()
    }
}

impl Core {
    /// Does them; gives what is left to be done of one.
    fn perform_all(&self, jobs: Vec<Job>) -> Option<Left> {
        let are_flushes = jobs.len() > 1;
        if are_flushes && self.flush().is_ok() {
            jobs.iter().for_each(|job| job.waiter.complete(Ok(Vec::new())));
            return None;
        }
        let mut left = None;
        for job in jobs {
            match self.perform(&job.request, job.zeroed_bytes, job.waiter.requester.as_ref()) {
                Ok(Progress::Done(_)) if job.is_durable => {
                    left = Some(Left::Flush(Job { request: Request::Flush, is_durable: false, ..job }));
                }
                Ok(Progress::Done(bytes)) => job.waiter.complete(Ok(bytes)),
                Ok(Progress::Zeroed(zeroed_bytes)) => left = Some(Left::Rest(Job { zeroed_bytes, ..job })),
                Err(error) => job.waiter.complete(Err(error)),
            }
        }
        left
    }

    /// Does a request, or the next step of one of which so many bytes are zeroed.
    fn perform(&self, request: &Request, zeroed_bytes: u64, requester: Option<&Requester>) -> Result<Progress> {
        let wait_policy = WaitPolicy::Wait(requester);
        let nothing = Progress::Done(Vec::new());
        match request {
            Request::Read { offset, length, segments } => {
                // Checked before memory is taken for it.
                self.check_range(*offset, *length)?;
                let mut bytes = vec![0; *length as usize];
                self.read(*offset, &mut [IoSliceMut::new(&mut bytes)], segments, wait_policy)?;
                Ok(Progress::Done(bytes))
            }
            Request::Write { offset, data, segments } => {
                self.write(*offset, data, segments, wait_policy).map(|_| nothing)
            }
            Request::Flush => self.flush().map(|()| nothing),
            Request::Discard { offset, length } => self.zero_next(*offset, *length, true, zeroed_bytes, requester),
            Request::WriteZeroes { offset, length, may_unmap } => {
                self.zero_next(*offset, *length, *may_unmap, zeroed_bytes, requester)
            }
        }
    }

    fn zero_next(
        &self,
        offset: u64,
        length: u64,
        frees_space: bool,
        zeroed_bytes: u64,
        requester: Option<&Requester>,
    ) -> Result<Progress> {
        let step = zeroed_bytes..zeroed_bytes.saturating_add(ZERO_STEP_BYTES);
        let zeroed_bytes = self.zero_step(offset, length, frees_space, step, requester)?;
        Ok(if zeroed_bytes < length { Progress::Zeroed(zeroed_bytes) } else { Progress::Done(Vec::new()) })
    }
}

/// What is left to be done.
enum Left {
    /// Of one that takes long.
    Rest(Job),
    /// Of one that is to be durable.
    Flush(Job),
}

/// How far a request is.
enum Progress {
    /// It is done; a read's bytes.
    Done(Vec<u8>),
    /// So many bytes are zeroed, and more is to be.
    Zeroed(u64),
}
