//! PostgreSQL 15 to 18 with the extension: levels `request` and `publish`.

mod status_row;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::processes::Outside;
use super::rates::Counters;
use super::session::{Reach, Session};
use super::{Change, Engine, EngineFuture, Presence, Progress, Report, Taken, overtaken};
use crate::published::Published;
use crate::{Bytes, InstanceName, Kind, Level, MemoryError, Observation};

use status_row::{StatusRow, bytes};

/// How often a change that somebody waits for is looked at.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// The schema that the extension lies in: an administrator may have chosen any.
const SCHEMA: &str = "\
SELECT quote_ident(n.nspname) FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace \
WHERE e.extname = 'onecopy'";

/// A server of PostgreSQL whose pool is resized by the extension.
pub struct ExtensionEngine {
    instance: InstanceName,
    level: Level,
    data_directory: Option<PathBuf>,
    session: Session,
    counters: Counters,
    outside: Outside,
    /// Opened when something is taken for the first time: the server must run then.
    published: Mutex<Option<Arc<Published>>>,
}

impl ExtensionEngine {
    /// The server that `reach` finds; it need not run yet. The extension must be made in the database that is
    /// logged in to, and the role be allowed to call it. `data_directory` tells where it is on this host; none when it
    /// is elsewhere: then what its processes have in RAM is not known, and level `publish` is not possible.
    ///
    /// # Errors
    /// [`MemoryError::WrongLevel`] at level `own`, and at `publish` without a data directory.
    pub fn new(
        instance: InstanceName,
        level: Level,
        reach: impl Into<Reach>,
        data_directory: Option<PathBuf>,
    ) -> Result<ExtensionEngine, MemoryError> {
        let action = match (level, &data_directory) {
            (Level::Own, _) => Some("be used with the extension: it is for servers without it"),
            (Level::Publish, None) => Some("be used without the server's data directory on this host"),
            _ => None,
        };
        if let Some(action) = action {
            return Err(MemoryError::WrongLevel { instance, level, action });
        }
        let session = Session::new(instance.clone(), reach.into());
        Ok(ExtensionEngine {
            instance,
            level,
            data_directory,
            session,
            counters: Counters::default(),
            outside: Outside::new(),
            published: Mutex::new(None),
        })
    }

    /// Everything that is asked each second, in one statement.
    async fn query_status(&self) -> Result<StatusRow, MemoryError> {
        let statement = status_row::statement(&self.schema().await?);
        let action = "tell its memory";
        let row = self.session.run(action, |client| async move { client.query_one(&statement, &[]).await }).await?;
        StatusRow::of(&row).map_err(|error| MemoryError::Statement {
            instance: self.instance.clone(),
            action,
            reason: format!("the extension is of another version than this program: {error}"),
        })
    }

    /// Where the extension lies. Asked each time: it may be dropped and made elsewhere.
    async fn schema(&self) -> Result<String, MemoryError> {
        let action = "find the extension";
        let row = self.session.run(action, |client| async move { client.query_opt(SCHEMA, &[]).await }).await?;
        row.map(|row| row.get(0)).ok_or_else(|| MemoryError::Unable {
            instance: self.instance.clone(),
            action: "be resized",
            reason: "the database that is logged in to has no extension onecopy".to_owned(),
            remedy: "run there: CREATE EXTENSION onecopy",
        })
    }

    async fn observation(&self, status: StatusRow) -> Observation {
        let rates = self.counters.rates(Instant::now(), status.hits, status.reads);
        let mut observation = Observation {
            instance: self.instance.clone(),
            answered: true,
            pool_bytes: status.pool_bytes,
            target_bytes: status.target_bytes,
            ceiling_bytes: status.ceiling_bytes,
            floor_bytes: status.floor_bytes,
            granule_bytes: status.granule_bytes,
            published_bytes: status.published_bytes,
            huge_pages: status.huge_pages,
            returned_huge_bytes: status.returned_huge_bytes,
            working_set_bytes: status.working_set_bytes,
            hit_ratio: status.hit_ratio.or(rates.hit_ratio),
            hits_per_second: rates.hits_per_second,
            reads_per_second: rates.reads_per_second,
            ghost: status.ghost,
            resident_bytes: None,
            swap_bytes: None,
            touched_bytes: None,
            blocked_by: status.blocked_by,
            limits: Vec::new(),
        };
        self.outside.add_server_to(&mut observation, self.data_directory.as_deref()).await;
        observation
    }

