//! Isolation while servers are killed, frozen and started again under load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use onecopy_router::Health;
use onecopy_testing::until_async;
use onecopy_tests::checker::Level;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::ensure_servers_equal;
use onecopy_tests::history::Ending;
use onecopy_tests::list_append::Workload;
use onecopy_tests::servers::{DATABASE, LEADER};
use onecopy_tests::verdict::RoutedChecker;

/// Time between two faults.
const CALM: Duration = Duration::from_millis(700);
/// How often all faults happen, one after the other.
const ROUNDS: usize = 3;
/// A run that takes longer hangs.
const RUN_TIMEOUT: Duration = Duration::from_secs(400);

/// What is done to a server.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Killed and started again.
    Crash,
    /// Stopped by a signal and continued.
    Freeze,
}

/// Whether the router counts on the server: on the leader while it answers, on a follower while the newest epoch is
/// open there; none between two epochs.
fn is_counted_on(cluster: &TestCluster, name: &str) -> Option<bool> {
    let status = cluster.router().status();
    if name == LEADER {
        return Some(status.servers[0].health == Health::Up);
    }
    let epoch = status.databases.iter().find(|one| one.name == DATABASE && !one.epoch_servers.is_empty());
    epoch.map(|one| one.epoch_servers.iter().any(|server| server == name))
}

/// Takes a server away until that is felt, and gives it back until that is felt, too.
async fn inflict(cluster: &TestCluster, workload: &Workload, name: &str, fault: Fault) -> anyhow::Result<()> {
    let server = cluster.servers.server(name)?;
    until_async(&format!("{name} is there"), async || is_counted_on(cluster, name) == Some(true)).await;
    let losses = || workload.losses.load(Ordering::Relaxed);
    let losses_before = losses();
    // Nobody need hear of a lost follower: others answer.
    let is_felt = async || is_counted_on(cluster, name) == Some(false) && (name != LEADER || losses() > losses_before);
    let what = format!("{name} is missed: {fault:?}");
    match fault {
        Fault::Crash => {
            server.server.crash_stop().await?;
            until_async(&what, is_felt).await;
            server.server.start().await?;
        }
        Fault::Freeze => {
            let frozen = server.freeze()?;
            until_async(&what, is_felt).await;
            drop(frozen);
        }
    }
    until_async(&format!("{name} is back"), async || is_counted_on(cluster, name) == Some(true)).await;
    Ok(())
}

/// Runs list-append while `faults` happen again and again, each until it is felt.
async fn holds_under(faults: &[(&str, Fault)], freshness: &str, level: Level) -> anyhow::Result<()> {
    let seed = onecopy_testing::seed();
    let freshness = freshness.parse()?;
    let cluster = TestCluster::with_router(2, |settings| {
        settings.freshness = freshness;
        settings.follower_timeout_ms = 200;
        settings.server_timeout_ms = 2000;
    })
    .await?;
    let workload = Workload {
        bears_faults: true,
        transactions: 2500,
        // Somebody is there to feel the last fault, too.
        goes_on: Arc::new(AtomicBool::new(true)),
        pause_ms: 0..=8,
        ..Workload::usual(seed)
    };
    let run = async { tokio::time::timeout(RUN_TIMEOUT, workload.run(&cluster)).await.context("the run hangs")? };
    let nemesis = async {
        until_async("the clients are there", async || workload.has_begun.load(Ordering::Relaxed)).await;
        for (name, fault) in (0..ROUNDS).flat_map(|_| faults) {
            tokio::time::sleep(CALM).await;
            inflict(&cluster, &workload, name, *fault).await?;
        }
        workload.goes_on.store(false, Ordering::Relaxed);
        anyhow::Ok(())
    };
    let (history, ()) = tokio::try_join!(run, nemesis)?;
    let count = |ending| history.transactions.iter().filter(|transaction| transaction.ending == ending).count();
    println!(
        "seed {seed}, {freshness}: {} faults, {} committed, {} aborted, {} unknown",
        ROUNDS * faults.len(),
        count(Ending::Committed),
        count(Ending::Aborted),
        count(Ending::Unknown)
    );
    let verdict = RoutedChecker::default().check(&history, level)?;
    assert!(verdict.is_valid(), "seed {seed}, {freshness}: {:?} {:?}", verdict.ours, verdict.adya);
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}

/// Servers killed or frozen under load: nothing acknowledged is lost, nothing is reordered, the freshness promised is
/// kept.
///
/// Spec: D1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r12_a_leader_killed_under_load_loses_and_reorders_nothing() -> anyhow::Result<()> {
    holds_under(&[(LEADER, Fault::Crash), (LEADER, Fault::Freeze)], "strict", Level::StrictSerializable).await
}

/// Spec: D1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r12_followers_killed_and_frozen_under_load_show_nothing_stale() -> anyhow::Result<()> {
    let faults = [("follower-1", Fault::Crash), ("follower-2", Fault::Freeze), ("follower-1", Fault::Freeze)];
    holds_under(&faults, "session", Level::SessionSerializable).await
}
