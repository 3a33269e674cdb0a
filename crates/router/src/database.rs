//! One database behind the router: its commit barrier, epochs, back ends, and what is known of its statements.
//!
//! Databases share nothing that a serial order is about (PostgreSQL's transactions live in one database), so each has
//! its own commit barrier and its own epochs.

mod catalog;
mod loaded;

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use crate::backend::{Backend, BackendError, Credentials, Purpose, ServerProcess};
use crate::config::LiveSettings;
use crate::epoch::{CommitBarrier, DdlBarrier, Epochs, GateHooks, Gatekeeper, tripwire};
use crate::membership::Servers;
use crate::pool::{LeaderPool, ReaderPools};
use crate::serializable::SerializableTransactions;
use crate::servers::{Health, Server};
use crate::sql::{Scope, fingerprint_hash};
use catalog::DatabaseCatalog;
use loaded::{Loaded, load};

/// Statements remembered as updates although they look like reads, or as long; forgotten all at once beyond this.
const REMEMBERED_MAX: usize = 10_000;

/// How often idle back ends are looked through.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);

/// What clients who have left leave to be cleaned is clean by then.
const REST_AFTER_MIN: Duration = Duration::from_secs(2);

/// Server processes in this database that write, or run a statement that may write. Dumps are let go on: one statement
/// that copies a table out, or pg_dump's own cursor.
const LEFT_RUNNING: &str = "FROM pg_catalog.pg_stat_activity a WHERE datname = pg_catalog.current_database() \
     AND backend_type = 'client backend' AND pid <> pg_catalog.pg_backend_pid() \
     AND (backend_xid IS NOT NULL OR (state IN ('active', 'fastpath function call') \
       AND NOT (query !~ ';[[:space:]]*[^[:space:]]' \
       AND (query ~ '^(DECLARE _pg_dump_cursor CURSOR FOR|FETCH [0-9]+ FROM _pg_dump_cursor$)' \
         OR EXISTS (SELECT FROM pg_catalog.pg_stat_progress_copy c \
                    WHERE c.pid = a.pid AND c.command = 'COPY TO' AND c.relid <> 0))))) \
     AND application_name NOT IN ('onecopy probe', 'onecopy epoch', 'onecopy gate', 'onecopy catalog', \
     'onecopy login', 'onecopy stand-in', 'onecopy index')";

/// One database.
pub struct Database {
    /// Its name.
    pub name: Arc<str>,
    /// The servers of now.
    pub servers: Arc<Servers>,
    /// The router's settings.
    pub settings: LiveSettings,
    /// As the settings were when it was opened: the epochs that stand for none then have the numbers of others.
    pub unsafe_without_epochs: bool,
    /// As the settings were when it was opened.
    pub unsafe_without_tripwire: bool,
    /// Commits.
    pub commit_barrier: Arc<CommitBarrier>,
    /// Epochs.
    pub epochs: Arc<Epochs>,
    /// Readers' back ends, by server.
    pub readers: ReaderPools,
    /// Sessions' back ends on the leader.
    pub leader: Arc<LeaderPool>,
    /// What its catalog says of statements.
    pub catalog: DatabaseCatalog,
    /// Clients logged in.
    pub clients: AtomicUsize,
    left_at: Mutex<Instant>,
    remembered_updates: Mutex<HashSet<u64>>,
    remembered_long: Arc<Mutex<HashSet<u64>>>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    /// While nobody is in it for long: no gates, no epochs, no connections.
    dormant: Mutex<Option<DdlBarrier>>,
}

