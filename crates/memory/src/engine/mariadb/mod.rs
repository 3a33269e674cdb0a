//! MariaDB 10.11 and newer, MySQL 8: level `request` by their own dynamic buffer pool.

mod client;
mod figures;
mod resize;

use std::path::Path;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use super::processes::Outside;
use super::rates::Counters;
use super::{Change, Engine, EngineFuture, Progress, Report, Taken};
use crate::{Bytes, InstanceName, Kind, Level, MemoryError, Observation};

pub use client::MariaDbAccess;

use client::Client;
use figures::{Figures, QUESTION};
use resize::Resizer;

/// A size that is refused is refused within this; one that needs longer is on its way.
const REFUSAL_TIMEOUT: Duration = Duration::from_millis(500);
/// How often a resize that somebody waits for is looked at.
const WATCH_INTERVAL: Duration = Duration::from_millis(200);

/// A server of MariaDB or MySQL on this host, resized by `SET GLOBAL innodb_buffer_pool_size`.
pub struct MariaDbEngine {
    instance: InstanceName,
    kind: Kind,
    access: MariaDbAccess,
    /// The most that is asked for, where the server itself has no limit.
    ceiling_bytes: Bytes,
    /// The client that asks for figures; none before the first question and after a failure. Taken out while it is
    /// used: who stops waiting drops it.
    client: Mutex<Option<Client>>,
    resizer: Resizer,
    counters: Counters,
    outside: Outside,
}

impl MariaDbEngine {
    /// The server that `access` reaches; it need not run yet. `ceiling_bytes` is the most that it may be asked to have,
    /// for instance the host's RAM: most versions know no limit of their own. `kind` is [`Kind::MariaDb`] or
    /// [`Kind::MySql`] and names the client.
    pub fn new(instance: InstanceName, kind: Kind, access: MariaDbAccess, ceiling_bytes: Bytes) -> MariaDbEngine {
        let resizer = Resizer::new(access.clone(), instance.clone(), kind);
        MariaDbEngine {
            instance,
            kind,
            access,
            ceiling_bytes,
            client: Mutex::new(None),
            resizer,
            counters: Counters::default(),
            outside: Outside::new(),
        }
    }

    async fn figures(&self) -> Result<Figures, MemoryError> {
        let mut place = self.client.lock().await;
        let mut client = match place.take() {
            Some(client) => client,
            None => Client::start(&self.access, &self.instance, self.kind)?,
        };
        let rows = client.ask(QUESTION).await?;
        *place = Some(client);
        Figures::of(&rows).map_err(|reason| MemoryError::Statement {
            instance: self.instance.clone(),
            action: "tell its buffer pool",
            reason,
        })
    }

    /// The most it may have: its own limit or ours, in whole units.
    fn ceiling_bytes(&self, figures: &Figures) -> Bytes {
        let most_bytes = figures.ceiling_bytes.unwrap_or(Bytes::MAX).min(self.ceiling_bytes);
        (most_bytes - most_bytes % figures.unit_bytes).max(figures.target_bytes)
    }

    async fn observation(&self, figures: &Figures) -> Observation {
        let hits = figures.requests.saturating_sub(figures.reads);
        let rates = self.counters.rates(Instant::now(), hits, figures.reads);
        let mut observation = Observation {
            instance: self.instance.clone(),
            answered: true,
            pool_bytes: figures.pool_bytes(),
            target_bytes: figures.target_bytes,
            ceiling_bytes: self.ceiling_bytes(figures),
            floor_bytes: figures.floor_bytes(),
            granule_bytes: figures.unit_bytes,
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
            blocked_by: self.blocked_by(figures),
            limits: Vec::new(),
        };
        self.outside.add_to(&mut observation, figures.pid_file.as_ref().map(Path::new)).await;
        observation
    }

    fn blocked_by(&self, figures: &Figures) -> Option<String> {
        let on_the_way = figures.pool_bytes() != figures.target_bytes;
        let status = Some(&figures.resize_status).filter(|status| on_the_way && !status.is_empty()).cloned();
        self.resizer.failure().or(status)
    }

    async fn give(&self, wanted_bytes: Bytes) -> Result<Change, MemoryError> {
        let before = self.figures().await?;
        let target_bytes = before.rounded(wanted_bytes);
        let (floor_bytes, ceiling_bytes) = (before.floor_bytes(), self.ceiling_bytes(&before));
        if wanted_bytes < floor_bytes {
            let instance = self.instance.clone();
            return Err(MemoryError::BelowFloor { instance, target_bytes: wanted_bytes, floor_bytes });
        }
        if target_bytes > ceiling_bytes {
            let instance = self.instance.clone();
            return Err(MemoryError::AboveCeiling { instance, target_bytes: wanted_bytes, ceiling_bytes });
        }
        let from_bytes = before.pool_bytes();
        if target_bytes != before.target_bytes {
            self.resizer.resize(target_bytes, REFUSAL_TIMEOUT).await?;
        }
        let pool_bytes = self.figures().await?.pool_bytes();
        Ok(Change { from_bytes, target_bytes, pool_bytes })
    }

    async fn watch(&self, target_bytes: Bytes, report: Report<'_>) -> Result<Change, MemoryError> {
        let mut from_bytes = None;
        loop {
            // Asked first: figures of before its end would say that another size is wanted.
            let was_working = self.resizer.is_working();
            let figures = self.figures().await?;
            let pool_bytes = figures.pool_bytes();
            let from_bytes = *from_bytes.get_or_insert(pool_bytes);
            report(&Progress { from_bytes, target_bytes, pool_bytes, blocked_by: self.blocked_by(&figures) });
            if let Some(reason) = self.resizer.failure() {
                let instance = self.instance.clone();
                return Err(MemoryError::Statement { instance, action: "take this size", reason });
            }
            if pool_bytes == target_bytes && figures.target_bytes == target_bytes {
                return Ok(Change { from_bytes, target_bytes, pool_bytes });
            }
            if figures.target_bytes != target_bytes && !was_working {
                return Err(super::overtaken(&self.instance, figures.target_bytes));
            }
            tokio::time::sleep(WATCH_INTERVAL).await;
        }
    }
}

impl Engine for MariaDbEngine {
    fn instance(&self) -> &InstanceName {
        &self.instance
    }

    fn kind(&self) -> Kind {
        self.kind
    }

    fn level(&self) -> Level {
        Level::Request
    }

    fn observe(&self) -> EngineFuture<'_, Observation> {
        Box::pin(async { Ok(self.observation(&self.figures().await?).await) })
    }

    fn set_target(&self, target_bytes: Bytes) -> EngineFuture<'_, Change> {
        Box::pin(self.give(target_bytes))
    }

    fn reach<'a>(&'a self, target_bytes: Bytes, report: Report<'a>) -> EngineFuture<'a, Change> {
        Box::pin(self.watch(target_bytes, report))
    }

    fn take(&self, _bytes: Bytes) -> EngineFuture<'_, Taken> {
        let instance = self.instance.clone();
        Box::pin(std::future::ready(Err(MemoryError::WrongLevel {
            instance,
            level: Level::Request,
            action: "take memory without asking",
        })))
    }
}
