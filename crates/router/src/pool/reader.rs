//! Back ends for reads at epochs, on one server, in one database.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, Semaphore};

use super::{IDLE_MAX, PoolError};
use crate::backend::{Backend, Credentials, Purpose};
use crate::servers::Server;
use crate::settings::Settings;

/// How many idle back ends are looked at for one with the right settings.
const LOOKED_AT_MAX: usize = 8;

/// A reader that waits for a back end looks this often whether one is to be had.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Idle back ends by role.
#[derive(Debug)]
pub struct ReaderPool {
    /// The server.
    pub server: Arc<Server>,
    database: Arc<str>,
    idle: Mutex<HashMap<String, Vec<Backend>>>,
    permits: Arc<Semaphore>,
    limit: usize,
    given_back: Notify,
}

impl ReaderPool {
    /// A pool of `database` on `server` with `limit` back ends at the most.
    pub fn new(server: Arc<Server>, database: Arc<str>, limit: usize) -> ReaderPool {
        ReaderPool {
            server,
            database,
            idle: Mutex::default(),
            permits: Arc::new(Semaphore::new(limit)),
            limit,
            given_back: Notify::new(),
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, HashMap<String, Vec<Backend>>> {
        self.idle.lock().expect("no code panics while it holds this lock")
    }

    fn take_idle(&self, user: &str, settings: &Settings) -> Option<Backend> {
        let mut idle = self.idle();
        let backends = idle.get_mut(user)?;
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
        let permit = loop {
            while let Some(mut backend) = self.take_idle(&credentials.user, settings) {
                if backend.is_alive() {
                    return Ok(backend);
                }
            }
            if let Ok(permit) = self.permits.clone().try_acquire_owned() {
                break permit;
            }
            self.evict_one_of_others(&credentials.user);
            if Instant::now() >= deadline {
                return Err(PoolError::Exhausted { server: self.server.name.clone(), limit: self.limit });
            }
            // A back end that is given back wakes one waiter; one that is closed, or of another database, is found by
            // looking again.
            let look_again = deadline.min(Instant::now() + LOOK_INTERVAL);
            let _ = tokio::time::timeout_at(look_again.into(), self.given_back.notified()).await;
        };
        let mut backend = Backend::connect(&self.server, &self.database, credentials, Purpose::Reader).await?;
        backend.permit = Some(permit);
        Ok(backend)
    }

    /// Closes the back end of another role that was idle longest, so that this one gets its place.
    fn evict_one_of_others(&self, user: &str) {
        let mut idle = self.idle();
        let oldest = idle
            .iter()
            .filter(|(other, _)| *other != user)
            .filter_map(|(other, backends)| Some((other, backends.iter().map(|backend| backend.idle_since).min()?)))
            .min_by_key(|(_, since)| *since)
            .map(|(other, _)| other.clone());
        if let Some(backends) = oldest.and_then(|other| idle.get_mut(&other)) {
            backends.remove(0);
        }
    }

    /// Takes a back end back.
    pub fn give_back(&self, user: &str, mut backend: Backend) {
        backend.idle_since = Instant::now();
        let mut idle = self.idle();
        match idle.get_mut(user) {
            Some(backends) => backends.push(backend),
            None => drop(idle.insert(user.to_owned(), vec![backend])),
        }
        drop(idle);
        self.given_back.notify_one();
    }

    /// Ends transactions that idle back ends hold in other epochs than `current`, and closes what was idle too long.
    pub async fn sweep(&self, current: Option<u64>) {
        let mut stale = Vec::new();
        {
            let mut idle = self.idle();
            for (user, backends) in idle.iter_mut() {
                backends.retain(|backend| backend.idle_since.elapsed() < IDLE_MAX);
                for index in (0..backends.len()).rev() {
                    let backend = &backends[index];
                    if backend.in_transaction && (backend.epoch.is_none() || backend.epoch != current) {
                        stale.push((user.clone(), backends.swap_remove(index)));
                    }
                }
            }
            idle.retain(|_, backends| !backends.is_empty());
        }
        for (user, mut backend) in stale {
            backend.epoch = None;
            if backend.rows("ROLLBACK").await.is_ok() {
                let since = backend.idle_since;
                self.give_back(&user, backend);
                if let Some(backend) = self.idle().get_mut(&user).and_then(|backends| backends.last_mut()) {
                    backend.idle_since = since;
                }
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
}
