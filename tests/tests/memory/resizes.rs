//! Pools of a leader and its standby that are resized at random while everything happens at once: nothing is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::ensure;
use onecopy_tests::clones::programs;
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::integrity::ensure_nothing_lost;
use onecopy_tests::memory::pgbench::{Pgbench, Script, Until};
use onecopy_tests::memory::resizes::{Report, SharedReport, load_seconds, resize_at_random};
use onecopy_tests::memory::{MIB, schema_changes};
use onecopy_tests::servers::TestServer;
use tokio::time::Instant;

const CEILING_BYTES: u64 = 256 * MIB;
const LEAST_BYTES: u64 = 64 * MIB;
/// 15 MB each: more than the least, less than the most.
const PGBENCH_SCALE: u32 = 12;
const SECONDS: u64 = 15;
/// Fewer of each kind were no test; how long they take hangs on how busy the machine is.
const RESIZES_MIN: u64 = 3;
/// Of schema changes, and of looks at all of the standby's pool.
const ROUNDS_MIN: u64 = 2;
/// What has not happened so often by then never does.
const ENOUGH_DEADLINE: Duration = Duration::from_secs(240);
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Again and again until all is done.
const LOAD: Until = Until::Seconds(5);

async fn random_resizes_lose_nothing(version: Version) -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(version, CEILING_BYTES).with_standby()).await?;
    let (leader, standby) = (harness.leader(), harness.standby()?);
    programs::pgbench_initialize(leader, PGBENCH_SCALE)?;
    harness.wait_replayed().await?;
    let (seconds, seed) = (load_seconds(SECONDS)?, onecopy_testing::seed());
    let (stopping, changed, looked) = (Arc::new(AtomicBool::new(false)), AtomicU64::new(0), AtomicU64::new(0));
    let load = async |server: &TestServer, script: Script, clients: u32| {
        while !stopping.load(Ordering::Relaxed) {
            Pgbench::run(server, &script, clients, LOAD).await?;
        }
        anyhow::Ok(())
    };
    let changes = async {
        while !stopping.load(Ordering::Relaxed) {
            schema_changes::round(leader, changed.load(Ordering::Relaxed)).await?;
            changed.fetch_add(1, Ordering::Relaxed);
        }
        anyhow::Ok(())
    };
    let looks = async {
        while !stopping.load(Ordering::Relaxed) {
            schema_changes::standby_round(standby).await?;
            looked.fetch_add(1, Ordering::Relaxed);
        }
        anyhow::Ok(())
    };
    let reports = [SharedReport::default(), SharedReport::default()];
    let clock = async {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let deadline = Instant::now() + ENOUGH_DEADLINE;
        let is_enough = || {
            let has_resized = |report: &SharedReport| {
                let Report { shrinks, growths } = report.now();
                shrinks >= RESIZES_MIN && growths >= RESIZES_MIN
            };
            let has_looked = |count: &AtomicU64| count.load(Ordering::Relaxed) >= ROUNDS_MIN;
            reports.iter().all(has_resized) && has_looked(&changed) && has_looked(&looked)
        };
        while !is_enough() {
            ensure!(Instant::now() < deadline, "{reports:?}, {changed:?} rounds of changes, {looked:?} looks");
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        stopping.store(true, Ordering::Relaxed);
        anyhow::Ok(())
    };
    tokio::try_join!(
        resize_at_random(leader, LEAST_BYTES, seed, &stopping, &reports[0]),
        resize_at_random(standby, LEAST_BYTES, seed + 1, &stopping, &reports[1]),
        load(leader, Script::Tpcb, 2),
        load(leader, Script::SelectOnly, 1),
        load(standby, Script::SelectOnly, 1),
        changes,
        looks,
        clock
    )?;
    println!("seed {seed}, {seconds} s: {reports:?}, {changed:?} rounds of changes, {looked:?} looks");
    ensure_nothing_lost(&harness).await
}

/// Resizes at random on leader and standby under updates, reads, DDL, CREATE and DROP DATABASE, TRUNCATE, VACUUM,
/// checkpoints, prewarm and looks at all buffers lose nothing: sums, every row and ctid on leader, standby and disk,
/// indexes, checksums.
///
/// Spec: D3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m3_random_resizes_lose_nothing_on_15() -> anyhow::Result<()> {
    random_resizes_lose_nothing(Version::Fifteen).await
}

/// Spec: D3, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m3_random_resizes_lose_nothing_on_17() -> anyhow::Result<()> {
    random_resizes_lose_nothing(Version::Seventeen).await
}

/// Spec: D3, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m3_random_resizes_lose_nothing_on_16() -> anyhow::Result<()> {
    random_resizes_lose_nothing(Version::Sixteen).await
}

/// Spec: D3, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m3_random_resizes_lose_nothing_on_18() -> anyhow::Result<()> {
    random_resizes_lose_nothing(Version::Eighteen).await
}
