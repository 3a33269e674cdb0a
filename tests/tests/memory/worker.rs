//! The process that makes a pool small and large: what it costs itself.

use std::time::Duration;

use anyhow::{Context, ensure};
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::pages::{self, PAGE_BYTES};

const CEILING_BYTES: u64 = 256 * MIB;
const SMALL_BYTES: u64 = 64 * MIB;
/// The table fills nearly all of the pool.
const ROWS: u64 = 240 * MIB / PAGE_BYTES;
/// So much of it, at its end, is hot: more than the small pool holds.
const HOT_ROWS: u64 = 100 * MIB / PAGE_BYTES;
/// Fewer were no test: the small pool holds four times as many.
const MOVED_PAGES_MIN: i64 = 2000;
/// Some chunks of 2 MB, and what it touches of headers and tables for the first time.
const MAPPED_BYTES_MAX: u64 = 24 * MIB;

/// Half a million buffers: whoever looks at the header of each once a second takes 1.5 ms of it, at the least.
const LARGE_CEILING_BYTES: u64 = 4096 * MIB;
/// What is done each second is done once in it, at the least.
const IDLE: Duration = Duration::from_secs(2);
/// What somebody else takes of the processor, the host first of all, counts as the worker's, and hits some of these.
const LOOKS: usize = 5;
/// It takes 0.4 ms.
const BUSY_MAX: Duration = Duration::from_micros(1200);

/// A figure of a process in bytes. Source: `proc_pid_status(5)`.
fn figure(process: u32, name: &str) -> anyhow::Result<u64> {
    let path = format!("/proc/{process}/status");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("{path}: {name}"))?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
}

/// The kernel kills the largest process first: the worker must never be the one, however much of the pool goes through
/// its hands.
async fn the_worker_stays_small(version: Version) -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(version, CEILING_BYTES)).await?;
    let (leader, pool) = (harness.leader(), harness.pool().await?);
    pages::make(leader, ROWS).await?;
    pages::read_all(leader).await?;
    for _ in 0..4 {
        let heat = format!("SELECT pg_prewarm('pages', 'buffer', 'main', {}, {})", ROWS - HOT_ROWS, ROWS - 1);
        pool.session().run(&heat).await?;
    }
    let worker = pool.steady().await?.worker;
    // The most that it ever had begins anew: proc_pid_clear_refs(5).
    std::fs::write(format!("/proc/{worker}/clear_refs"), "5").context("clear_refs: needs root")?;
    let before_bytes = figure(worker, "VmRSS:")?;
    assert_eq!(pool.resize(SMALL_BYTES).await?, SMALL_BYTES);
    assert_eq!(pool.resize(CEILING_BYTES).await?, CEILING_BYTES);
    let status = pool.steady().await?;
    assert_eq!(status.worker, worker, "it is the same process");
    let moved = pool.session().run("SELECT moved_pages FROM onecopy_memory_status").await?.number()?;
    ensure!(moved >= MOVED_PAGES_MIN, "it was no test: {moved} pages were moved");
    let most_bytes = figure(worker, "VmHWM:")?;
    ensure!(
        most_bytes <= before_bytes + MAPPED_BYTES_MAX,
        "the worker had {before_bytes} bytes before and {most_bytes} at most"
    );
    // What it let go of is what it was.
    let answer =
        pool.session().run("SELECT count(*), count(*) FILTER (WHERE body = repeat('p', 7000)) FROM pages").await?;
    assert_eq!(answer.rows, [[Some(ROWS.to_string()), Some(ROWS.to_string())]]);
    Ok(())
}

/// The process that resizes a pool maps some chunks of it at a time: however much is moved and populated, it is not the
/// largest process of the server.
///
/// Spec: L1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m27_the_worker_stays_small_on_15() -> anyhow::Result<()> {
    the_worker_stays_small(Version::Fifteen).await
}

/// Spec: L1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m27_the_worker_stays_small_on_17() -> anyhow::Result<()> {
    the_worker_stays_small(Version::Seventeen).await
}

/// Spec: L1, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m27_the_worker_stays_small_on_16() -> anyhow::Result<()> {
    the_worker_stays_small(Version::Sixteen).await
}

/// Spec: L1, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m27_the_worker_stays_small_on_18() -> anyhow::Result<()> {
    the_worker_stays_small(Version::Eighteen).await
}

/// For how long a process of one thread has had a processor. Source: the kernel's `sched-stats.rst`.
fn ran(process: u32) -> anyhow::Result<Duration> {
    let statistics = std::fs::read_to_string(format!("/proc/{process}/schedstat"))?;
    let nanoseconds = statistics.split(' ').next().context("it is empty")?;
    Ok(Duration::from_nanos(nanoseconds.parse()?))
}

/// Nothing that is done each second is in proportion to the ceiling.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m33_a_worker_with_nothing_to_do_costs_nothing_of_its_ceiling() -> anyhow::Result<()> {
    let plan = Plan::new(Version::Fifteen, LARGE_CEILING_BYTES).set("onecopy.memory_target", "64MB");
    let harness = Harness::start(plan).await?;
    let worker = harness.pool().await?.steady().await?.worker;
    let mut busy = Vec::with_capacity(LOOKS);
    for _ in 0..LOOKS {
        let before = ran(worker)?;
        tokio::time::sleep(IDLE).await;
        busy.push(ran(worker)? - before);
    }
    busy.sort_unstable();
    ensure!(busy.last().is_some_and(|busy| !busy.is_zero()) && busy[LOOKS / 2] < BUSY_MAX, "{busy:?} in {IDLE:?} each");
    Ok(())
}
