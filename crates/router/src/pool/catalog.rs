//! The connection on which the router reads the catalog of one database.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::backend::Backend;

/// DDL comes in a row, as in a migration; who waits longer for the next statement can wait for a log-in as well.
const CATALOG_IDLE_MAX: Duration = Duration::from_secs(10);

/// One connection is kept for a while: a server process that has read the catalog before has in its caches what another
/// one would look up again.
#[derive(Debug, Default)]
pub struct CatalogBackend(Mutex<Slot>);

#[derive(Debug, Default)]
enum Slot {
    #[default]
    Empty,
    Free(Box<Backend>),
    /// Nothing is kept: the database must be without connections.
    Closed,
}

impl CatalogBackend {
    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.0.lock().expect("no code panics while it holds this lock")
    }

    /// The connection, if it is there and still good.
    pub fn take(&self) -> Option<Backend> {
        let mut slot = self.slot();
        if matches!(*slot, Slot::Closed) {
            return None;
        }
        match std::mem::take(&mut *slot) {
            Slot::Free(mut backend) => backend.is_alive().then_some(*backend),
            Slot::Empty | Slot::Closed => None,
        }
    }

    /// Keeps a connection on which nothing is under way. There may be another one by now: then this one is closed.
    pub fn put_back(&self, mut backend: Backend) {
        backend.idle_since = Instant::now();
        let mut slot = self.slot();
        if matches!(*slot, Slot::Empty) {
            *slot = Slot::Free(Box::new(backend));
        }
    }

    /// Closes the connection, and keeps none from now on.
    pub fn close(&self) {
        *self.slot() = Slot::Closed;
    }

    /// Keeps one again.
    pub fn reopen(&self) {
        let mut slot = self.slot();
        if matches!(*slot, Slot::Closed) {
            *slot = Slot::Empty;
        }
    }

    /// Closes the connection when it has been idle for long.
    pub fn sweep(&self) {
        let mut slot = self.slot();
        if matches!(&*slot, Slot::Free(backend) if backend.idle_since.elapsed() > CATALOG_IDLE_MAX) {
            *slot = Slot::Empty;
        }
    }
}
