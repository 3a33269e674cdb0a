//! What a database's catalog says of statements: how they are classified, and which prepared texts are still right.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Semaphore;

use super::loaded::Loaded;
use super::lock;
use crate::backend::{Backend, BackendError, Credentials, Purpose, Row};
use crate::membership::Servers;
use crate::pool::CatalogBackend;
use crate::prepared_text::PreparedTexts;
use crate::servers::Health;
use crate::sql::{
    Catalog, ClassificationCache, FINGERPRINT_BYTES_MAX, ParseError, PinReason, Statement, classify_without_catalog,
    readable,
};

/// Whose turn it is to have a long text classified.
static LONG_TEXT: Semaphore = Semaphore::const_new(1);

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

/// A catalog, and up to which change it is right.
pub(super) struct Known {
    catalog: Arc<Catalog>,
    pub(super) version: u64,
    /// Of the users' objects in it; none when the next catalog that is read shall take its place whatever is in it.
    pub(super) fingerprint: Option<u64>,
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

/// The catalog of a database, with all that is remembered of statements by it.
pub struct DatabaseCatalog {
    database: Arc<str>,
    servers: Arc<Servers>,
    classification: Arc<ClassificationCache>,
    pub(super) known: Mutex<Known>,
    /// Grows by one when the catalog changes.
    version: AtomicU64,
    /// That of the last change that may have made an event trigger.
    event_triggers_version: AtomicU64,
    reloading: tokio::sync::Mutex<()>,
    backend: CatalogBackend,
    /// Held by who reads the catalog anew beside the sessions.
    refreshing: tokio::sync::Mutex<()>,
    prepared_texts: Mutex<PreparedTexts>,
}

impl DatabaseCatalog {
    /// As it was read; `is_leaders` when it was read on the leader.
    pub(super) fn new(database: Arc<str>, servers: Arc<Servers>, loaded: Loaded, is_leaders: bool) -> DatabaseCatalog {
        let known = Known {
            catalog: Arc::new(loaded.catalog),
            version: u64::from(is_leaders),
            fingerprint: Some(loaded.fingerprint),
            is_partial: loaded.is_partial,
            read_at: Instant::now(),
            whole_at: Instant::now(),
        };
        DatabaseCatalog {
            database,
            servers,
            classification: Arc::default(),
            known: Mutex::new(known),
            version: AtomicU64::new(1),
            event_triggers_version: AtomicU64::new(0),
            reloading: tokio::sync::Mutex::default(),
            backend: CatalogBackend::default(),
            refreshing: tokio::sync::Mutex::default(),
            prepared_texts: Mutex::default(),
        }
    }

    /// Allows its connection to the leader, which [`DatabaseCatalog::close`] closed.
    pub(super) fn reopen(&self) {
        self.backend.reopen();
    }

    /// Closes its connection to the leader.
    pub(super) fn close(&self) {
        self.backend.close();
    }

    /// Closes its connection when it has been idle for long.
    pub(super) fn sweep(&self) {
        self.backend.sweep();
    }

    /// After how long it is to be read anew.
    pub(super) fn age_max(&self) -> Duration {
        if lock(&self.known).is_partial { PARTIAL_CATALOG_AGE_MAX } else { CATALOG_AGE_MAX }
    }

