//! One database behind the router: its commit barrier, epochs, back ends, and what is known of its statements.
//!
//! Databases share nothing that a serial order is about (PostgreSQL's transactions live in one database), so each has
//! its own commit barrier and its own epochs.

mod loaded;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::backend::{Backend, BackendError, Credentials, Purpose, Row, ServerProcess};
use crate::config::LiveSettings;
use crate::epoch::{CommitBarrier, DdlBarrier, Epochs, GateHooks, Gatekeeper, tripwire};
use crate::membership::Servers;
use crate::pool::{CatalogBackend, LeaderPool, ReaderPools};
use crate::prepared_text::PreparedTexts;
use crate::servers::{Health, Server};
use crate::sql::{
    Catalog, ClassificationCache, FINGERPRINT_BYTES_MAX, ParseError, PinReason, Scope, Statement,
    classify_without_catalog, fingerprint_hash, readable,
};
use crate::state::SerializableTransactions;
use loaded::{Loaded, load};

/// Statements remembered as updates although they look like reads, or as long; forgotten all at once beyond this.
const REMEMBERED_MAX: usize = 10_000;

/// Whose turn it is to have a long text classified.
static LONG_TEXT: Semaphore = Semaphore::const_new(1);

/// How often idle back ends are looked through.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);

/// The catalog is read anew at least this often, for changes that did not come through this router.
const CATALOG_AGE_MAX: Duration = Duration::from_secs(60);

/// The leader must give its catalog within this. Statements wait for it after DDL: what they call may write since then.
/// Those in which it has no say (BEGIN, COMMIT, SET, CREATE TABLE ..) do not. Without it nothing is known, and what
/// calls a function ties its session to the leader for good; so the bound is far beyond what many thousands of tables
/// take.
const CATALOG_TIMEOUT: Duration = Duration::from_secs(60);

/// A catalog in which something was locked is read anew after this.
const PARTIAL_CATALOG_AGE_MAX: Duration = Duration::from_secs(1);
/// And sooner, but not more often than this, before a statement counts as unknown code by it.
const PARTIAL_CATALOG_AGE_MIN: Duration = Duration::from_millis(100);

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

/// A catalog, and up to which change it is right.
struct Known {
    catalog: Arc<Catalog>,
    version: u64,
    /// Of the users' objects in it; none when the next catalog that is read shall take its place whatever is in it.
    fingerprint: Option<u64>,
    is_partial: bool,
    read_at: Instant,
    /// When it was whole last.
    whole_at: Instant,
}

