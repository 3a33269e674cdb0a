//! PostgreSQL without the extension: it is watched, and its pool has the size that it was started with; with the
//! owner's consent the host drops pages of it by the level `own`.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::checkpoints::Checkpoints;
use super::processes::Outside;
use super::rates::Counters;
use super::session::{Reach, Session};
use super::{Change, Engine, EngineFuture, Presence, Progress, Report, Taken, overtaken};
use crate::own::{Consent, Figures, Own};
use crate::{Bytes, InstanceName, Kind, Level, MemoryError, Observation};

/// The figures of a server without our extension. A connection counts 16 buffers in the floor: more than a query needs
/// that pins none ahead.
const QUESTION: &str = "\
SELECT (SELECT setting::bigint * current_setting('block_size')::bigint FROM pg_settings \
WHERE name = 'shared_buffers'), \
(SELECT coalesce(sum(blks_hit), 0)::bigint FROM pg_stat_database), \
(SELECT coalesce(sum(blks_read), 0)::bigint FROM pg_stat_database), \
current_setting('block_size')::bigint, \
16 * current_setting('block_size')::bigint * current_setting('max_connections')::bigint";

/// The least that a server can work with.
const FLOOR_BYTES: Bytes = 64 << 20;
/// No more is dropped at once: it takes about half a second, and somebody waits for the figures.
const STEP_BYTES_MAX: Bytes = 512 << 20;
/// How often a change that somebody waits for is looked at.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// What would make such a server resizable.
const REMEDY: &str = "install the extension onecopy (shared_preload_libraries, a restart, CREATE EXTENSION), restart \
                      it with another shared_buffers, or accept the risk of the level own";

/// A server of PostgreSQL without the extension.
pub struct PlainEngine {
    instance: InstanceName,
    data_directory: Option<PathBuf>,
    consent: Consent,
    session: Session,
    counters: Counters,
    outside: Outside,
    /// What of the pool shall be in RAM at most, kept here because the server knows nothing of it; [`Bytes::MAX`] for
    /// all.
    target_bytes: AtomicU64,
    /// Held by who drops pages.
    dropping: Arc<Mutex<()>>,
    checkpoints: Checkpoints,
}

/// What the server itself says.
struct ReportedState {
    shared_buffers_bytes: Bytes,
    hits: u64,
    reads: u64,
    block_bytes: Bytes,
    floor_bytes: Bytes,
}

impl PlainEngine {
    /// The server that `reach` finds; it need not run yet. `data_directory` tells where it is on this host. With
    /// [`Consent::Given`] the level is `own`, else its pool cannot be changed.
    ///
    /// # Errors
    /// [`MemoryError::WrongLevel`] for consent without a data directory.
    pub fn new(
        instance: InstanceName,
        reach: impl Into<Reach>,
        data_directory: Option<PathBuf>,
        consent: Consent,
    ) -> Result<PlainEngine, MemoryError> {
        if consent == Consent::Given && data_directory.is_none() {
            let action = "be used without the server's data directory on this host";
            return Err(MemoryError::WrongLevel { instance, level: Level::Own, action });
        }
        let reach = reach.into();
        let session = Session::new(instance.clone(), reach.clone());
        let checkpoints = Checkpoints::new(instance.clone(), reach);
        Ok(PlainEngine {
            instance,
            data_directory,
            consent,
            session,
            counters: Counters::default(),
            outside: Outside::new(),
            target_bytes: AtomicU64::new(Bytes::MAX),
            dropping: Arc::default(),
            checkpoints,
        })
    }

    async fn ask(&self) -> Result<ReportedState, MemoryError> {
        let action = "tell its memory";
        let row = self.session.run(action, |client| async move { client.query_one(QUESTION, &[]).await }).await?;
        let number = |column: usize| Bytes::try_from(row.get::<_, i64>(column)).unwrap_or(0);
        let shared_buffers_bytes = number(0);
        let floor_bytes = FLOOR_BYTES.max(number(4)).min(shared_buffers_bytes);
        Ok(ReportedState {
            shared_buffers_bytes,
            hits: number(1),
            reads: number(2),
            block_bytes: number(3),
            floor_bytes,
        })
    }

    /// The server's figures; at level `own` its pages are dropped on the way: a target holds only while they are, again
    /// and again.
    async fn query_status(&self) -> Result<Observation, MemoryError> {
        let told = self.ask().await?;
        let figures = if self.owned() { Some(self.hold().await?) } else { None };
        let rates = self.counters.rates(Instant::now(), told.hits, told.reads);
        let shared_buffers_bytes = told.shared_buffers_bytes;
        let target_bytes = self.target_bytes.load(Ordering::Relaxed).min(shared_buffers_bytes);
        // Without a target the pool may take all of it at any time.
        let pool_bytes = figures.filter(|_| target_bytes < shared_buffers_bytes);
        let mut observation = Observation {
            instance: self.instance.clone(),
            answered: true,
            pool_bytes: pool_bytes.map_or(shared_buffers_bytes, |figures| figures.resident_bytes.max(target_bytes)),
            target_bytes,
            ceiling_bytes: shared_buffers_bytes,
            floor_bytes: if self.owned() { told.floor_bytes } else { shared_buffers_bytes },
            granule_bytes: told.block_bytes,
            published_bytes: 0,
            huge_pages: false,
            returned_huge_bytes: 0,
            working_set_bytes: figures.map(|figures| figures.working_set_bytes),
            hit_ratio: rates.hit_ratio,
            hits_per_second: rates.hits_per_second,
            reads_per_second: rates.reads_per_second,
            ghost: Vec::new(),
            resident_bytes: None,
            swap_bytes: None,
            touched_bytes: None,
            blocked_by: figures.and_then(|figures| hindrance(&figures, target_bytes)),
            limits: Vec::new(),
        };
        self.outside.add_server_to(&mut observation, self.data_directory.as_deref()).await;
        Ok(observation)
    }

