//! The machine, and one run of each kind.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use onecopy_machine::CheckpointTaken;
use serde::Serialize;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::time::{Interval, MissedTickBehavior};

use super::MEMORY_MIB;
use crate::guests::Guests;
use crate::process_cpu::process_time;
use crate::statistics::Spread;

const NAME: &str = "shop";
/// Memory that is written to.
const SPAN_BYTES: u32 = 256 << 20;
/// pgbench's scale, and its clients.
const SCALE: u32 = 5;
const CLIENTS: u32 = 2;

/// The machine.
pub struct Site {
    guests: Guests,
}

/// Checkpoints of one rate and period, in one round.
#[derive(Debug, Clone, Serialize)]
pub struct Takes {
    /// Megabytes of memory that the guest was to write a second.
    pub rate_mb: u32,
    /// Milliseconds from one to the next, as wanted.
    pub period_ms: u32,
    /// And as they came, on average.
    pub came_ms: f64,
    /// How long the machine stood.
    pub pause_ms: Spread,
    /// Of that, what is not QEMU's own.
    pub own_ms: Spread,
    /// The parts: stop, devices, synchronize, disk, memory, cont; medians.
    pub parts_ms: [f64; 6],
    /// The share of time for which it stood.
    pub paused_share: f64,
    /// Megabytes that changed between two, median.
    pub changed_mb: f64,
    /// Processor time of keeper, memory server and disk server for a megabyte that was kept, milliseconds.
    pub processor_ms_per_mb: f64,
    /// Until one was durable, median.
    pub durable_ms: f64,
}

/// What the server in the machine did.
#[derive(Debug, Clone, Serialize)]
pub struct ServerRate {
    /// The round.
    pub round: u32,
    /// Milliseconds from one checkpoint to the next; none were taken.
    pub period_ms: Option<u32>,
    /// Its transactions a second.
    pub per_second: f64,
}

/// A restore.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Restored {
    /// Until the guest's agent had answered, seconds.
    pub agent_s: f64,
    /// Until the server had.
    pub server_s: f64,
}

impl Site {
    /// Makes it.
    pub async fn begin(place: &Path) -> anyhow::Result<Site> {
        let guests = Guests::new(place)?;
        guests.create(NAME, MEMORY_MIB, &["--postgresql", "--checkpoints"]).await?;
        guests.install(NAME).await?;
        let client = guests.client(NAME)?;
        guests.guest(NAME, &format!("{client}pgbench -i -q -s{SCALE}")).await?;
        guests.checkpoint(NAME, None).await?;
        Ok(Site { guests })
    }

    async fn take(&self) -> anyhow::Result<CheckpointTaken> {
        self.guests.checkpoint(NAME, None).await
    }

    /// Forgets all but the last one: disks have room for so many only.
    async fn tidy(&self) -> anyhow::Result<()> {
        self.guests.checkpoint(NAME, Some(1)).await.map(|_| ())
    }

    /// Processor time of those that take.
    async fn processor_time(&self) -> anyhow::Result<Duration> {
        let status = self.guests.machine(NAME)?.status().await?;
        let servers = [Some(status.keeper_process_id), status.memory_process_id, status.disk_process_id];
        servers.into_iter().flatten().map(process_time).sum()
    }

    /// Ends it as a power cut would, and lets it go on from its last checkpoint.
    pub async fn restore(&self) -> anyhow::Result<Restored> {
        self.tidy().await?;
        self.guests.run(&["vm", "stop", "--force", NAME])?;
        let begun = Instant::now();
        self.guests.run(&["vm", "restore", NAME])?;
        let agent_s = begun.elapsed().as_secs_f64();
        self.guests.answers(NAME, "SELECT 1").await?;
        Ok(Restored { agent_s, server_s: begun.elapsed().as_secs_f64() })
    }

    /// Takes checkpoints at a period; what they were.
    async fn take_for(&self, period_ms: u32, length: Duration) -> anyhow::Result<Vec<CheckpointTaken>> {
        let mut rest = interval(period_ms);
        let (begun, mut taken) = (Instant::now(), Vec::new());
        while begun.elapsed() < length {
            rest.tick().await;
            taken.push(self.take().await?);
        }
        Ok(taken)
    }
}

/// A period that begins anew with a take that comes late.
fn interval(period_ms: u32) -> Interval {
    let mut rest = tokio::time::interval(Duration::from_millis(period_ms.into()));
    rest.set_missed_tick_behavior(MissedTickBehavior::Delay);
    rest
}

