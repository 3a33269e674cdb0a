//! The methods to make a clone, each from the start to an answer.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use onecopy_clone::methods::{CloneMethod, Copy, Lazy, PreparedClone, Reflink};
use onecopy_clone::plan::{FillOptions, Plan, Recovery, SourceServer, Warm};
use onecopy_clone::service::{CloneState, Service, ServiceMaker};
use onecopy_clone::warm::Prewarming;
use onecopy_postgres::{Server, StandbyOptions, StopMode};
use serde::Serialize;

use super::site::Site;

/// What the clone is called, and its slot.
const NAME: &str = "clone";
/// The clone may keep this much of its source's log.
const WAL_KEEP_BYTES_MAX: u64 = 16 << 30;
/// A clone is whole by then, or the experiment is over.
const WHOLE_TIMEOUT: Duration = Duration::from_secs(1800);

/// A slot that is still held by then stays.
const SLOT_TIMEOUT: Duration = Duration::from_secs(20);

/// A method to make a clone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BenchMethod {
    /// Filled while it runs.
    Lazy,
    /// Shared blocks.
    Reflink,
    /// pg_basebackup.
    Copy,
}

impl BenchMethod {
    /// All, in the order of the columns.
    pub const ALL: [BenchMethod; 3] = [BenchMethod::Lazy, BenchMethod::Reflink, BenchMethod::Copy];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            BenchMethod::Lazy => "lazy",
            BenchMethod::Reflink => "reflink",
            BenchMethod::Copy => "copy",
        }
    }
}

impl fmt::Display for BenchMethod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// As fast as it goes, hot pages not before others.
pub const UNBOUNDED: FillOptions = FillOptions { limit_bytes_per_second: None, warm: Warm::Off };

/// A clone that has answered.
pub struct Clone {
    /// Its server.
    pub server: Server,
    /// When it was asked for.
    pub begin: Instant,
    /// How long after that it answered.
    pub first_answer: Duration,
    /// How long the source's accesses waited; none where they do not.
    pub pause: Option<Duration>,
    plan: Plan,
    service: Option<Service>,
}

impl Clone {
    /// Makes a clone and waits for its first answer.
    pub async fn make(site: &Site, method: BenchMethod, fill: FillOptions) -> anyhow::Result<Clone> {
        let options = site.options(NAME)?;
        options.user.create_directory(&options.home)?;
        let plan = plan(site, &options.home, fill);
        let begin = Instant::now();
        let prewarming = (fill.warm == Warm::Full).then(|| Prewarming::begin(plan.source.connection.clone()));
        let mut service = None;
        let (inherited, pause) = match method {
            BenchMethod::Lazy => {
                let made = by(&Lazy::new(Arc::new(ServiceMaker::new(site.program.clone()))), &plan).await?;
                service = Some(Service::reach(&site.program, site.source.data_directory()).await?);
                (made.inherited, Some(made.pause))
            }
            BenchMethod::Reflink => (by(&Reflink, &plan).await?.inherited, None),
            BenchMethod::Copy => (by(&Copy { binaries: options.binaries.clone() }, &plan).await?.inherited, None),
        };
        let mut options = options;
        if let Some(prewarming) = prewarming {
            prewarming.apply(&mut options, &plan.target).await.map_err(|reason| anyhow!("not warmed: {reason}"))?;
        }
        let server = Server::open(options).await?;
        let primary = site.source.connection().with_application_name(NAME);
        server.make_standby(&StandbyOptions { primary, slot: Some(NAME.to_owned()) })?;
        server.set_inherited(inherited);
        server.start().await?;
        server.connection().connect_as_client().await?.query_one("SELECT count(*) FROM pg_class", &[]).await?;
        Ok(Clone { server, begin, first_answer: begin.elapsed(), pause, plan, service })
    }

    /// Waits until it has replayed what the source has committed by now; how long after the beginning that is.
    pub async fn wait_caught_up(&self, site: &Site) -> anyhow::Result<Duration> {
        let source = site.source.connection().connect_as_client().await?;
        let row = source.query_one("SELECT pg_current_wal_flush_lsn()::text", &[]).await?;
        let question = format!("SELECT pg_last_wal_replay_lsn() >= '{}'::pg_lsn", row.get::<_, String>(0));
        let clone = self.server.connection().connect_as_client().await?;
        while !clone.query_one(&question, &[]).await?.get::<_, Option<bool>>(0).unwrap_or(false) {
            if self.begin.elapsed() > WHOLE_TIMEOUT {
                bail!("the clone does not catch up");
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(self.begin.elapsed())
    }

    /// Waits until nothing is missing; how long after the beginning that is.
    pub async fn wait_whole(&self) -> anyhow::Result<Duration> {
        let Some(service) = &self.service else { return Ok(self.first_answer) };
        let mut watching = service.watch(&self.plan.target);
        while let Some(progress) = watching.next().await? {
            if let CloneState::Discarded { reason } = progress.state {
                bail!("the clone was discarded: {reason}");
            }
        }
        Ok(self.begin.elapsed())
    }

    /// Removes it, whole or not.
    pub async fn remove(self, site: &Site) -> anyhow::Result<()> {
        let is_whole = match &self.service {
            Some(service) => {
                let clones = service.list().await?;
                !clones.iter().any(|clone| clone.target == self.plan.target && !clone.state.is_final())
            }
            None => true,
        };
        match &self.service {
            Some(service) if !is_whole => service.discard(&self.plan.target).await?,
            _ => {
                self.server.stop(StopMode::Immediate).await?;
                drop_slot(site).await?;
            }
        }
        let home = self.plan.target.parent().context("the clone has a home")?;
        Ok(std::fs::remove_dir_all(home)?)
    }
}

/// The sender of a clone that has just stopped may hold its slot for a moment.
async fn drop_slot(site: &Site) -> anyhow::Result<()> {
    let begin = Instant::now();
    loop {
        match site.source.drop_slot(NAME).await {
            Err(_) if begin.elapsed() < SLOT_TIMEOUT => tokio::time::sleep(Duration::from_millis(100)).await,
            dropped => return Ok(dropped?),
        }
    }
}

fn plan(site: &Site, home: &Path, fill: FillOptions) -> Plan {
    Plan {
        source: SourceServer {
            connection: site.source.connection(),
            data_directory: site.source.data_directory().to_owned(),
            leader: None,
            replication: None,
        },
        target: home.join("data"),
        tablespaces: home.join("tablespaces"),
        user_name: site.source.options().user.name().to_owned(),
        slot: NAME.to_owned(),
        recovery: Recovery::Auto,
        fill,
        wal_keep_bytes_max: WAL_KEEP_BYTES_MAX,
    }
}

async fn by(method: &impl CloneMethod, plan: &Plan) -> anyhow::Result<PreparedClone> {
    if let Some(obstacle) = method.obstacle(plan) {
        bail!("not possible here: {obstacle}");
    }
    let made = method.make(std::slice::from_ref(plan), &|_, _| ()).await.pop();
    Ok(made.ok_or_else(|| anyhow!("no clone"))??)
}