    /// What the statements of `sql` are. A long text is classified beside the threads that serve sessions and gates,
    /// and only one of them at a time: its session waits, nobody else does.
    pub async fn classify(&self, sql: &Bytes) -> Result<Arc<[Statement]>, ParseError> {
        let catalog = match self.current() {
            Some(catalog) => catalog,
            // A COMMIT must not keep its locks while it waits for what has no say in it.
            None => match classify_without_catalog(sql, self.may_have_event_triggers()) {
                Some(statements) => return Ok(statements),
                None => self.up_to_date().await,
            },
        };
        if sql.len() <= FINGERPRINT_BYTES_MAX {
            let statements = classify_with(&self.classification, sql, &catalog)?;
            let is_partial = lock(&self.known).is_partial;
            let is_unknown = |statement: &Statement| statement.pins == Some(PinReason::UserCode);
            if !is_partial || !statements.iter().any(is_unknown) {
                return Ok(statements);
            }
            // What ties a session to the leader for good shall not be a lock that is gone.
            self.complete().await;
            let catalog = self.current().unwrap_or(catalog);
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
    async fn complete(&self) {
        let asked_at = Instant::now();
        let _reload = self.reloading.lock().await;
        let (is_partial, read_at, whole_at) = {
            let known = lock(&self.known);
            (known.is_partial, known.read_at, known.whole_at)
        };
        let pause = PARTIAL_CATALOG_AGE_MIN.saturating_sub(read_at.elapsed());
        let is_new = whole_at.elapsed() < PARTIAL_CATALOG_AGE_MAX;
        // A lock that is held for long is waited for by nobody who does not need it.
        if !is_partial || read_at > asked_at || !is_new && !pause.is_zero() {
            return;
        }
        tokio::time::sleep(pause).await;
        self.refresh().await;
        // It may be read beside the sessions just now.
        let _ = tokio::time::timeout(PARTIAL_CATALOG_AGE_MAX, self.refreshing.lock()).await;
    }

    /// The catalog with every change that this router has seen.
    pub(super) async fn up_to_date(&self) -> Arc<Catalog> {
        if let Some(catalog) = self.current() {
            return catalog;
        }
        if matches!(self.servers.leader().health(), Health::Down | Health::Unresponsive) {
            // While the leader is gone nothing changes; reads go on by what is known.
            return lock(&self.known).catalog.clone();
        }
        let _reload = self.reloading.lock().await;
        if let Some(catalog) = self.current() {
            return catalog;
        }
        let version = self.version.load(SeqCst);
        let leader = self.servers.leader();
        let loaded = tokio::select! {
            loaded = self.load() => loaded,
            // While it is gone nothing changes.
            () = leader.unresponsive() => return lock(&self.known).catalog.clone(),
        };
        match loaded {
            Ok(loaded) => {
                let mut known = lock(&self.known);
                known.version = version;
                known.take(loaded);
                known.catalog.clone()
            }
            Err(error) => {
                tracing::warn!(database = &*self.database, %error, "cannot read the catalog");
                // Nothing is known any more, so nothing counts as a read until the leader can be asked again. What was
                // classified by that is newer than what was known before, so that cannot come back as it was.
                lock(&self.known).fingerprint = None;
                Arc::new(Catalog::unknown())
            }
        }
    }

    async fn load(&self) -> Result<Loaded, BackendError> {
        let builtin = lock(&self.known).catalog.builtin();
        let loaded = async {
            if let Some(mut kept) = self.backend.take() {
                match Loaded::beside(builtin.clone(), &mut kept).await {
                    // The connection of the last time may have become useless meanwhile.
                    Err(error) if !matches!(error, BackendError::Sql { .. }) => {}
                    loaded => {
                        self.backend.put_back(kept);
                        return loaded;
                    }
                }
            }
            let mut new = self.new_backend().await?;
            let loaded = Loaded::beside(builtin, &mut new).await?;
            self.backend.put_back(new);
            Ok(loaded)
        };
        tokio::time::timeout(CATALOG_TIMEOUT, loaded).await.unwrap_or_else(|_| {
            let server = self.servers.leader().name.clone();
            Err(BackendError::TimedOut { server, milliseconds: CATALOG_TIMEOUT.as_millis() })
        })
    }

    /// What the leader answers to a query of its catalog.
    pub async fn ask(&self, sql: &str) -> Result<Vec<Row>, BackendError> {
        // The connection of the last time may have become useless meanwhile.
        if let Some(mut kept) = self.backend.take()
            && let Ok(rows) = kept.rows(sql).await
        {
            self.backend.put_back(kept);
            return Ok(rows);
        }
        let mut new = self.new_backend().await?;
        let rows = new.rows(sql).await?;
        self.backend.put_back(new);
        Ok(rows)
    }

    async fn new_backend(&self) -> Result<Backend, BackendError> {
        let leader = self.servers.leader();
        Backend::connect(leader, &self.database, &Credentials::of_router(leader), Purpose::Catalog).await
    }

    /// Reads the catalog anew for changes that did not come through this router. Nobody waits for it: until it is there
    /// statements are classified as they were since the last time, whenever between the two the change was made.
    pub(super) async fn refresh(&self) {
        // Let go also by a session whose client goes while it waits here.
        let Ok(_refreshing) = self.refreshing.try_lock() else { return };
        let version = self.version.load(SeqCst);
        match self.load().await {
            Ok(loaded) => {
                let mut known = lock(&self.known);
                known.read_at = Instant::now();
                // DDL may have come through this router meanwhile: then whoever asks next reads it anew.
                if known.version == version && known.fingerprint != Some(loaded.fingerprint) {
                    let next = version + 1;
                    if self.version.compare_exchange(version, next, SeqCst, SeqCst).is_ok() {
                        known.version = next;
                        known.take(loaded);
                        lock(&self.prepared_texts).forget();
                    }
                }
            }
            Err(error) => tracing::debug!(database = &*self.database, %error, "the catalog is not read anew"),
        }
    }

    pub(super) fn current(&self) -> Option<Arc<Catalog>> {
        let known = lock(&self.known);
        (known.version >= self.version.load(SeqCst)).then(|| known.catalog.clone())
    }

    /// Whether DDL may run event triggers, as far as the catalog tells that is known.
    pub(super) fn may_have_event_triggers(&self) -> bool {
        let known = lock(&self.known);
        known.version < self.event_triggers_version.load(SeqCst) || known.catalog.has_event_triggers()
    }

    /// Grows with every change of the catalog; what was classified under another number may be classified otherwise
    /// now.
    pub fn version(&self) -> u64 {
        self.version.load(SeqCst)
    }

    /// The catalog has changed: statements are classified anew, and prepared anew. What only makes relations
    /// (`creates`) makes no event trigger.
    pub fn changed(&self, creates: bool) {
        {
            // What is read beside the sessions takes its number under this lock.
            let _known = lock(&self.known);
            let version = self.version.fetch_add(1, SeqCst) + 1;
            if !creates {
                self.event_triggers_version.fetch_max(version, SeqCst);
            }
        }
        lock(&self.prepared_texts).forget();
    }

    /// The texts of prepared statements.
    pub fn prepared_texts(&self) -> MutexGuard<'_, PreparedTexts> {
        lock(&self.prepared_texts)
    }
}

pub(super) fn classify_with(
    cache: &ClassificationCache,
    sql: &[u8],
    catalog: &Catalog,
) -> Result<Arc<[Statement]>, ParseError> {
    cache.classify(&readable(sql), catalog)
}