/// Measures checkpoints while the guest writes to its memory.
pub async fn takes(site: &Site, rate_mb: u32, period_ms: u32, seconds: u32) -> anyhow::Result<Takes> {
    let (over, report) = ("/run/exercise-over", "/dev/shm/exercise");
    let exercise =
        format!("guest-exercise --memory --span {SPAN_BYTES} --rate {rate_mb}000000 --seconds 3600 --until {over}");
    if rate_mb > 0 {
        let path = "PATH=$PATH:/usr/lib/onecopy";
        let begin = format!("rm -f {over} {report}; {path} setsid {exercise} > {report}.new 2>&1 < /dev/null &");
        site.guests.guest(NAME, &begin).await?;
    }
    // The first one has what was written by the program's beginning.
    site.take().await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    site.take().await?;
    let (begun, before) = (Instant::now(), site.processor_time().await?);
    let taken = site.take_for(period_ms, Duration::from_secs(seconds.into())).await?;
    let (took, used) = (begun.elapsed(), site.processor_time().await?.saturating_sub(before));
    if rate_mb > 0 {
        let end =
            format!("touch {over}; while pgrep -x guest-exercise >/dev/null; do sleep 0.1; done; cat {report}.new");
        let told = site.guests.guest(NAME, &end).await?;
        ensure!(told.contains("\"errors\":0"), "the guest's memory is not as it was written: {told}");
    }
    site.tidy().await?;
    let of = |value: fn(&CheckpointTaken) -> u64| {
        let values: Vec<f64> = taken.iter().map(|one| value(one) as f64 / 1000.0).collect();
        Spread::of(&values).context("no checkpoint was taken")
    };
    let parts: [fn(&CheckpointTaken) -> u64; 6] = [
        |one| one.parts.stop_us,
        |one| one.parts.devices_us,
        |one| one.parts.synchronize_us,
        |one| one.parts.disk_us,
        |one| one.parts.memory_us,
        |one| one.parts.cont_us,
    ];
    let mut parts_ms = [0.0; 6];
    for (part, value) in parts_ms.iter_mut().zip(parts) {
        *part = of(value)?.median;
    }
    let paused_us: u64 = taken.iter().map(|one| one.pause_us).sum();
    let kept_mb = taken.iter().map(|one| one.memory_bytes).sum::<u64>() as f64 / 1e6;
    let changed: Vec<f64> =
        taken.iter().filter(|one| one.since.is_some()).map(|one| one.memory_bytes as f64 / 1e6).collect();
    Ok(Takes {
        rate_mb,
        period_ms,
        came_ms: took.as_secs_f64() * 1e3 / taken.len() as f64,
        pause_ms: of(|one| one.pause_us)?,
        own_ms: of(|one| one.pause_us.saturating_sub(one.parts.stop_us + one.parts.devices_us + one.parts.cont_us))?,
        parts_ms,
        paused_share: paused_us as f64 / took.as_micros() as f64,
        changed_mb: Spread::of(&changed).map_or(0.0, |spread| spread.median),
        processor_ms_per_mb: used.as_secs_f64() * 1e3 / kept_mb,
        durable_ms: Spread::of(&taken.iter().map(|one| one.total_ms as f64).collect::<Vec<_>>())
            .map_or(0.0, |spread| spread.median),
    })
}

/// Measures the server in the machine while checkpoints are taken, or none.
pub async fn server(site: &Site, round: u32, period_ms: Option<u32>, seconds: u32) -> anyhow::Result<ServerRate> {
    let options = format!("-c{CLIENTS} -T{seconds}");
    let work = site.guests.pgbench(NAME, &options);
    let counts = match period_ms {
        None => work.await?,
        Some(period) => {
            // One that is under way when the work is done ends first.
            let (over, mut is_over) = tokio::sync::oneshot::channel::<()>();
            let working = async {
                let counts = work.await;
                drop(over);
                counts
            };
            let taking = async {
                let mut rest = interval(period);
                while is_over.try_recv() == Err(TryRecvError::Empty) {
                    rest.tick().await;
                    site.take().await?;
                }
                anyhow::Ok(())
            };
            let (counts, taken) = tokio::join!(working, taking);
            taken?;
            counts?
        }
    };
    site.tidy().await?;
    Ok(ServerRate { round, period_ms, per_second: counts.transactions_per_second })
}
