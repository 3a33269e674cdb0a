//! PostgreSQL without the extension, at level `own`: the host drops pages of its pool.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::checkpoints::Checkpoints;
use super::plain::PlainEngine;
use super::session::Reach;
use super::{Change, Engine, EngineFuture, Presence, Progress, Report, Taken, overtaken};
use crate::own::{Figures, Own};
use crate::{Bytes, InstanceName, Kind, Level, MemoryError, Observation};

/// The least that a server can work with.
const FLOOR_BYTES: Bytes = 64 << 20;
/// What its connections may hold: 16 buffers each, more than a query needs that pins none ahead.
const PINNED: &str = "SELECT 16 * current_setting('block_size')::bigint * current_setting('max_connections')::bigint";
/// No more is dropped at once: it takes about half a second, and somebody waits for the figures.
const STEP_BYTES_MAX: Bytes = 512 << 20;
/// How often a change that somebody waits for is looked at.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// A server of PostgreSQL without the extension, whose owner takes the risk that pages of it are dropped from outside.
pub struct OwnEngine {
    plain: PlainEngine,
    data_directory: PathBuf,
    /// What of the pool shall be in RAM at most, kept here because the server knows nothing of it; [`Bytes::MAX`] for
    /// all.
    target_bytes: AtomicU64,
    /// Held by who drops pages.
    dropping: Arc<Mutex<()>>,
    checkpoints: Checkpoints,
}

impl OwnEngine {
    /// The server that `reach` finds; it need not run yet. `data_directory` tells where it is on this host.
    ///
    /// # Errors
    /// [`MemoryError::WrongLevel`] without a data directory.
    pub fn new(
        instance: InstanceName,
        reach: impl Into<Reach>,
        data_directory: Option<PathBuf>,
    ) -> Result<OwnEngine, MemoryError> {
        let Some(data_directory) = data_directory else {
            let action = "be used without the server's data directory on this host";
            return Err(MemoryError::WrongLevel { instance, level: Level::Own, action });
        };
        let reach = reach.into();
        let checkpoints = Checkpoints::new(instance.clone(), reach.clone());
        Ok(OwnEngine {
            plain: PlainEngine::new(instance, reach, Some(data_directory.clone())),
            data_directory,
            target_bytes: AtomicU64::new(Bytes::MAX),
            dropping: Arc::default(),
            checkpoints,
        })
    }

    /// The server's figures; its pages are dropped on the way: a target holds only while they are, again and again.
    async fn query_status(&self) -> Result<Observation, MemoryError> {
        let told = self.plain.ask().await?;
        let shared_buffers_bytes = told.shared_buffers_bytes;
        let floor_bytes = self.floor_bytes(shared_buffers_bytes).await?;
        let figures = self.hold().await?;
        let target_bytes = self.target_bytes.load(Ordering::Relaxed).min(shared_buffers_bytes);
        // Without a target the pool may take all of it at any time.
        let is_held = target_bytes < shared_buffers_bytes;
        Ok(Observation {
            pool_bytes: if is_held { figures.resident_bytes.max(target_bytes) } else { shared_buffers_bytes },
            target_bytes,
            floor_bytes,
            working_set_bytes: Some(figures.working_set_bytes),
            blocked_by: hindrance(&figures, target_bytes),
            ..self.plain.observation(&told).await
        })
    }

    async fn floor_bytes(&self, shared_buffers_bytes: Bytes) -> Result<Bytes, MemoryError> {
        let action = "tell its connections";
        let row = self.plain.session.run(action, |client| async move { client.query_one(PINNED, &[]).await }).await?;
        let pinned_bytes = Bytes::try_from(row.get::<_, i64>(0)).unwrap_or(0);
        Ok(FLOOR_BYTES.max(pinned_bytes).min(shared_buffers_bytes))
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
        let dropping = Arc::clone(&self.dropping);
        self.blocking(move |own| {
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
        work: impl FnOnce(&Own) -> Result<T, MemoryError> + Send + 'static,
    ) -> Result<T, MemoryError> {
        let directory = self.data_directory.clone();
        let done = tokio::task::spawn_blocking(move || work(&Own::open(&directory)?)).await;
        done.unwrap_or_else(|error| {
            let (instance, reason) = (self.instance().clone(), error.to_string());
            Err(MemoryError::Statement { instance, action: "give memory", reason })
        })
    }

    async fn give(&self, target_bytes: Bytes) -> Result<Change, MemoryError> {
        let told = self.plain.ask().await?;
        let ceiling_bytes = told.shared_buffers_bytes;
        let floor_bytes = self.floor_bytes(ceiling_bytes).await?;
        let instance = self.instance().clone();
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
        let mut from_bytes = None;
        loop {
            let now = self.query_status().await?;
            let pool_bytes = now.pool_bytes;
            let from_bytes = *from_bytes.get_or_insert(pool_bytes);
            report(&Progress { from_bytes, target_bytes, pool_bytes, blocked_by: now.blocked_by });
            if now.target_bytes != target_bytes {
                return Err(overtaken(self.instance(), now.target_bytes));
            }
            if pool_bytes == target_bytes {
                return Ok(Change { from_bytes, target_bytes, pool_bytes });
            }
            tokio::time::sleep(WATCH_INTERVAL).await;
        }
    }

    async fn drop_pages(&self, wanted_bytes: Bytes) -> Result<Taken, MemoryError> {
        let begin = Instant::now();
        let dropped = self.blocking(move |own| {
            let target_bytes = own.figures()?.resident_bytes.saturating_sub(wanted_bytes);
            Ok(own.shrink_to(target_bytes)?.bytes)
        });
        let bytes = dropped.await?;
        let microseconds = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        Ok(Taken { bytes, size_bytes: bytes, microseconds })
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

impl Engine for OwnEngine {
    fn instance(&self) -> &InstanceName {
        self.plain.instance()
    }

    fn kind(&self) -> Kind {
        Kind::PostgreSql
    }

    fn level(&self) -> Level {
        Level::Own
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
        self.plain.presence()
    }

    fn take(&self, bytes: Bytes) -> EngineFuture<'_, Taken> {
        Box::pin(self.drop_pages(bytes))
    }
}
