//! Who waits for a back end of a pool, in the order in which they came.
//!
//! Only the first one looks; whoever gives a back end back, or closes one, wakes it. Nobody who comes later is served
//! before it. A session waits for one back end at a time, so no more wait than there may be clients, and each no longer
//! than its time-out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout_at;

/// The slots of a pool, and who waits for one.
#[derive(Debug)]
pub(super) struct Queue {
    /// One for each back end that may still be made.
    slots: Arc<Semaphore>,
    /// Whoever has it is the first. Tokio's semaphores give in the order in which they were asked.
    turn: Semaphore,
    waiting: AtomicUsize,
    offered: Notify,
}

/// One who waits, counted until he is served or gives up.
struct Waiter<'a>(&'a AtomicUsize);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Queue {
    /// Nobody waits yet for one of `limit` slots.
    pub(super) fn new(limit: usize) -> Queue {
        Queue {
            slots: Arc::new(Semaphore::new(limit)),
            turn: Semaphore::new(1),
            waiting: AtomicUsize::new(0),
            offered: Notify::new(),
        }
    }

    /// What `look` finds when it is one's turn; it is asked again whenever something was offered or a slot is free.
    /// None when `deadline` is over before.
    pub(super) async fn wait<T>(&self, deadline: Instant, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        self.waiting.fetch_add(1, SeqCst);
        let _waiter = Waiter(&self.waiting);
        let _turn = timeout_at(deadline.into(), self.turn.acquire()).await.ok()?;
        loop {
            if let Some(found) = look() {
                return Some(found);
            }
            // A slot that is free is left for `look`: nobody else asks for one.
            let woken = async {
                tokio::select! {
                    () = self.offered.notified() => {}
                    _ = self.slots.acquire() => {}
                }
            };
            timeout_at(deadline.into(), woken).await.ok()?;
        }
    }

    /// A slot for a back end that is to be made. Only for who looks.
    pub(super) fn slot(&self) -> Option<OwnedSemaphorePermit> {
        self.slots.clone().try_acquire_owned().ok()
    }

    /// Whether a back end may still be made.
    pub(super) fn has_place(&self) -> bool {
        self.slots.available_permits() > 0
    }

    /// There is a back end that the first one may take.
    pub(super) fn offer(&self) {
        self.offered.notify_one();
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(SeqCst)
    }
}
