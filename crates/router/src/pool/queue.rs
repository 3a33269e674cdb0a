//! Who waits for a back end of a pool, in the order in which they came.
//!
//! Only the first one looks; whoever gives a back end back, closes one, or raises the pool's bound wakes it. Nobody who
//! comes later is served before it. A session waits for one back end at a time, so no more wait than there may be
//! clients, and each no longer than its time-out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout_at;

use crate::config::{LiveSettings, RouterSettings};

/// The slots of a pool, and who waits for one.
#[derive(Debug)]
pub(super) struct Queue {
    settings: LiveSettings,
    /// Which of them bounds the pool.
    limit: fn(&RouterSettings) -> usize,
    slots: Arc<Slots>,
    /// Whoever has it is the first. Tokio's semaphores give in the order in which they were asked.
    turn: Semaphore,
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Slots {
    taken: AtomicUsize,
    /// A slot is free, or a back end.
    offered: Notify,
}

/// Counts a back end against its pool's bound until it is dropped.
#[derive(Debug)]
pub struct Slot(Arc<Slots>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, SeqCst);
        self.0.offered.notify_one();
    }
}

/// One who waits, counted until he is served or gives up.
struct Waiter<'a>(&'a AtomicUsize);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Queue {
    /// Nobody waits yet for a slot; of them there are as many as `limit` says at the time.
    pub(super) fn new(settings: LiveSettings, limit: fn(&RouterSettings) -> usize) -> Queue {
        Queue { settings, limit, slots: Arc::default(), turn: Semaphore::new(1), waiting: AtomicUsize::new(0) }
    }

    /// How many back ends there may be now.
    pub(super) fn limit(&self) -> usize {
        (self.limit)(&self.settings.borrow())
    }

    /// What `look` finds when it is one's turn; it is asked again whenever something was offered or a slot is free.
    /// None when `deadline` is over before.
    pub(super) async fn wait<T>(&self, deadline: Instant, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        self.waiting.fetch_add(1, SeqCst);
        let _waiter = Waiter(&self.waiting);
        let _turn = timeout_at(deadline.into(), self.turn.acquire()).await.ok()?;
        if let Some(found) = look() {
            return Some(found);
        }
        let mut settings = self.settings.clone();
        loop {
            settings.mark_unchanged();
            if let Some(found) = look() {
                return Some(found);
            }
            let woken = async {
                tokio::select! {
                    () = self.slots.offered.notified() => {}
                    Ok(()) = settings.changed() => {}
                }
            };
            timeout_at(deadline.into(), woken).await.ok()?;
        }
    }

    /// A slot for a back end that is to be made. Only for who looks.
    pub(super) fn slot(&self) -> Option<Slot> {
        let limit = self.limit();
        let next = |taken: usize| (taken < limit).then_some(taken + 1);
        self.slots.taken.fetch_update(SeqCst, SeqCst, next).ok()?;
        Some(Slot(self.slots.clone()))
    }

    /// Whether a back end may still be made.
    pub(super) fn has_place(&self) -> bool {
        self.slots.taken.load(SeqCst) < self.limit()
    }

    /// Whether there are more back ends than there may be by now: one that is not in use is to be closed.
    pub(super) fn is_over_limit(&self) -> bool {
        self.slots.taken.load(SeqCst) > self.limit()
    }

    /// There is a back end that the first one may take.
    pub(super) fn offer(&self) {
        self.slots.offered.notify_one();
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(SeqCst)
    }
}
