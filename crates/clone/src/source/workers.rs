//! Threads that wait for disks, so that the listener need not.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::access_dispatcher::{AccessDispatcher, WaitMode};
use super::pending_save::{PendingSave, Waiting};
use crate::CloneError;

/// Disks have queues, too: more threads would only wait in them.
const WORKERS: usize = 8;
/// Accesses that wait for a worker; when it is full, the listener waits for room.
const WORK_QUEUE_MAX: usize = 1024;
/// How often it looks for room.
const ROOM_INTERVAL: Duration = Duration::from_millis(1);
/// A follower that has not taken a megabyte within this is left out: its disk hangs, and the source must not.
const SAVE_TIME_MAX: Duration = Duration::from_secs(5);

/// The threads; they end when this is dropped and all that was handed over is answered. One that hangs is left to
/// itself: as many as there are for each follower, which is left out with the first.
pub(super) struct Workers {
    dispatcher: Arc<AccessDispatcher>,
    queue: Option<SyncSender<Waiting>>,
    work: Arc<Mutex<Receiver<Waiting>>>,
    workers: Mutex<Vec<Worker>>,
}

struct Worker {
    pending_save: Arc<PendingSave>,
    thread: JoinHandle<()>,
}

impl Workers {
    pub(super) fn start(dispatcher: &Arc<AccessDispatcher>) -> Result<Workers, CloneError> {
        let (queue, work) = sync_channel(WORK_QUEUE_MAX);
        let workers = Workers {
            dispatcher: Arc::clone(dispatcher),
            queue: Some(queue),
            work: Arc::new(Mutex::new(work)),
            workers: Mutex::default(),
        };
        for _ in 0..WORKERS {
            let worker = workers.start_one(Arc::default()).map_err(CloneError::kernel("start a thread"))?;
            lock(&workers.workers).push(worker);
        }
        Ok(workers)
    }

    /// One that begins with the access in `first`, if there is one.
    fn start_one(&self, first: Arc<Mutex<Option<Waiting>>>) -> std::io::Result<Worker> {
        let (dispatcher, work, pending_save) =
            (Arc::clone(&self.dispatcher), Arc::clone(&self.work), Arc::<PendingSave>::default());
        let own = Arc::clone(&pending_save);
        let thread = std::thread::Builder::new().name("source-save".to_owned()).spawn(move || {
            let first = lock(&first).take();
            serve(&dispatcher, &work, &own, first);
        })?;
        Ok(Worker { pending_save, thread })
    }

    /// Hands an access over; `meanwhile` is called now and then while there is no room.
    pub(super) fn hand_over(&self, mut waiting: Waiting, meanwhile: impl Fn()) {
        let queue = self.queue.as_ref().expect("it is there until this is dropped");
        loop {
            match queue.try_send(waiting) {
                Ok(()) => return,
                Err(TrySendError::Full(back)) => waiting = back,
                Err(TrySendError::Disconnected(_)) => unreachable!("workers end after the queue, or with the process"),
            }
            meanwhile();
            std::thread::sleep(ROOM_INTERVAL);
        }
    }

    /// Leaves out followers that saves hang on; others go on with the accesses.
    pub(super) fn replace_stuck(&self) {
        for worker in lock(&self.workers).iter_mut() {
            let Some((waiting, following)) = worker.pending_save.take_over(SAVE_TIME_MAX) else { continue };
            self.dispatcher.leave_out(
                &following,
                &format!("it has not saved a part of the source's old content within {} s", SAVE_TIME_MAX.as_secs()),
            );
            let waiting = Arc::new(Mutex::new(Some(waiting)));
            match self.start_one(Arc::clone(&waiting)) {
                Ok(other) => *worker = other,
                Err(error) => {
                    self.dispatcher.leave_all_out(&format!("no thread can be started that saves for them: {error}"));
                    let waiting = lock(&waiting).take();
                    waiting.into_iter().for_each(|waiting| self.dispatcher.allow(waiting));
                }
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.queue = None;
        for worker in lock(&self.workers).drain(..) {
            let _ = worker.thread.join();
        }
    }
}

fn serve(
    dispatcher: &AccessDispatcher,
    work: &Mutex<Receiver<Waiting>>,
    pending_save: &PendingSave,
    first: Option<Waiting>,
) {
    let _guard = AbortOnPanic;
    let mut next = first;
    while !pending_save.is_taken_over() {
        let waiting = match next.take() {
            Some(waiting) => waiting,
            None => match lock(work).recv() {
                Ok(waiting) => waiting,
                Err(_) => return,
            },
        };
        let unresolved = dispatcher.resolve(waiting, WaitMode::Blocking(pending_save));
        debug_assert!(unresolved.is_none(), "a blocking save ends with an answer");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread of these that ends without having answered would leave back ends waiting for ever; without the process
/// they go on.
pub(super) struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}
