//! A pool that is resized at random while others work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::memory::pool::Pool;
use crate::memory::segment::Segment;
use crate::servers::TestServer;

/// What is there beside the pool's blocks may come into being while a server works: descriptors, hash tables, locks.
const BESIDE_POOL_BYTES_MAX: u64 = 48 << 20;

/// How long the proof under load takes, in seconds, when it shall not be its usual time.
const SECONDS_VARIABLE: &str = "ONECOPY_SOAK_SECONDS";

/// How long to go on: as the environment says, or as usual.
///
/// # Errors
///
/// What the environment says is no number.
pub fn load_seconds(usual: u64) -> anyhow::Result<u64> {
    let Ok(text) = std::env::var(SECONDS_VARIABLE) else { return Ok(usual) };
    text.parse().with_context(|| format!("{SECONDS_VARIABLE}={text}"))
}

/// What has been done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// To a smaller size.
    pub shrinks: u64,
    /// To a larger size.
    pub growths: u64,
}

/// The same while it goes on.
#[derive(Debug, Default)]
pub struct SharedReport {
    shrinks: AtomicU64,
    growths: AtomicU64,
}

impl SharedReport {
    /// What has been done so far.
    pub fn now(&self) -> Report {
        Report { shrinks: self.shrinks.load(Ordering::Relaxed), growths: self.growths.load(Ordering::Relaxed) }
    }
}

/// Resizes between `least` and the ceiling until `stopping`; each time the kernel must agree with the extension.
///
/// # Errors
///
/// A refusal; a pool that is not as large as was said; a segment that is larger than its pool allows.
pub async fn resize_at_random(
    server: &TestServer,
    least_bytes: u64,
    seed: u64,
    stopping: &Arc<AtomicBool>,
    report: &SharedReport,
) -> anyhow::Result<()> {
    let mut random = StdRng::seed_from_u64(seed);
    let pool = Pool::of(server).await?;
    let segment = Segment::of(server)?;
    let ceiling = pool.status().await?.ceiling_bytes;
    let mut size = pool.status().await?.pool_bytes;
    while !stopping.load(Ordering::Relaxed) {
        // In kB, as targets are.
        let wanted = random.random_range(least_bytes >> 10..=ceiling >> 10) << 10;
        if random.random_range(0..4) == 0 {
            // Given up at once for another one.
            pool.want(&format!("{} kB", random.random_range(least_bytes..=ceiling) >> 10), false).await?;
        }
        let reached = pool.resize(wanted).await?;
        let status = pool.status().await?;
        ensure!(reached >= wanted && reached <= ceiling, "seed {seed}: {reached} for {wanted}");
        ensure!(status.pool_bytes == reached, "seed {seed}: {reached} was said to be reached: {status:?}");
        let present = segment.present_bytes()?;
        ensure!(
            present <= reached + BESIDE_POOL_BYTES_MAX,
            "seed {seed}: {present} bytes are there with a pool of {reached}: {status:?}"
        );
        match reached.cmp(&size) {
            std::cmp::Ordering::Less => drop(report.shrinks.fetch_add(1, Ordering::Relaxed)),
            std::cmp::Ordering::Greater => drop(report.growths.fetch_add(1, Ordering::Relaxed)),
            std::cmp::Ordering::Equal => {}
        }
        size = reached;
    }
    Ok(())
}
