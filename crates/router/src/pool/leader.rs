//! Back ends on the leader, in one database.
//!
//! A session keeps the back end of its last transaction *parked* here under its own number. When there are too few, the
//! one parked longest is taken from its session, cleaned with `DISCARD ALL`, and given to another. A session with state
//! that cannot be shared does not park its back end at all. When a session ends, its parked back end is cleaned and
//! free for anybody of the same role. While somebody waits, a session gets its own only in its turn: else those that go
//! on would be served for ever, and those that wait never.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::queue::{Queue, Slot};
use super::{IDLE_MAX, PoolError};
use crate::backend::{Backend, Credentials, Purpose};
use crate::config::LiveSettings;
use crate::servers::Server;
use crate::settings::Settings;

/// A back end that is not clean within this is closed.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(1);

/// Back ends of one database on the leader.
#[derive(Debug)]
pub struct LeaderPool {
    /// The leader.
    pub server: Arc<Server>,
    database: Arc<str>,
    /// By session.
    parked: Mutex<HashMap<u64, Backend>>,
    /// By role.
    free: Mutex<HashMap<u32, Vec<Backend>>>,
    pub(super) queue: Queue,
}

/// What a session gets when it is its turn.
enum Found {
    Clean(Box<Backend>),
    /// Another session's: everything must be taken off it.
    Stolen(Box<Backend>),
    /// A new one may be made.
    Slot(Slot),
}

impl LeaderPool {
    /// A pool of `database` with `leader_backends_max` back ends at the most.
    pub fn new(server: Arc<Server>, database: Arc<str>, settings: LiveSettings) -> LeaderPool {
        let queue = Queue::new(settings, |settings| settings.leader_backends_max);
        LeaderPool { server, database, parked: Mutex::default(), free: Mutex::default(), queue }
    }

    fn parked(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Backend>> {
        self.parked.lock().expect("no code panics while it holds this lock")
    }

    /// A back end for a transaction of `session`: its own of last time if nobody took it and nobody waits for one.
    pub async fn take(&self, session: u64, credentials: &Credentials, timeout: Duration) -> Result<Backend, PoolError> {
        if self.queue.waiting() == 0
            && let Some(own) = self.take_own(session)
        {
            return Ok(own);
        }
        let deadline = Instant::now() + timeout;
        loop {
            match self.queue.wait(deadline, || self.look(session, credentials.role)).await {
                Some(Found::Clean(backend)) => return Ok(*backend),
                Some(Found::Stolen(backend)) => {
                    if let Some(backend) = clean(*backend).await {
                        return Ok(backend);
                    }
                }
                Some(Found::Slot(slot)) => {
                    let mut backend =
                        Backend::connect(&self.server, &self.database, credentials, Purpose::Session).await?;
                    backend.slot = Some(slot);
                    return Ok(backend);
                }
                None => {
                    return Err(PoolError::Exhausted { server: self.server.name.clone(), limit: self.queue.limit() });
                }
            }
        }
    }

    /// Whether a transaction that begins now need not wait for a back end.
    pub fn has_room(&self) -> bool {
        self.queue.waiting() == 0 && (self.queue.has_place() || self.idle_count() > 0)
    }

    fn take_own(&self, session: u64) -> Option<Backend> {
        let mut own = self.take_parked(session)?;
        own.is_alive().then_some(own)
    }

    /// What there is for `session` of `role`: its own, one that nobody has, a slot for a new one, one of another
    /// session.
    fn look(&self, session: u64, role: u32) -> Option<Found> {
        if let Some(own) = self.take_own(session) {
            return Some(Found::Clean(Box::new(own)));
        }
        while let Some(mut backend) = self.take_free(role) {
            if backend.is_alive() {
                return Some(Found::Clean(Box::new(backend)));
            }
        }
        loop {
            if let Some(slot) = self.queue.slot() {
                return Some(Found::Slot(slot));
            }
            // One of another role makes room.
            if self.close_one_free() {
                continue;
            }
            let stolen = self.steal(role)?;
            if stolen.role == role {
                return Some(Found::Stolen(Box::new(stolen)));
            }
        }
    }

    /// Takes the back end parked longest from its session; one of another role is to be closed, and makes room.
    fn steal(&self, role: u32) -> Option<Backend> {
        let mut parked = self.parked();
        let oldest = |same_role: bool| {
            parked
                .iter()
                .filter(|(_, backend)| (backend.role == role) == same_role)
                .min_by_key(|(_, backend)| backend.idle_since)
                .map(|(session, _)| *session)
        };
        let session = oldest(true).or_else(|| oldest(false))?;
        parked.remove(&session)
    }

    /// The back end that `session` has parked, if nobody took it.
    pub fn take_parked(&self, session: u64) -> Option<Backend> {
        self.parked().remove(&session)
    }

    fn free(&self) -> std::sync::MutexGuard<'_, HashMap<u32, Vec<Backend>>> {
        self.free.lock().expect("no code panics while it holds this lock")
    }

    fn take_free(&self, role: u32) -> Option<Backend> {
        self.free().get_mut(&role)?.pop()
    }

    fn close_one_free(&self) -> bool {
        self.free().values_mut().find_map(Vec::pop).is_some()
    }

    fn close_one_parked(&self) -> bool {
        let mut parked = self.parked();
        let oldest = parked.iter().min_by_key(|(_, backend)| backend.idle_since).map(|(session, _)| *session);
        oldest.and_then(|session| parked.remove(&session)).is_some()
    }

    /// Keeps `backend` for the next transaction of `session`, unless there are too many.
    pub fn park(&self, session: u64, mut backend: Backend) {
        if self.queue.is_over_limit() {
            return;
        }
        backend.idle_since = Instant::now();
        self.parked().insert(session, backend);
        self.queue.offer();
    }

    /// The session has ended, or wants none of its state any more: its back end is cleaned for others.
    pub fn forget(self: &Arc<Self>, session: u64) {
        let parked = self.parked().remove(&session);
        if let (Some(backend), Ok(runtime)) = (parked, tokio::runtime::Handle::try_current()) {
            let pool = self.clone();
            runtime.spawn(async move {
                if let Some(mut backend) = clean(backend).await
                    && !pool.queue.is_over_limit()
                {
                    backend.idle_since = Instant::now();
                    pool.free().entry(backend.role).or_default().push(backend);
                    pool.queue.offer();
                }
            });
        }
    }

    /// Closes what nobody used for long, and what there may not be any more.
    pub fn sweep(&self) {
        while self.queue.is_over_limit() && (self.close_one_free() || self.close_one_parked()) {}
        self.parked().retain(|_, backend| backend.idle_since.elapsed() < IDLE_MAX);
        self.free().retain(|_, backends| {
            backends.retain(|backend| backend.idle_since.elapsed() < IDLE_MAX);
            !backends.is_empty()
        });
    }

    /// Closes those that are no session's.
    pub fn clear_free(&self) {
        self.free().clear();
    }

    /// Closes all that no session has in its hands.
    pub fn clear(&self) {
        self.parked().clear();
        self.free().clear();
    }

    /// How many no session has in its hands.
    pub fn idle_count(&self) -> usize {
        self.parked().len() + self.free().values().map(Vec::len).sum::<usize>()
    }
}

/// Takes everything off a back end that a session may have left there.
async fn clean(mut backend: Backend) -> Option<Backend> {
    tokio::time::timeout(CLEAN_TIMEOUT, backend.rows("DISCARD ALL")).await.ok()?.ok()?;
    backend.settings = Arc::new(Settings::default());
    backend.stale_plans = false;
    backend.prepared.clear();
    Some(backend)
}
