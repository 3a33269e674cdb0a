//! Cancel requests: each hits the statement that runs when it comes, or nothing.
//!
//! A server passes a request on some time after it has got it, and closes the connection then. Whoever ends a statement
//! waits for the requests that are on their way to its back end, so that they find nothing else there; who sends one
//! hears of its end only then.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::CancelKey;
use crate::state::{CancelKeys, RouterState};

/// A cancel request that has not reached its server within this is not waited for; the back end then serves nobody
/// else.
const CANCEL_LANDS_WITHIN: Duration = Duration::from_secs(5);

/// What a cancel request of this client hits.
#[derive(Debug, Default)]
pub struct CancelSlot {
    running: Mutex<Running>,
    /// A request has reached its server, or was given up.
    landed: Notify,
}

#[derive(Debug, Default)]
struct Running {
    key: Option<Arc<CancelKey>>,
    /// Requests on their way to the server.
    under_way: usize,
    /// One was given up on its way, so nobody knows when it comes.
    may_come_late: bool,
}

/// A cancel request on its way.
#[derive(Debug)]
pub struct Cancelling<'a> {
    slot: &'a CancelSlot,
    key: Arc<CancelKey>,
    has_landed: bool,
}

impl Cancelling<'_> {
    /// Sends it, and waits until it can hit nothing that begins later; longer than [`CANCEL_LANDS_WITHIN`] it is not
    /// waited for.
    pub async fn send(mut self) {
        match tokio::time::timeout(CANCEL_LANDS_WITHIN, self.key.send()).await {
            Ok(Ok(())) => self.has_landed = true,
            Ok(Err(error)) => tracing::debug!(%error, "a cancel request did not reach its server"),
            Err(_) => tracing::debug!("a server does not take a cancel request"),
        }
    }
}

impl Drop for Cancelling<'_> {
    fn drop(&mut self) {
        {
            let mut running = self.slot.running();
            running.under_way -= 1;
            running.may_come_late |= !self.has_landed;
        }
        self.slot.landed.notify_one();
    }
}

impl CancelSlot {
    fn running(&self) -> std::sync::MutexGuard<'_, Running> {
        self.running.lock().expect("no code panics while it holds this lock")
    }

    pub(super) fn begin(&self, key: Arc<CancelKey>) {
        self.running().key = Some(key);
    }

    /// The statement has ended. Waits for cancel requests that are on their way to its back end, so that they hit
    /// nothing that is begun there afterwards; false when one may still come.
    pub(super) async fn end(&self) -> bool {
        let has_landed = || {
            let mut running = self.running();
            running.key = None;
            (running.under_way == 0).then(|| !std::mem::take(&mut running.may_come_late))
        };
        loop {
            if let Some(has_landed) = has_landed() {
                return has_landed;
            }
            // It is sent, or given up, within its bound.
            self.landed.notified().await;
        }
    }

    /// Cancels what is running now, if anything is.
    pub fn cancel(&self) -> Option<Cancelling<'_>> {
        let mut running = self.running();
        let key = running.key.clone()?;
        running.under_way += 1;
        Some(Cancelling { slot: self, key, has_landed: false })
    }
}

/// By which number a client knows its session, in `BackendKeyData` and in notifications: beyond those of all server
/// processes (Linux has at most 2^22), so that nobody who ends or cancels a process by it means another one.
pub(super) fn process_id(session: u64) -> u32 {
    const FIRST: u64 = 1 << 30;
    u32::try_from(FIRST | (session % FIRST)).expect("it has 31 bits")
}

/// Which clients may be cancelled by which key.
pub(super) fn cancels(router: &RouterState) -> std::sync::MutexGuard<'_, CancelKeys> {
    router.cancels.lock().expect("no code panics while it holds this lock")
}

/// Passes a cancel request on to what runs for its client, and waits until it has landed there.
pub(super) async fn cancel(router: &RouterState, process_id: u32, secret: u32) {
    let slot = cancels(router).get(&(process_id, secret)).and_then(std::sync::Weak::upgrade);
    if let Some(cancelling) = slot.as_deref().and_then(CancelSlot::cancel) {
        cancelling.send().await;
    }
}
