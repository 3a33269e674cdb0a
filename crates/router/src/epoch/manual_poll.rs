//! Futures driven by hand, for tests that try every order of a few events.
//!
//! A future goes on only when it was woken, as under an executor: a waker that was forgotten shows as a future that
//! stands still.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};

use crate::backend::ServerProcess;

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, SeqCst);
    }
}

/// Something that was begun and has not ended yet. Dropping it gives it up, as a session does that is killed.
pub(super) struct Waiting<'a, T> {
    future: Pin<Box<dyn Future<Output = T> + 'a>>,
    woken: Arc<Woken>,
}

impl<'a, T> Waiting<'a, T> {
    pub(super) fn new(future: impl Future<Output = T> + 'a) -> Waiting<'a, T> {
        Waiting { future: Box::pin(future), woken: Arc::new(Woken(AtomicBool::new(true))) }
    }

    /// Goes on if it was woken; what came of it when it has ended.
    pub(super) fn advance(&mut self) -> Option<T> {
        if !self.woken.0.swap(false, SeqCst) {
            return None;
        }
        let waker = Waker::from(self.woken.clone());
        match self.future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }
}

/// A server process of this number.
pub(super) fn process(id: u32) -> ServerProcess {
    ServerProcess { id, started_us: i64::from(id) * 1000 }
}

/// A clock for time-outs that no test waits for. Timers are made inside of its `enter`.
pub(super) fn clock() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime needs nothing")
}