    async fn give(&self, target_bytes: Bytes) -> Result<Change, MemoryError> {
        let before = self.query_status().await?;
        let instance = || self.instance.clone();
        let StatusRow { floor_bytes, ceiling_bytes, .. } = before;
        if target_bytes < floor_bytes {
            return Err(MemoryError::BelowFloor { instance: instance(), target_bytes, floor_bytes });
        }
        if target_bytes > ceiling_bytes {
            return Err(MemoryError::AboveCeiling { instance: instance(), target_bytes, ceiling_bytes });
        }
        let statement = format!("SELECT {}.onecopy_memory_target($1::text, false)", self.schema().await?);
        let wanted = format!("{target_bytes}B");
        let action = "take this size";
        let row =
            self.session.run(action, |client| async move { client.query_one(&statement, &[&wanted]).await }).await?;
        Ok(Change { from_bytes: before.pool_bytes, target_bytes: bytes(row.get(0)), pool_bytes: before.pool_bytes })
    }

    async fn watch(&self, target_bytes: Bytes, report: Report<'_>) -> Result<Change, MemoryError> {
        let mut from_bytes = None;
        loop {
            let status = self.query_status().await?;
            let pool_bytes = status.pool_bytes;
            let from_bytes = *from_bytes.get_or_insert(pool_bytes);
            report(&Progress { from_bytes, target_bytes, pool_bytes, blocked_by: status.blocked_by });
            if status.target_bytes != target_bytes {
                return Err(overtaken(&self.instance, status.target_bytes));
            }
            if pool_bytes == target_bytes {
                return Ok(Change { from_bytes, target_bytes, pool_bytes });
            }
            tokio::time::sleep(WATCH_INTERVAL).await;
        }
    }

    /// Takes what is published. The kernel is at work meanwhile: on a thread that may wait.
    async fn take_published(&self, wanted_bytes: Bytes) -> Result<Taken, MemoryError> {
        let Some(directory) = self.data_directory.clone().filter(|_| self.level == Level::Publish) else {
            let (instance, level) = (self.instance.clone(), self.level);
            return Err(MemoryError::WrongLevel { instance, level, action: "take memory without asking" });
        };
        let kept = self.published().clone();
        let taking = tokio::task::spawn_blocking(move || {
            let published = match kept {
                Some(published) => published,
                None => Arc::new(Published::open(&directory)?),
            };
            let taken = published.take(wanted_bytes)?;
            Ok::<_, MemoryError>((published, taken))
        });
        let (published, taken) = taking.await.map_err(|error| MemoryError::Statement {
            instance: self.instance.clone(),
            action: "give memory",
            reason: error.to_string(),
        })??;
        *self.published() = Some(published);
        let size_bytes = taken.size_bytes;
        Ok(Taken { bytes: taken.bytes, size_bytes, microseconds: taken.microseconds })
    }

    fn published(&self) -> std::sync::MutexGuard<'_, Option<Arc<Published>>> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine for ExtensionEngine {
    fn instance(&self) -> &InstanceName {
        &self.instance
    }

    fn kind(&self) -> Kind {
        Kind::PostgreSql
    }

    fn level(&self) -> Level {
        self.level
    }

    fn observe(&self) -> EngineFuture<'_, Observation> {
        Box::pin(async { Ok(self.observation(self.query_status().await?).await) })
    }

    fn set_target(&self, target_bytes: Bytes) -> EngineFuture<'_, Change> {
        Box::pin(self.give(target_bytes))
    }

    fn reach<'a>(&'a self, target_bytes: Bytes, report: Report<'a>) -> EngineFuture<'a, Change> {
        Box::pin(self.watch(target_bytes, report))
    }

    fn presence(&self) -> EngineFuture<'_, Presence> {
        Box::pin(self.outside.presence_of(self.data_directory.as_deref()))
    }

    fn take(&self, bytes: Bytes) -> EngineFuture<'_, Taken> {
        Box::pin(self.take_published(bytes))
    }
}