impl Drop for Database {
    fn drop(&mut self) {
        for task in lock(&self.tasks).drain(..) {
            task.abort();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics while it holds this lock")
}

impl Database {
    /// Opens the database of this name: makes the tripwire if it is missing, reads the catalog, starts the gatekeeper.
    ///
    /// # Errors
    /// When no server lets the router into that database.
    pub async fn open(
        name: &str,
        servers: Arc<Servers>,
        settings: LiveSettings,
        serializable: SerializableTransactions,
    ) -> Result<Arc<Database>, BackendError> {
        let name: Arc<str> = name.into();
        let commit_barrier = Arc::new(CommitBarrier::default());
        let (loaded, leader_is_there) = match prepare_on_leader(servers.leader(), &name, &commit_barrier).await {
            Ok(loaded) => (loaded, true),
            Err(error @ BackendError::Sql { .. }) => return Err(error),
            Err(error) => (catalog_of_any(&servers.current().followers, &name).await.ok_or(error)?, false),
        };
        let catalog = DatabaseCatalog::new(name.clone(), servers.clone(), loaded, leader_is_there);
        let readers = ReaderPools::new(servers.clone(), name.clone(), settings.clone());
        let leader = LeaderPool::new(servers.leader().clone(), name.clone(), settings.clone());
        let (unsafe_without_epochs, unsafe_without_tripwire) = {
            let settings = settings.borrow();
            (settings.unsafe_without_epochs, settings.unsafe_without_tripwire)
        };
        let database = Arc::new(Database {
            unsafe_without_epochs,
            unsafe_without_tripwire,
            readers,
            leader: Arc::new(leader),
            commit_barrier,
            epochs: Arc::default(),
            clients: AtomicUsize::new(0),
            left_at: Mutex::new(Instant::now()),
            catalog,
            remembered_updates: Mutex::default(),
            remembered_long: Arc::default(),
            tasks: Mutex::default(),
            dormant: Mutex::default(),
            name,
            servers,
            settings,
        });
        database.start_tasks(serializable);
        Ok(database)
    }

    /// How long a client waits for a back end.
    pub fn backend_wait(&self) -> Duration {
        Duration::from_millis(self.settings.borrow().backend_wait_ms)
    }

    fn start_tasks(self: &Arc<Self>, serializable: SerializableTransactions) {
        let remembered_long = self.remembered_long.clone();
        let gatekeeper = Gatekeeper::new(
            self.epochs.clone(),
            self.commit_barrier.clone(),
            self.settings.clone(),
            self.servers.clone(),
            &self.name,
            GateHooks {
                on_blocked: Box::new(move |commits| {
                    for commit in commits {
                        let since = commit.since.elapsed();
                        tracing::info!(session = commit.session, ?since, "kept a gate from closing");
                        if let Some(statement) = commit.statement {
                            remember(&remembered_long, statement);
                        }
                    }
                }),
                on_canary: Box::new(move || serializable.note_short()),
            },
        );
        self.catalog.reopen();
        // Of a gate that the tasks before were at when they were ended comes no epoch.
        self.epochs.doom();
        let mut tasks = lock(&self.tasks);
        tasks.push(tokio::spawn(gatekeeper.run()));
        tasks.push(tokio::spawn(sweep(Arc::downgrade(self))));
    }

    /// Stops gates and closes idle back ends, so that the database can be dropped.
    pub fn close(&self) {
        for task in lock(&self.tasks).drain(..) {
            task.abort();
        }
        self.readers.clear();
        self.leader.clear();
        self.catalog.close();
    }

    /// Closes the router's own connections to this database for a statement of its only client that needs it without
    /// any (CREATE DATABASE copies it); none while others are in it, whom the server refuses to overlook.
    pub fn vacate(self: &Arc<Self>, serializable: &SerializableTransactions) -> Option<VacatedDatabase> {
        if self.clients.load(SeqCst) > 1 {
            return None;
        }
        let barrier = self.let_go();
        Some(VacatedDatabase { database: self.clone(), serializable: serializable.clone(), _ddl_barrier: barrier })
    }

    fn let_go(&self) -> DdlBarrier {
        let barrier = self.epochs.begin_ddl_barrier();
        for task in lock(&self.tasks).drain(..) {
            task.abort();
        }
        self.readers.clear();
        self.leader.clear_free();
        self.catalog.close();
        barrier
    }

    /// Closes the router's own connections until the next client comes, when no client was in it for so long. All that
    /// is known of it stays known. Not while a commit is in doubt, or the leader is away: its last epoch may be needed.
    pub fn rest(&self, after: Duration) {
        let mut dormant = lock(&self.dormant);
        let unused = lock(&self.left_at).elapsed();
        let is_unused = self.clients.load(SeqCst) == 0 && unused >= after.max(REST_AFTER_MIN);
        let is_quiet = self.commit_barrier.in_doubt().is_empty() && self.servers.leader().health() == Health::Up;
        if dormant.is_none() && is_unused && is_quiet {
            *dormant = Some(self.let_go());
        }
    }

    /// A client comes.
    pub fn enter(self: &Arc<Self>, serializable: &SerializableTransactions) {
        self.clients.fetch_add(1, SeqCst);
        if let Some(barrier) = lock(&self.dormant).take() {
            // What was changed meanwhile nobody has seen.
            self.catalog.changed(false);
            self.start_tasks(serializable.clone());
            drop(barrier);
        }
    }

    /// A client leaves.
    pub fn leave(&self) {
        *lock(&self.left_at) = Instant::now();
        self.clients.fetch_sub(1, SeqCst);
    }

    /// Whether a statement that looks like a read was refused by a replica as a write before.
    pub fn is_remembered_update(&self, text: &str) -> bool {
        let remembered = lock(&self.remembered_updates);
        !remembered.is_empty() && remembered.contains(&fingerprint_hash(text))
    }

    /// A replica refused `text` as a write.
    pub fn remember_update(&self, text: &str) {
        remember(&self.remembered_updates, fingerprint_hash(text));
    }

    /// Whether statements like this one kept a gate from closing before.
    pub fn is_remembered_long(&self, statement: u64) -> bool {
        lock(&self.remembered_long).contains(&statement)
    }
}

/// While it lives the router has no connections of its own to a database, and makes no epochs there.
pub struct VacatedDatabase {
    database: Arc<Database>,
    serializable: SerializableTransactions,
    _ddl_barrier: DdlBarrier,
}

impl Drop for VacatedDatabase {
    fn drop(&mut self) {
        self.database.start_tasks(self.serializable.clone());
    }
}

fn remember(set: &Mutex<HashSet<u64>>, value: u64) {
    let mut set = lock(set);
    if set.len() >= REMEMBERED_MAX {
        set.clear();
    }
    set.insert(value);
}

async fn sweep(database: Weak<Database>) {
    let mut catalog_age = Duration::ZERO;
    loop {
        tokio::time::sleep(SWEEP_INTERVAL).await;
        let Some(database) = database.upgrade() else { return };
        let current = database.epochs.current().map(|epoch| epoch.id);
        for pool in database.readers.all().iter() {
            // A stopped server must not keep the others' back ends from being looked after.
            let _ = tokio::time::timeout(SWEEP_INTERVAL, pool.sweep(current)).await;
        }
        database.leader.sweep();
        database.catalog.sweep();
        catalog_age += SWEEP_INTERVAL;
        if catalog_age > database.catalog.age_max() {
            catalog_age = Duration::ZERO;
            tokio::spawn(async move { database.catalog.refresh().await });
        }
    }
}

async fn prepare_on_leader(
    leader: &Arc<Server>,
    database: &str,
    commit_barrier: &CommitBarrier,
) -> Result<Loaded, BackendError> {
    let mut backend = Backend::connect(leader, database, &Credentials::of_router(leader), Purpose::Catalog).await?;
    // What a router before this one left running may commit at any time: the first gate waits until it has ended.
    for row in backend.rows(&format!("SELECT {} {LEFT_RUNNING}", ServerProcess::ROW)).await? {
        if let Some(process) = ServerProcess::of_row(&row) {
            commit_barrier.note_in_doubt(process);
        }
    }
    tripwire::make_if_missing(&mut backend).await?;
    let (builtin, _) = load(&mut backend, Scope::Builtin).await?;
    Loaded::beside(Arc::new(builtin), &mut backend).await
}

async fn catalog_of_any(followers: &[Arc<Server>], database: &str) -> Option<Loaded> {
    for follower in followers.iter().filter(|follower| follower.has_caught_up()) {
        let credentials = Credentials::of_router(follower);
        let Ok(mut backend) = Backend::connect(follower, database, &credentials, Purpose::Catalog).await else {
            continue;
        };
        if let Ok((builtin, _)) = load(&mut backend, Scope::Builtin).await
            && let Ok(loaded) = Loaded::beside(Arc::new(builtin), &mut backend).await
        {
            return Some(loaded);
        }
    }
    None
}

#[cfg(test)]
mod tests;
