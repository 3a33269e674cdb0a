//! PostgreSQL without the extension: it is watched, and its pool has the size that it was started with.

use std::path::PathBuf;
use std::time::Instant;

use super::processes::Outside;
use super::rates::Counters;
use super::session::{Reach, Session};
use super::{Change, Engine, EngineFuture, Presence, Report, Taken};
use crate::{Bytes, InstanceName, Kind, Level, MemoryError, Observation};

/// The figures of a server without our extension.
const QUESTION: &str = "\
SELECT (SELECT setting::bigint * current_setting('block_size')::bigint FROM pg_settings \
WHERE name = 'shared_buffers'), \
(SELECT coalesce(sum(blks_hit), 0)::bigint FROM pg_stat_database), \
(SELECT coalesce(sum(blks_read), 0)::bigint FROM pg_stat_database), \
current_setting('block_size')::bigint";

/// What would make such a server resizable.
const REMEDY: &str = if cfg!(feature = "own") {
    "install the extension onecopy (shared_preload_libraries, a restart, CREATE EXTENSION), restart it with another \
     shared_buffers, or accept the risk of the level own"
} else {
    "install the extension onecopy (shared_preload_libraries, a restart, CREATE EXTENSION), or restart it with another \
     shared_buffers"
};

/// A server of PostgreSQL without the extension.
pub struct PlainEngine {
    instance: InstanceName,
    data_directory: Option<PathBuf>,
    pub(super) session: Session,
    counters: Counters,
    outside: Outside,
}

/// What the server itself says.
pub(super) struct ReportedState {
    pub(super) shared_buffers_bytes: Bytes,
    hits: u64,
    reads: u64,
    block_bytes: Bytes,
}

impl PlainEngine {
    /// The server that `reach` finds; it need not run yet. `data_directory` tells where it is on this host.
    pub fn new(instance: InstanceName, reach: impl Into<Reach>, data_directory: Option<PathBuf>) -> PlainEngine {
        let session = Session::new(instance.clone(), reach.into());
        PlainEngine { instance, data_directory, session, counters: Counters::default(), outside: Outside::new() }
    }

    pub(super) async fn ask(&self) -> Result<ReportedState, MemoryError> {
        let action = "tell its memory";
        let row = self.session.run(action, |client| async move { client.query_one(QUESTION, &[]).await }).await?;
        let number = |column: usize| Bytes::try_from(row.get::<_, i64>(column)).unwrap_or(0);
        Ok(ReportedState { shared_buffers_bytes: number(0), hits: number(1), reads: number(2), block_bytes: number(3) })
    }

    /// Its figures by what it has said: its pool is all that it may have.
    pub(super) async fn observation(&self, told: &ReportedState) -> Observation {
        let rates = self.counters.rates(Instant::now(), told.hits, told.reads);
        let pool_bytes = told.shared_buffers_bytes;
        let mut observation = Observation {
            instance: self.instance.clone(),
            answered: true,
            pool_bytes,
            target_bytes: pool_bytes,
            ceiling_bytes: pool_bytes,
            floor_bytes: pool_bytes,
            granule_bytes: told.block_bytes,
            published_bytes: 0,
            huge_pages: false,
            returned_huge_bytes: 0,
            working_set_bytes: None,
            hit_ratio: rates.hit_ratio,
            hits_per_second: rates.hits_per_second,
            reads_per_second: rates.reads_per_second,
            ghost: Vec::new(),
            resident_bytes: None,
            swap_bytes: None,
            touched_bytes: None,
            blocked_by: None,
            limits: Vec::new(),
        };
        self.outside.add_server_to(&mut observation, self.data_directory.as_deref()).await;
        observation
    }

    fn unable(&self) -> MemoryError {
        MemoryError::Unable {
            instance: self.instance.clone(),
            action: "be resized",
            reason: "PostgreSQL alone has a pool of fixed size".to_owned(),
            remedy: REMEDY,
        }
    }
}

impl Engine for PlainEngine {
    fn instance(&self) -> &InstanceName {
        &self.instance
    }

    fn kind(&self) -> Kind {
        Kind::PostgreSql
    }

    fn level(&self) -> Level {
        Level::Request
    }

    fn observe(&self) -> EngineFuture<'_, Observation> {
        Box::pin(async { Ok(self.observation(&self.ask().await?).await) })
    }

    fn set_target(&self, _target_bytes: Bytes) -> EngineFuture<'_, Change> {
        Box::pin(async { Err(self.unable()) })
    }

    fn reach<'a>(&'a self, _target_bytes: Bytes, _report: Report<'a>) -> EngineFuture<'a, Change> {
        Box::pin(async { Err(self.unable()) })
    }

    fn presence(&self) -> EngineFuture<'_, Presence> {
        Box::pin(self.outside.presence_of(self.data_directory.as_deref()))
    }

    fn take(&self, _bytes: Bytes) -> EngineFuture<'_, Taken> {
        let (instance, level) = (self.instance.clone(), self.level());
        let refused = MemoryError::WrongLevel { instance, level, action: "take memory without asking" };
        Box::pin(async { Err(refused) })
    }
}
