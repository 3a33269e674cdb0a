//! Threads that wait for disks, so that the listener need not.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::traffic::{Patience, Traffic, Waiting};
use crate::CloneError;

/// Disks have queues, too: more threads would only wait in them.
const WORKERS: usize = 8;
/// Accesses that wait for a worker; when it is full, the listener waits for room.
const WORK_QUEUE_MAX: usize = 1024;
/// How often it looks for room.
const ROOM_INTERVAL: Duration = Duration::from_millis(1);

/// The threads; they end when this is dropped and all that was handed over is answered.
pub(super) struct Workers {
    queue: Option<SyncSender<Waiting>>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    pub(super) fn start(traffic: &Arc<Traffic>) -> Result<Workers, CloneError> {
        let (queue, work) = sync_channel(WORK_QUEUE_MAX);
        let work = Arc::new(Mutex::new(work));
        let mut workers = Workers { queue: Some(queue), threads: Vec::new() };
        for number in 0..WORKERS {
            let (traffic, work) = (Arc::clone(traffic), Arc::clone(&work));
            let thread = std::thread::Builder::new()
                .name(format!("source-save-{number}"))
                .spawn(move || serve(&traffic, &work))
                .map_err(CloneError::kernel("start a thread"))?;
            workers.threads.push(thread);
        }
        Ok(workers)
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
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.queue = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve(traffic: &Traffic, work: &Mutex<Receiver<Waiting>>) {
    let _guard = AbortOnPanic;
    loop {
        let next = work.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(waiting) = next else { return };
        let unsettled = traffic.settle(waiting, Patience::Any);
        debug_assert!(unsettled.is_none(), "there is no more patience than any");
    }
}

/// A thread of this room that ends without having answered would leave back ends waiting for ever; without the process they go on.
pub(super) struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}
