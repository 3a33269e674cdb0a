//! What all sessions of a router share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use onecopy_control::Unauthenticated;
use sha2::{Digest, Sha256};
use tokio::sync::{OnceCell, Semaphore, watch};
use tokio::task::JoinSet;

use crate::authentication::MockSecret;
use crate::backend::{Backend, BackendError};
use crate::config::{LiveSettings, RouterConfiguration, RouterSettings, ServerConfiguration};
use crate::database::Database;
use crate::error::RouterError;
use crate::live_credentials::LiveCredentials;
use crate::membership::Servers;
use crate::serializable::SerializableTransactions;
use crate::session::{CancelKeys, CancelSlot, ClientStatus};

/// Stand-ins of all statements at once: each takes one of the leader's connections. Who gets no turn within
/// [`STANDS_WITHIN`] gets none.
pub const STAND_INS_AT_ONCE: usize = 16;

/// Counters of all sessions.
#[derive(Debug, Default)]
pub struct Counters {
    /// Units of work that only read.
    pub reads: AtomicU64,
    /// Units of work that may write.
    pub updates: AtomicU64,
    /// Reads that ran again on another server or epoch.
    pub read_retries: AtomicU64,
    /// Autocommit updates that ran again after 40001.
    pub update_retries: AtomicU64,
    /// Clients that logged in.
    pub logins: AtomicU64,
    /// Clients that were refused.
    pub refused: AtomicU64,
}

/// Salts of roles that do not exist must be the same after a restart, so they come from what is kept: the router's own
/// password. Without one they last as long as this process.
fn mock_secret(leader: &ServerConfiguration) -> MockSecret {
    match &leader.password {
        Some(password) => MockSecret::new(Sha256::digest(format!("onecopy mock {password}")).into()),
        None => MockSecret::random(),
    }
}

/// How long a database that is to be dropped is waited for to have no clients; PostgreSQL itself waits five seconds for
/// those that it has still (`CountOtherDBBackends`).
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
const LEAVE_INTERVAL: Duration = Duration::from_millis(10);

/// How often databases are looked for that no client is in.
const REST_INTERVAL: Duration = Duration::from_secs(1);

/// Databases by name; one that is being opened is empty.
type Databases = HashMap<String, Arc<OnceCell<Arc<Database>>>>;

/// What all sessions share.
pub struct RouterState {
    /// The servers of now.
    pub servers: Arc<Servers>,
    settings: watch::Sender<Arc<RouterSettings>>,
    databases: Mutex<Databases>,
    /// Counters.
    pub counters: Counters,
    /// Serializable transactions on the leader.
    pub serializable: SerializableTransactions,
    /// Whose turn it is among equally busy servers.
    pub turn: AtomicUsize,
    /// Clients that are logged in or logging in.
    pub clients: AtomicUsize,
    /// Those of them that have shown who they are.
    pub(crate) authenticated: AtomicUsize,
    /// The others.
    pub(crate) unauthenticated: Arc<Unauthenticated>,
    cancels: Mutex<CancelKeys>,
    sessions: Mutex<JoinSet<()>>,
    /// True once sessions shall end.
    pub(crate) stopping: watch::Sender<bool>,
    /// To the leader, where verifiers are looked up.
    pub(crate) verifiers: tokio::sync::Mutex<Option<Backend>>,
    /// Turns of those who stand in for sessions.
    pub(crate) stand_ins: Arc<Semaphore>,
    /// For exchanges with roles that do not exist.
    pub(crate) mock_secret: MockSecret,
    pub(crate) live_credentials: LiveCredentials,
    pub(crate) last_session: AtomicU64,
    /// In which database the router looks up roles.
    pub(crate) maintenance_database: String,
}

impl RouterState {
    /// The state of a router that starts.
    pub fn new(configuration: &RouterConfiguration) -> Result<RouterState, RouterError> {
        let servers = Arc::new(Servers::of(configuration)?);
        let settings = &configuration.router;
        Ok(RouterState {
            servers,
            settings: watch::Sender::new(Arc::new(settings.clone())),
            databases: Mutex::default(),
            counters: Counters::default(),
            serializable: SerializableTransactions::default(),
            turn: AtomicUsize::new(0),
            clients: AtomicUsize::new(0),
            authenticated: AtomicUsize::new(0),
            unauthenticated: Arc::default(),
            cancels: Mutex::default(),
            sessions: Mutex::default(),
            stopping: watch::Sender::new(false),
            verifiers: tokio::sync::Mutex::default(),
            stand_ins: Arc::new(Semaphore::new(STAND_INS_AT_ONCE)),
            mock_secret: mock_secret(&configuration.leader),
            live_credentials: LiveCredentials::default(),
            last_session: AtomicU64::new(0),
            maintenance_database: configuration.leader.database.clone(),
        })
    }

    /// The settings of now.
    pub fn settings(&self) -> Arc<RouterSettings> {
        self.settings.borrow().clone()
    }

    /// The settings for whoever outlives a reload.
    pub fn live_settings(&self) -> LiveSettings {
        self.settings.subscribe()
    }

    /// Replaces the settings.
    pub fn set_settings(&self, settings: RouterSettings) {
        self.settings.send_replace(Arc::new(settings));
    }

