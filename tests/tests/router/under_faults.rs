//! Isolation while servers are killed, frozen and started again under load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onecopy_tests::checker::Level;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::ensure_servers_equal;
use onecopy_tests::history::Ending;
use onecopy_tests::list_append::Workload;
use onecopy_tests::servers::TestServer;
use onecopy_tests::verdict::judge_routed;
use rustix::process::Signal;

/// Time between two faults, and how long one lasts.
const CALM: Duration = Duration::from_millis(1500);
const FAULT: Duration = Duration::from_millis(700);
/// A run that takes longer hangs.
const RUN_TIMEOUT: Duration = Duration::from_secs(300);

/// What is done to a server.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Killed and started again.
    Crash,
    /// Stopped by a signal and continued.
    Freeze,
}

async fn inflict(server: &TestServer, fault: Fault) -> anyhow::Result<()> {
    match fault {
        Fault::Crash => {
            server.server.crash_stop().await?;
            tokio::time::sleep(FAULT).await;
            server.server.start().await?;
        }
        Fault::Freeze => {
            server.signal(Signal::STOP)?;
            tokio::time::sleep(FAULT).await;
            server.signal(Signal::CONT)?;
        }
    }
    Ok(())
}

/// Runs list-append while `faults` happen again and again; some transactions must have felt them.
async fn holds_under(faults: &[(&str, Fault)], freshness: &str, level: Level, seed: u64) -> anyhow::Result<()> {
    let freshness = freshness.parse()?;
    let cluster = TestCluster::with_router(2, |settings| {
        settings.freshness = freshness;
        settings.follower_timeout_ms = 200;
    })
    .await?;
    let goes_on = Arc::new(AtomicBool::new(true));
    let workload = Workload {
        bears_faults: true,
        transactions: 2500,
        goes_on: goes_on.clone(),
        pause_ms: 0..=8,
        ..Workload::usual(seed)
    };
    let has_begun = workload.has_begun.clone();
    let is_done = AtomicBool::new(false);
    let run = async {
        let history = tokio::time::timeout(RUN_TIMEOUT, workload.run(&cluster)).await;
        is_done.store(true, Ordering::Relaxed);
        history
    };
    let nemesis = async {
        let mut inflicted = 0;
        while !is_done.load(Ordering::Relaxed) {
            tokio::time::sleep(CALM).await;
            if !has_begun.load(Ordering::Relaxed) {
                continue;
            }
            let (name, fault) = faults[inflicted % faults.len()];
            if let Err(error) = inflict(cluster.servers.server(name)?, fault).await {
                goes_on.store(false, Ordering::Relaxed);
                return Err(error);
            }
            inflicted += 1;
            // Each fault was there at least once.
            goes_on.store(inflicted < faults.len(), Ordering::Relaxed);
        }
        anyhow::Ok(inflicted)
    };
    let (history, inflicted) = tokio::join!(run, nemesis);
    let (history, inflicted) = (history??, inflicted?);
    let count = |ending| history.transactions.iter().filter(|transaction| transaction.ending == ending).count();
    println!(
        "seed {seed}, {freshness}: {inflicted} faults, {} committed, {} aborted, {} unknown",
        count(Ending::Committed),
        count(Ending::Aborted),
        count(Ending::Unknown)
    );
    assert!(inflicted >= faults.len(), "the run was too short to inflict {faults:?}");
    let verdict = judge_routed(&history, level)?;
    assert!(verdict.is_valid(), "seed {seed}, {freshness}: {:?} {:?}", verdict.ours, verdict.adya);
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r12_a_leader_killed_under_load_loses_and_reorders_nothing() -> anyhow::Result<()> {
    holds_under(&[("leader", Fault::Crash), ("leader", Fault::Freeze)], "strict", Level::StrictSerializable, 21).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r12_followers_killed_and_frozen_under_load_show_nothing_stale() -> anyhow::Result<()> {
    let faults = [("follower-1", Fault::Crash), ("follower-2", Fault::Freeze), ("follower-1", Fault::Freeze)];
    holds_under(&faults, "session", Level::SessionSerializable, 22).await
}