impl Known {
    /// What is the same as before stays the same object: nothing need be classified anew.
    fn take(&mut self, loaded: Loaded) {
        (self.is_partial, self.read_at) = (loaded.is_partial, Instant::now());
        if !self.is_partial {
            self.whole_at = self.read_at;
        }
        if self.fingerprint != Some(loaded.fingerprint) {
            (self.catalog, self.fingerprint) = (Arc::new(loaded.catalog), Some(loaded.fingerprint));
        }
    }
}

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
    /// Clients logged in.
    pub clients: AtomicUsize,
    left_at: Mutex<Instant>,
    classification: Arc<ClassificationCache>,
    catalog: Mutex<Known>,
    /// Grows by one when the catalog changes.
    catalog_version: AtomicU64,
    /// That of the last change that may have made an event trigger.
    event_triggers_version: AtomicU64,
    catalog_reload: tokio::sync::Mutex<()>,
    catalog_backend: CatalogBackend,
    /// Held by who reads the catalog anew beside the sessions.
    refreshing: tokio::sync::Mutex<()>,
    remembered_updates: Mutex<HashSet<u64>>,
    remembered_long: Arc<Mutex<HashSet<u64>>>,
    prepared_texts: Mutex<PreparedTexts>,
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
        let known = Known {
            catalog: Arc::new(loaded.catalog),
            version: u64::from(leader_is_there),
            fingerprint: Some(loaded.fingerprint),
            is_partial: loaded.is_partial,
            read_at: Instant::now(),
            whole_at: Instant::now(),
        };
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
            classification: Arc::default(),
            catalog: Mutex::new(known),
            catalog_version: AtomicU64::new(1),
            event_triggers_version: AtomicU64::new(0),
            catalog_reload: tokio::sync::Mutex::default(),
            catalog_backend: CatalogBackend::default(),
            refreshing: tokio::sync::Mutex::default(),
            remembered_updates: Mutex::default(),
            remembered_long: Arc::default(),
            prepared_texts: Mutex::default(),
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
        self.catalog_backend.reopen();
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
        self.catalog_backend.close();
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
        self.catalog_backend.close();
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
            self.catalog_changed(false);
            self.start_tasks(serializable.clone());
            drop(barrier);
        }
    }

    /// A client leaves.
    pub fn leave(&self) {
        *lock(&self.left_at) = Instant::now();
        self.clients.fetch_sub(1, SeqCst);
    }

    /// What the statements of `sql` are. A long text is classified beside the threads that serve sessions and gates,
    /// and only one of them at a time: its session waits, nobody else does.
    pub async fn classify(&self, sql: &Bytes) -> Result<Arc<[Statement]>, ParseError> {
        let catalog = match self.current_catalog() {
            Some(catalog) => catalog,
            // A COMMIT must not keep its locks while it waits for what has no say in it.
            None => match classify_without_catalog(sql, self.may_have_event_triggers()) {
                Some(statements) => return Ok(statements),
                None => self.catalog().await,
            },
        };
        if sql.len() <= FINGERPRINT_BYTES_MAX {
            let statements = classify_with(&self.classification, sql, &catalog)?;
            let is_partial = lock(&self.catalog).is_partial;
            let is_unknown = |statement: &Statement| statement.pins == Some(PinReason::UserCode);
            if !is_partial || !statements.iter().any(is_unknown) {
                return Ok(statements);
            }
            // What ties a session to the leader for good shall not be a lock that is gone.
            self.complete_catalog().await;
            let catalog = self.current_catalog().unwrap_or(catalog);
            return classify_with(&self.classification, sql, &catalog);
        }
        let turn = LONG_TEXT.acquire().await;
        let (classification, sql) = (self.classification.clone(), sql.clone());
        let classified = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            classify_with(&classification, &sql, &catalog)
        });
        classified.await.unwrap_or_else(|error| Err(ParseError::Refused(error.to_string())))
    }

    /// Reads a catalog anew in which something was locked, unless somebody does so meanwhile.
    async fn complete_catalog(&self) {
        let asked_at = Instant::now();
        let _reload = self.catalog_reload.lock().await;
        let (is_partial, read_at, whole_at) = {
            let known = lock(&self.catalog);
            (known.is_partial, known.read_at, known.whole_at)
        };
        let pause = PARTIAL_CATALOG_AGE_MIN.saturating_sub(read_at.elapsed());
        let is_new = whole_at.elapsed() < PARTIAL_CATALOG_AGE_MAX;
        // A lock that is held for long is waited for by nobody who does not need it.
        if !is_partial || read_at > asked_at || !is_new && !pause.is_zero() {
            return;
        }
        tokio::time::sleep(pause).await;
        self.refresh_catalog().await;
        // It may be read beside the sessions just now.
        let _ = tokio::time::timeout(PARTIAL_CATALOG_AGE_MAX, self.refreshing.lock()).await;
    }

    /// The catalog with every change that this router has seen.
    async fn catalog(&self) -> Arc<Catalog> {
        if let Some(catalog) = self.current_catalog() {
            return catalog;
        }
        if matches!(self.servers.leader().health(), Health::Down | Health::Unresponsive) {
            // While the leader is gone nothing changes; reads go on by what is known.
            return lock(&self.catalog).catalog.clone();
        }
        let _reload = self.catalog_reload.lock().await;
        if let Some(catalog) = self.current_catalog() {
            return catalog;
        }
        let version = self.catalog_version.load(SeqCst);
        let leader = self.servers.leader();
        let loaded = tokio::select! {
            loaded = self.load_catalog() => loaded,
            // While it is gone nothing changes.
            () = leader.unresponsive() => return lock(&self.catalog).catalog.clone(),
        };
        match loaded {
            Ok(loaded) => {
                let mut known = lock(&self.catalog);
                known.version = version;
                known.take(loaded);
                known.catalog.clone()
            }
            Err(error) => {
                tracing::warn!(database = &*self.name, %error, "cannot read the catalog");
                // Nothing is known any more, so nothing counts as a read until the leader can be asked again. What was
                // classified by that is newer than what was known before, so that cannot come back as it was.
                lock(&self.catalog).fingerprint = None;
                Arc::new(Catalog::unknown())
            }
        }
    }

    async fn load_catalog(&self) -> Result<Loaded, BackendError> {
        let builtin = lock(&self.catalog).catalog.builtin();
        let loaded = async {
            if let Some(mut kept) = self.catalog_backend.take() {
                match Loaded::beside(builtin.clone(), &mut kept).await {
                    // The connection of the last time may have become useless meanwhile.
                    Err(error) if !matches!(error, BackendError::Sql { .. }) => {}
                    loaded => {
                        self.catalog_backend.put_back(kept);
                        return loaded;
                    }
                }
            }
            let mut new = self.new_catalog_backend().await?;
            let loaded = Loaded::beside(builtin, &mut new).await?;
            self.catalog_backend.put_back(new);
            Ok(loaded)
        };
        tokio::time::timeout(CATALOG_TIMEOUT, loaded).await.unwrap_or_else(|_| {
            let server = self.servers.leader().name.clone();
            Err(BackendError::TimedOut { server, milliseconds: CATALOG_TIMEOUT.as_millis() })
        })
    }

    /// What the leader answers to a query of its catalog.
    pub async fn ask_catalog(&self, sql: &str) -> Result<Vec<Row>, BackendError> {
        // The connection of the last time may have become useless meanwhile.
        if let Some(mut kept) = self.catalog_backend.take()
            && let Ok(rows) = kept.rows(sql).await
        {
            self.catalog_backend.put_back(kept);
            return Ok(rows);
        }
        let mut new = self.new_catalog_backend().await?;
        let rows = new.rows(sql).await?;
        self.catalog_backend.put_back(new);
        Ok(rows)
    }

    async fn new_catalog_backend(&self) -> Result<Backend, BackendError> {
        let leader = self.servers.leader();
        Backend::connect(leader, &self.name, &Credentials::of_router(leader), Purpose::Catalog).await
    }

    /// Reads the catalog anew for changes that did not come through this router. Nobody waits for it: until it is there
    /// statements are classified as they were since the last time, whenever between the two the change was made.
    async fn refresh_catalog(&self) {
        // Let go also by a session whose client goes while it waits here.
        let Ok(_refreshing) = self.refreshing.try_lock() else { return };
        let version = self.catalog_version.load(SeqCst);
        match self.load_catalog().await {
            Ok(loaded) => {
                let mut known = lock(&self.catalog);
                known.read_at = Instant::now();
                // DDL may have come through this router meanwhile: then whoever asks next reads it anew.
                if known.version == version && known.fingerprint != Some(loaded.fingerprint) {
                    let next = version + 1;
                    if self.catalog_version.compare_exchange(version, next, SeqCst, SeqCst).is_ok() {
                        known.version = next;
                        known.take(loaded);
                        lock(&self.prepared_texts).forget();
                    }
                }
            }
            Err(error) => tracing::debug!(database = &*self.name, %error, "the catalog is not read anew"),
        }
    }

    fn current_catalog(&self) -> Option<Arc<Catalog>> {
        let known = lock(&self.catalog);
        (known.version >= self.catalog_version.load(SeqCst)).then(|| known.catalog.clone())
    }

    /// Whether DDL may run event triggers, as far as the catalog tells that is known.
    fn may_have_event_triggers(&self) -> bool {
        let known = lock(&self.catalog);
        known.version < self.event_triggers_version.load(SeqCst) || known.catalog.has_event_triggers()
    }

    /// Grows with every change of the catalog; what was classified under another number may be classified otherwise
    /// now.
    pub fn catalog_version(&self) -> u64 {
        self.catalog_version.load(SeqCst)
    }

    /// The catalog has changed: statements are classified anew, and prepared anew. What only makes relations
    /// (`creates`) makes no event trigger.
    pub fn catalog_changed(&self, creates: bool) {
        {
            // What is read beside the sessions takes its number under this lock.
            let _known = lock(&self.catalog);
            let version = self.catalog_version.fetch_add(1, SeqCst) + 1;
            if !creates {
                self.event_triggers_version.fetch_max(version, SeqCst);
            }
        }
        lock(&self.prepared_texts).forget();
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

    /// The texts of prepared statements.
    pub fn prepared_texts(&self) -> MutexGuard<'_, PreparedTexts> {
        lock(&self.prepared_texts)
    }
}

fn classify_with(cache: &ClassificationCache, sql: &[u8], catalog: &Catalog) -> Result<Arc<[Statement]>, ParseError> {
    cache.classify(&readable(sql), catalog)
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
        database.catalog_backend.sweep();
        catalog_age += SWEEP_INTERVAL;
        let age_max = if lock(&database.catalog).is_partial { PARTIAL_CATALOG_AGE_MAX } else { CATALOG_AGE_MAX };
        if catalog_age > age_max {
            catalog_age = Duration::ZERO;
            tokio::spawn(async move { database.refresh_catalog().await });
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
