//! Back ends for reads at epochs, on one server, in one database.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use super::{IDLE_MAX, PoolError};
use crate::backend::{Backend, Credentials};
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
    idle: Mutex<HashMap<String, Vec<Backend>>>,
    permits: Arc<Semaphore>,
    limit: usize,
}

impl ReaderPool {
    /// A pool of `database` on `server`; `permits` counts all back ends of that server, `limit` at the most.
    pub fn new(server: Arc<Server>, database: Arc<str>, permits: Arc<Semaphore>, limit: usize) -> ReaderPool {
        ReaderPool { server, database, idle: Mutex::default(), permits, limit }
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
        while let Some(mut backend) = self.take_idle(&credentials.user, settings) {
            if backend.is_alive() {
                return Ok(backend);
            }
        }
        let permit = match self.permits.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                self.evict_one();
                let waited = tokio::time::timeout(timeout, self.permits.clone().acquire_owned()).await;
                waited
                    .ok()
                    .and_then(Result::ok)
                    .ok_or_else(|| PoolError::Exhausted { server: self.server.name.clone(), limit: self.limit })?
            }
        };
        let mut backend = Backend::connect(&self.server, &self.database, credentials, "onecopy reader").await?;
        backend.permit = Some(permit);
        Ok(backend)
    }

    /// Closes one idle back end, so that another role or database gets its place.
    fn evict_one(&self) {
        let mut idle = self.idle();
        let oldest = idle
            .iter()
            .filter_map(|(user, backends)| Some((user, backends.iter().map(|backend| backend.idle_since).min()?)))
            .min_by_key(|(_, since)| *since)
            .map(|(user, _)| user.clone());
        if let Some(backends) = oldest.and_then(|user| idle.get_mut(&user)) {
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