    /// The database of this name, opened if it is not open yet.
    pub async fn database(&self, name: &str) -> Result<Arc<Database>, BackendError> {
        let cell = self.databases().entry(name.to_owned()).or_default().clone();
        let opened = cell
            .get_or_try_init(|| {
                Database::open(name, self.servers.clone(), self.live_settings(), self.serializable.clone())
            })
            .await;
        match opened {
            Ok(database) => Ok(database.clone()),
            Err(error) => {
                let mut databases = self.databases();
                if databases.get(name).is_some_and(|known| known.get().is_none()) {
                    databases.remove(name);
                }
                Err(error)
            }
        }
    }

    /// Databases that are open.
    pub fn open_databases(&self) -> Vec<Arc<Database>> {
        self.databases().values().filter_map(|cell| cell.get().cloned()).collect()
    }

    /// Runs a session in a task of its own.
    pub fn start_session(&self, session: impl Future<Output = ()> + Send + 'static) {
        let mut sessions = self.sessions();
        while sessions.try_join_next().is_some() {}
        sessions.spawn(session);
    }

    /// Which clients may be cancelled by which key.
    pub(crate) fn cancels(&self) -> MutexGuard<'_, CancelKeys> {
        self.cancels.lock().expect("no code panics while it holds this lock")
    }

    /// The session that its client knows by this number.
    pub(crate) fn session_slot(&self, number: u32) -> Option<Arc<CancelSlot>> {
        let cancels = self.cancels();
        cancels.iter().find(|((known, _), _)| *known == number).and_then(|(_, slot)| slot.upgrade())
    }

    /// Passes a cancel request on to what runs for its client, and waits until it has landed there.
    pub(crate) async fn cancel(&self, process_id: u32, secret: u32) {
        let slot = self.cancels().get(&(process_id, secret)).and_then(Weak::upgrade);
        if let Some(cancelling) = slot.as_deref().and_then(CancelSlot::cancel) {
            cancelling.send().await;
        }
    }

    /// What is known of all sessions, the oldest first.
    pub(crate) fn client_statuses(&self) -> Vec<ClientStatus> {
        let mut clients: Vec<ClientStatus> = {
            let slots = self.cancels();
            let known = slots.iter().map(|((process_id, _), slot)| (*process_id, slot));
            known.filter_map(|(process_id, slot)| slot.upgrade()?.status(process_id)).collect()
        };
        clients.sort_by_key(|client| std::cmp::Reverse(client.connected));
        clients
    }

    /// Tells all sessions to end, each after the statement it is at; those that go on after `timeout` are cut off.
    pub async fn end_sessions(&self, timeout: Duration) {
        self.stopping.send_replace(true);
        let mut sessions = std::mem::take(&mut *self.sessions());
        let all = async { while sessions.join_next().await.is_some() {} };
        if tokio::time::timeout(timeout, all).await.is_err() {
            sessions.shutdown().await;
        }
    }

    fn sessions(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.sessions.lock().expect("no code panics while it holds this lock")
    }

    /// Gives a database up that is to be dropped or copied, if no client is in it. Clients that are about to leave are
    /// waited for: they may have been told that they have left.
    pub async fn close_database(&self, name: &str) {
        let deadline = Instant::now() + LEAVE_TIMEOUT;
        while self.has_clients(name) && Instant::now() < deadline {
            tokio::time::sleep(LEAVE_INTERVAL).await;
        }
        let closed = {
            let mut databases = self.databases();
            let unused = databases
                .get(name)
                .and_then(|cell| cell.get())
                .is_some_and(|database| database.clients.load(SeqCst) == 0);
            if unused { databases.remove(name) } else { None }
        };
        if let Some(database) = closed.as_ref().and_then(|cell| cell.get()) {
            database.close();
            // Servers notice closed connections a moment later.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Lets databases rest again and again that no client was in for as long as the settings say.
    pub async fn let_databases_rest(self: Arc<Self>) {
        loop {
            tokio::time::sleep(REST_INTERVAL).await;
            match self.settings().database_idle_s {
                0 => {}
                idle_s => self.open_databases().iter().for_each(|one| one.rest(Duration::from_secs(idle_s))),
            }
        }
    }

    /// The last client has left a database that others copy: closes it.
    pub fn leave_database(&self, left: &Arc<Database>) {
        let mut databases = self.databases();
        if left.clients.load(SeqCst) == 0 && is_known(&databases, left) {
            databases.remove(&*left.name);
            left.close();
        }
    }

    /// Whether clients that come to a database of this name come to this one.
    pub fn is_open(&self, database: &Arc<Database>) -> bool {
        is_known(&self.databases(), database)
    }

    fn has_clients(&self, name: &str) -> bool {
        let database = self.databases().get(name).and_then(|cell| cell.get().cloned());
        database.is_some_and(|database| database.clients.load(SeqCst) > 0)
    }

    fn databases(&self) -> MutexGuard<'_, Databases> {
        self.databases.lock().expect("no code panics while it holds this lock")
    }
}

fn is_known(databases: &Databases, database: &Arc<Database>) -> bool {
    let known = databases.get(&*database.name).and_then(|cell| cell.get());
    known.is_some_and(|known| Arc::ptr_eq(known, database))
}