    fn owned(&self) -> bool {
        self.consent == Consent::Given
    }

    /// Drops some of what is above the target, and says what is left. What is dirty is written by a checkpoint, for the
    /// next time.
    async fn hold(&self) -> Result<Figures, MemoryError> {
        let target_bytes = self.target_bytes.load(Ordering::Relaxed);
        let figures = self.drop_above(target_bytes).await?;
        if figures.resident_bytes > target_bytes && figures.dirty_bytes > 0 {
            self.checkpoints.ask();
        }
        Ok(figures)
    }

    async fn drop_above(&self, target_bytes: Bytes) -> Result<Figures, MemoryError> {
        let consent = self.consent;
        let dropping = Arc::clone(&self.dropping);
        self.blocking(move |directory| {
            let own = Own::open(&directory, consent)?;
            let figures = own.figures()?;
            // One drops already, for somebody who did not wait for its end.
            let Ok(_dropping) = dropping.try_lock() else { return Ok(figures) };
            if figures.resident_bytes <= target_bytes {
                return Ok(figures);
            }
            let next_bytes = target_bytes.max(figures.resident_bytes.saturating_sub(STEP_BYTES_MAX));
            let dropped = own.shrink_to(next_bytes)?;
            Ok(Figures { resident_bytes: dropped.resident_bytes, ..figures })
        })
        .await
    }

    /// Work that waits for the kernel, on a thread that may wait.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(PathBuf) -> Result<T, MemoryError> + Send + 'static,
    ) -> Result<T, MemoryError> {
        let Some(directory) = self.data_directory.clone() else { return Err(self.unable()) };
        let done = tokio::task::spawn_blocking(move || work(directory)).await;
        done.unwrap_or_else(|error| {
            let (instance, reason) = (self.instance.clone(), error.to_string());
            Err(MemoryError::Statement { instance, action: "give memory", reason })
        })
    }

    async fn give(&self, target_bytes: Bytes) -> Result<Change, MemoryError> {
        if !self.owned() {
            return Err(self.unable());
        }
        let told = self.ask().await?;
        let (floor_bytes, ceiling_bytes) = (told.floor_bytes, told.shared_buffers_bytes);
        let instance = self.instance.clone();
        if target_bytes < floor_bytes {
            return Err(MemoryError::BelowFloor { instance, target_bytes, floor_bytes });
        }
        if target_bytes > ceiling_bytes {
            return Err(MemoryError::AboveCeiling { instance, target_bytes, ceiling_bytes });
        }
        let before = self.target_bytes.swap(target_bytes, Ordering::Relaxed);
        let held = self.hold().await.inspect_err(|_| self.target_bytes.store(before, Ordering::Relaxed))?;
        let from_bytes = before.min(ceiling_bytes);
        Ok(Change { from_bytes, target_bytes, pool_bytes: held.resident_bytes.max(target_bytes) })
    }

    async fn watch(&self, target_bytes: Bytes, report: Report<'_>) -> Result<Change, MemoryError> {
        if !self.owned() {
            return Err(self.unable());
        }
        let mut from_bytes = None;
        loop {
            let now = self.query_status().await?;
            let pool_bytes = now.pool_bytes;
            let from_bytes = *from_bytes.get_or_insert(pool_bytes);
            report(&Progress { from_bytes, target_bytes, pool_bytes, blocked_by: now.blocked_by });
            if now.target_bytes != target_bytes {
                return Err(overtaken(&self.instance, now.target_bytes));
            }
            if pool_bytes == target_bytes {
                return Ok(Change { from_bytes, target_bytes, pool_bytes });
            }
            tokio::time::sleep(WATCH_INTERVAL).await;
        }
    }

    async fn drop_pages(&self, wanted_bytes: Bytes) -> Result<Taken, MemoryError> {
        if !self.owned() {
            let (instance, level) = (self.instance.clone(), self.level());
            return Err(MemoryError::WrongLevel { instance, level, action: "take memory without asking" });
        }
        let consent = self.consent;
        let begin = Instant::now();
        let bytes = self
            .blocking(move |directory| {
                let own = Own::open(&directory, consent)?;
                let target_bytes = own.figures()?.resident_bytes.saturating_sub(wanted_bytes);
                Ok(own.shrink_to(target_bytes)?.bytes)
            })
            .await?;
        let microseconds = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        Ok(Taken { bytes, size_bytes: bytes, microseconds })
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

/// Why pages above the target are still there.
fn hindrance(figures: &Figures, target_bytes: Bytes) -> Option<String> {
    if figures.resident_bytes <= target_bytes {
        return None;
    }
    let (dirty, pinned) = (crate::size::text(figures.dirty_bytes), crate::size::text(figures.pinned_bytes));
    Some(format!("{dirty} must be written first (CHECKPOINT writes them), {pinned} are in use"))
}

impl Engine for PlainEngine {
    fn instance(&self) -> &InstanceName {
        &self.instance
    }

    fn kind(&self) -> Kind {
        Kind::PostgreSql
    }

    fn level(&self) -> Level {
        if self.owned() { Level::Own } else { Level::Request }
    }

    fn observe(&self) -> EngineFuture<'_, Observation> {
        Box::pin(self.query_status())
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
        Box::pin(self.drop_pages(bytes))
    }
}
