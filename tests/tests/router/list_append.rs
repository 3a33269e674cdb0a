//! Random list-append histories, checked by two checkers that do not know of each other.

use std::time::Duration;

use onecopy_router::config::{Freshness, RouterSettings};
use onecopy_tests::checker::{Level, Violation};
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::ensure_servers_equal;
use onecopy_tests::history::History;
use onecopy_tests::list_append::Workload;
use onecopy_tests::memory::resizes::load_seconds;
use onecopy_tests::verdict::{RoutedChecker, check};
use tokio::time::Instant;

/// A control runs until a violation shows; each run takes another seed.
const CONTROL_RUNS_MAX: u64 = 10;
/// A proof runs until all that it is about took part. Every run must hold.
const RUNS_MAX: u64 = 5;

/// Runs through a router that is held to `level`, until all took part: the epochs, the tripwire, every server; longer
/// where the environment says so. Gives back the last history.
async fn holds(freshness: &str, level: Level, routed: &mut RoutedChecker, seed: u64) -> anyhow::Result<History> {
    let freshness: Freshness = freshness.parse()?;
    let cluster = TestCluster::with_router(2, |settings| settings.freshness = freshness).await?;
    let until = Instant::now() + Duration::from_secs(load_seconds(0)?);
    let mut have_all = false;
    for run in 0.. {
        assert!(have_all || run < RUNS_MAX, "nothing is proven in {RUNS_MAX} runs: {:?}", cluster.router().status());
        let seed = seed.wrapping_add(run);
        let workload = Workload::usual(seed);
        let history = workload.run(&cluster).await?;
        let status = cluster.router().status();
        println!("seed {seed}, {freshness}: {} of {} committed", history.committed_count(), history.transactions.len());
        println!("{status:?}");
        assert!(history.committed_count() >= workload.transactions);
        let verdict = routed.check(&history, level)?;
        assert!(verdict.is_valid(), "seed {seed}, {freshness}: {:?} {:?}", verdict.ours, verdict.adya);
        ensure_servers_equal(&cluster.servers).await?;
        // How often each is needed hangs on how fast the machine is.
        let gates = &status.databases[0].gates;
        let have_gates = gates.epochs > 20 && gates.tripwires > 20 && gates.tripwire_aborts > 0;
        have_all |= have_gates && status.servers.iter().all(|server| server.reads > status.reads / 20);
        if have_all && Instant::now() >= until {
            return Ok(history);
        }
    }
    unreachable!("there are as many runs as it takes")
}

/// Runs until both checkers see transactions that no serial order explains; any other fault of a history is one of the
/// workload.
async fn must_fail(cluster: &TestCluster) -> anyhow::Result<()> {
    let seed = onecopy_testing::seed();
    for seed in (0..CONTROL_RUNS_MAX).map(|run| seed.wrapping_add(run)) {
        let history = Workload::usual(seed).run(cluster).await?;
        let verdict = check(&history, Level::Serializable)?;
        println!("seed {seed}: {} committed, {:?}", history.committed_count(), verdict.adya.anomaly_types);
        match verdict.ours {
            Ok(()) => {}
            Err(Violation::Cycle { .. }) => return ensure_servers_equal(&cluster.servers).await.map(drop),
            Err(other) => panic!("seed {seed}: {other}"),
        }
    }
    panic!("no violation in {CONTROL_RUNS_MAX} runs: the workload does not provoke what it must");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_reads_on_plain_standbys_are_not_serializable() -> anyhow::Result<()> {
    must_fail(&TestCluster::without_router(2).await?).await
}

/// Spec: I2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r2_without_epochs_both_checkers_fail() -> anyhow::Result<()> {
    let change = |settings: &mut RouterSettings| settings.unsafe_without_epochs = true;
    must_fail(&TestCluster::with_router(2, change).await?).await
}

/// Spec: I2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r2_without_the_tripwire_both_checkers_fail() -> anyhow::Result<()> {
    let change = |settings: &mut RouterSettings| settings.unsafe_without_tripwire = true;
    must_fail(&TestCluster::with_router(2, change).await?).await
}

/// `strict`: all transactions together are strictly serializable; a read sees what anybody was told is committed.
///
/// Spec: I1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r3_strict_freshness_is_strictly_serializable() -> anyhow::Result<()> {
    let seed = onecopy_testing::seed();
    holds("strict", Level::StrictSerializable, &mut RoutedChecker::default(), seed).await.map(drop)
}

/// `session`: serializable, each session's transactions in their order; a session reads its own writes and what was
/// acknowledged to anybody before it began, and never goes back.
///
/// Spec: I2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r4_session_freshness_keeps_each_sessions_order() -> anyhow::Result<()> {
    let seed = onecopy_testing::seed();
    holds("session", Level::SessionSerializable, &mut RoutedChecker::default(), seed).await.map(drop)
}

/// `bounded:<ms>`: serializable; a transaction reads one prefix of the leader's commits, later ones no earlier prefix.
///
/// Spec: I2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r5_bounded_freshness_is_serializable() -> anyhow::Result<()> {
    let (seed, mut routed) = (onecopy_testing::seed(), RoutedChecker::default());
    for run in 0..3 {
        let seed = seed.wrapping_add(run * RUNS_MAX);
        let history = holds("bounded:200", Level::Serializable, &mut routed, seed).await?;
        // Old reads are allowed and do happen: where real-time order is asked for, the checkers must say so.
        if !check(&history, Level::StrictSerializable)?.is_valid() {
            return Ok(());
        }
    }
    panic!("no read was old: the workload does not provoke what it must");
}
