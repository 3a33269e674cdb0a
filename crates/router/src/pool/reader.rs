//! Back ends for reads at epochs, on one server, in one database.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::queue::{Queue, Slot};
use super::{IDLE_MAX, PoolError};
use crate::backend::{Backend, Credentials, Purpose};
use crate::config::LiveSettings;
use crate::servers::Server;
use crate::settings::Settings;

/// How many idle back ends are looked at for one with the right settings.
const LOOKED_AT_MAX: usize = 8;

/// Idle back ends by role.
#[derive(Debug)]
pub struct ReaderPool {
    /// The server.
    pub server: Arc<Server>,
    database: Arc<str>,
    idle: Mutex<HashMap<u32, Vec<Backend>>>,
    pub(super) queue: Queue,
}

/// What a reader gets when it is its turn.
enum Found {
    Idle(Box<Backend>),
    /// A new one may be made.
    Slot(Slot),
}

impl ReaderPool {
    /// A pool of `database` on `server` with `reader_backends_max` back ends at the most.
    pub fn new(server: Arc<Server>, database: Arc<str>, settings: LiveSettings) -> ReaderPool {
        let queue = Queue::new(settings, |settings| settings.reader_backends_max);
        ReaderPool { server, database, idle: Mutex::default(), queue }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, HashMap<u32, Vec<Backend>>> {
        self.idle.lock().expect("no code panics while it holds this lock")
    }

    fn take_idle(&self, role: u32, settings: &Settings) -> Option<Backend> {
        let mut idle = self.idle();
        let backends = idle.get_mut(&role)?;
        let newest = backends.len().checked_sub(1)?;
        let chosen = (0..backends.len().min(LOOKED_AT_MAX))
            .map(|distance| newest - distance)
            .find(|index| *backends[*index].settings == *settings)
            .unwrap_or(newest);
        Some(backends.swap_remove(chosen))
    }

    /// A back end of `credentials`' role, if possible one that has `settings` already.
    pub async fn take(
        &self,
        credentials: &Credentials,
        settings: &Settings,
        timeout: Duration,
    ) -> Result<Backend, PoolError> {
        let deadline = Instant::now() + timeout;
        match self.queue.wait(deadline, || self.look(credentials.role, settings)).await {
            Some(Found::Idle(backend)) => Ok(*backend),
            Some(Found::Slot(slot)) => {
                let mut backend = Backend::connect(&self.server, &self.database, credentials, Purpose::Reader).await?;
                backend.slot = Some(slot);
                Ok(backend)
            }
            None => Err(PoolError::Exhausted { server: self.server.name.clone(), limit: self.queue.limit() }),
        }
    }

    /// What there is for a reader of `role`: an idle one, or a slot for a new one, for which one of another role is
    /// closed.
    fn look(&self, role: u32, settings: &Settings) -> Option<Found> {
        while let Some(mut backend) = self.take_idle(role, settings) {
            if backend.is_alive() {
                return Some(Found::Idle(Box::new(backend)));
            }
        }
        let slot = self.queue.slot().or_else(|| {
            self.close_oldest(|other| other != role);
            self.queue.slot()
        });
        slot.map(Found::Slot)
    }

    /// Closes the back end that was idle longest of those whose role `may_go`; false where there is none.
    fn close_oldest(&self, may_go: impl Fn(u32) -> bool) -> bool {
        let mut idle = self.idle();
        let others = idle.iter_mut().filter(|(role, _)| may_go(**role)).map(|(_, backends)| backends);
        let oldest = others.filter_map(|backends| {
            let (index, backend) = backends.iter().enumerate().min_by_key(|(_, backend)| backend.idle_since)?;
            let since = backend.idle_since;
            Some((since, index, backends))
        });
        let closed = oldest.min_by_key(|(since, ..)| *since).map(|(_, index, backends)| backends.swap_remove(index));
        closed.is_some()
    }

    /// Takes a back end back, unless there are too many.
    pub fn give_back(&self, mut backend: Backend) {
        backend.idle_since = Instant::now();
        self.put(backend);
    }

    fn put(&self, backend: Backend) {
        if self.queue.is_over_limit() {
            return;
        }
        self.idle().entry(backend.role).or_default().push(backend);
        self.queue.offer();
    }

    /// Ends transactions that idle back ends hold in other epochs than `current`, and closes what was idle too long and
    /// what there may not be any more.
    pub async fn sweep(&self, current: Option<u64>) {
        while self.queue.is_over_limit() && self.close_oldest(|_| true) {}
        let mut stale = Vec::new();
        {
            let mut idle = self.idle();
            for backends in idle.values_mut() {
                backends.retain(|backend| backend.idle_since.elapsed() < IDLE_MAX);
                for index in (0..backends.len()).rev() {
                    let backend = &backends[index];
                    if backend.in_transaction && (backend.epoch.is_none() || backend.epoch != current) {
                        stale.push(backends.swap_remove(index));
                    }
                }
            }
            idle.retain(|_, backends| !backends.is_empty());
        }
        for mut backend in stale {
            backend.epoch = None;
            if backend.rows("ROLLBACK").await.is_ok() {
                self.put(backend);
            }
        }
    }

    /// Closes all idle back ends.
    pub fn clear(&self) {
        self.idle().clear();
    }

    /// How many are idle.
    pub fn idle_count(&self) -> usize {
        self.idle().values().map(Vec::len).sum()
    }

    #[cfg(test)]
    pub(super) fn set_idle_since(&self, process_id: u32, since: Instant) {
        let mut idle = self.idle();
        let found = idle.values_mut().flatten().find(|backend| backend.process_id == process_id);
        found.expect("it is idle").idle_since = since;
    }
}
