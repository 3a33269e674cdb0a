//! The leader dies: updates are refused clearly, reads go on as far as their freshness allows, nothing that was
//! acknowledged is lost, and all recovers by itself.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use onecopy_router::Health;
use onecopy_tests::client::Session;
use onecopy_tests::fingerprint::ensure_servers_equal;
use tokio::task::JoinSet;

use crate::harness::{
    bounded, code, leader, run, run_once_there, start_usual, try_until, wait_for_epoch_on, wait_for_health,
    wait_for_updates, wait_for_whole_epoch,
};

const READ: &str = "SELECT value FROM numbers WHERE id = 1";
/// Of the leader under load.
const CLIENTS: usize = 8;
const FAULTS: usize = 3;
/// What must be acknowledged between two faults.
const DONE_BETWEEN: usize = 20;

/// What becomes of the leader under load.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Crash,
    Freeze,
}

/// Spec: A1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_leader_updates_fail_clearly_and_reads_go_on_as_fresh_as_promised() -> anyhow::Result<()> {
    let cluster = start_usual(2).await?;
    wait_for_epoch_on(&cluster, 3).await?;
    let with = async |freshness: &str| {
        let session = cluster.updater(freshness).await?;
        session.run(&format!("SET onecopy.freshness = '{freshness}'")).await?;
        run(&session, "SELECT 1 FROM numbers").await??;
        anyhow::Ok(session)
    };
    let (session, strict, bounded_age) = (with("session").await?, with("strict").await?, with("bounded:100").await?);
    let writer = cluster.updater("writer").await?;
    run(&writer, "UPDATE numbers SET value = 1 WHERE id = 1").await??;
    // An epoch that holds everything, on both followers.
    wait_for_whole_epoch(&cluster, &strict, READ, &["leader", "follower-1", "follower-2"]).await?;
    cluster.servers.leader().server.crash_stop().await?;
    wait_for_health(&cluster, "leader", Health::Down).await?;
    for round in 0..3 {
        for name in ["session", "strict", "bounded"] {
            let reader = match name {
                "session" => &session,
                "strict" => &strict,
                _ => &bounded_age,
            };
            assert_eq!(run(reader, READ).await??.number()?, 1, "{round} {name}");
            run(reader, "BEGIN READ ONLY").await??;
            assert_eq!(run(reader, "SELECT count(*) FROM numbers").await??.number()?, 10, "{round} {name}");
            run(reader, "COMMIT").await??;
        }
        for sql in [
            "UPDATE numbers SET value = 2 WHERE id = 1",
            "CREATE TABLE more (a int)",
            "SELECT 1 FROM numbers FOR UPDATE",
        ] {
            assert_eq!(code(&run(&writer, sql).await?), "57P03", "{round} {sql}");
        }
        run(&writer, "BEGIN").await??;
        let refused = run(&writer, "UPDATE numbers SET value = 2 WHERE id = 1").await?;
        assert_eq!(code(&refused), "57P03", "{round}");
        run(&writer, "ROLLBACK").await??;
        // A newcomer can log in and read.
        let newcomer = bounded("a log-in", cluster.updater("newcomer")).await??;
        assert_eq!(run(&newcomer, "SELECT count(*) FROM numbers").await??.number()?, 10, "{round}");
    }
    cluster.servers.leader().server.start().await?;
    wait_for_updates(&cluster).await?;
    wait_for_health(&cluster, "leader", Health::Up).await?;
    run(&writer, "UPDATE numbers SET value = 3 WHERE id = 1").await??;
    assert_eq!(run_once_there(&strict, READ).await?.number()?, 3);
    wait_for_epoch_on(&cluster, 3).await?;
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}

/// Something newer than the last epoch may be committed: who must see it is told 57P03, who need not reads on.
///
/// Spec: A1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_leader_reads_that_need_a_newer_epoch_fail_with_57p03() -> anyhow::Result<()> {
    let cluster = crate::harness::start(1, |settings| {
        settings.epoch_interval_ms = 60_000;
        settings.epoch_age_max_ms = 600_000;
    })
    .await?;
    let strict = cluster.updater("strict").await?;
    strict.run("SET onecopy.freshness = 'strict'").await?;
    let aged = cluster.updater("bounded").await?;
    aged.run("SET onecopy.freshness = 'bounded:3000'").await?;
    let (other, writer) = (cluster.updater("other").await?, cluster.updater("writer").await?);
    for session in [&strict, &aged, &other, &writer] {
        run(session, "SELECT count(*) FROM numbers").await??;
    }
    // The gate that these reads have asked for must be over: nobody reads after the update, so no epoch holds it.
    wait_for_epoch_on(&cluster, 2).await?;
    let epochs = || cluster.router().status().databases.iter().map(|one| one.gates.epochs).sum::<u64>();
    let (mut seen, mut looks_alike) = (epochs(), 0);
    while looks_alike < 5 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = epochs();
        looks_alike = if now == seen { looks_alike + 1 } else { 0 };
        seen = now;
    }
    run(&writer, "UPDATE numbers SET value = 1 WHERE id = 1").await??;
    cluster.servers.leader().server.crash_stop().await?;
    wait_for_health(&cluster, "leader", Health::Down).await?;
    assert_eq!(run(&other, READ).await??.number()?, 0, "it has seen nothing newer");
    for session in [&strict, &writer] {
        let refused = run(session, READ).await?.expect_err("it must see the commit");
        assert_eq!(refused.code, "57P03", "{refused}");
    }
    try_until("the bound is over", || async {
        match run(&aged, READ).await? {
            Err(refusal) if refusal.code == "57P03" => Ok(true),
            answer => {
                assert_eq!(answer?.number()?, 0, "until then it reads what is old enough");
                Ok(false)
            }
        }
    })
    .await?;
    cluster.servers.leader().server.start().await?;
    wait_for_updates(&cluster).await?;
    for session in [&strict, &writer, &aged] {
        assert_eq!(run_once_there(session, READ).await?.number()?, 1, "{}", session.name());
    }
    Ok(())
}

/// What the clients of a load were told about each transaction.
#[derive(Default)]
struct Ledger {
    acknowledged: BTreeSet<i64>,
    failed: BTreeSet<i64>,
    unknown: BTreeSet<i64>,
}

/// How far the clients of a load are, all together.
#[derive(Default)]
struct Progress {
    next: AtomicI64,
    done: AtomicUsize,
    /// How often one was told that the leader is lost.
    missed: AtomicUsize,
    stop: AtomicBool,
}

impl Progress {
    fn done(&self) -> usize {
        self.done.load(Ordering::Relaxed)
    }
}

/// Waits until `count` has grown by so many since it was `before`.
async fn wait_for_more(what: &str, count: &AtomicUsize, before: usize, more: usize) -> anyhow::Result<()> {
    try_until(what, || async { Ok(count.load(Ordering::Relaxed) >= before + more) }).await
}

/// One client: transactions that insert a number in two tables, some explicit, some in one statement.
async fn load(session: Session, progress: Arc<Progress>) -> anyhow::Result<Ledger> {
    let mut ledger = Ledger::default();
    while !progress.stop.load(Ordering::Relaxed) {
        let number = progress.next.fetch_add(1, Ordering::Relaxed);
        let insert = format!("INSERT INTO ledger VALUES ({number})");
        let result = if number % 2 == 0 {
            bounded("an update", session.run(&insert)).await?
        } else {
            let work = async { session.run_all(&["BEGIN", "SELECT count(*) FROM numbers", &insert, "COMMIT"]).await };
            bounded("a transaction", work).await?.map(|_| Default::default())
        };
        match code(&result).as_str() {
            "00000" => {
                progress.done.fetch_add(1, Ordering::Relaxed);
                ledger.acknowledged.insert(number);
            }
            "40001" => {
                ledger.failed.insert(number);
            }
            lost @ ("08007" | "57P01" | "57P02" | "57P03") => {
                progress.missed.fetch_add(1, Ordering::Relaxed);
                let told = if lost == "08007" { &mut ledger.unknown } else { &mut ledger.failed };
                told.insert(number);
            }
            // The connection itself must not break: the router lives.
            _ => panic!("a client is told something else than the loss of the leader: {result:?}"),
        }
        if result.is_err() {
            // The same connection goes on.
            bounded("ROLLBACK", session.run("ROLLBACK")).await??;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Ok(ledger)
}

/// Takes the leader away again and again, each time until the clients have missed it.
async fn leader_under_load(fault: Fault) -> anyhow::Result<()> {
    let cluster = Arc::new(crate::harness::start(1, |settings| settings.server_timeout_ms = 2000).await?);
    cluster.updater("setup").await?.run("CREATE TABLE ledger (number bigint PRIMARY KEY)").await?;
    let progress = Arc::new(Progress::default());
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        // Before the first fault: nobody can log in while the leader is away and no follower has all of it.
        let (session, progress) = (cluster.updater("load").await?, progress.clone());
        clients.spawn(load(session, progress));
    }
    for _ in 0..FAULTS {
        wait_for_more("the clients work", &progress.done, progress.done(), DONE_BETWEEN).await?;
        let leader = cluster.servers.leader();
        let missed = progress.missed.load(Ordering::Relaxed);
        let missed = wait_for_more("the clients miss the leader", &progress.missed, missed, CLIENTS);
        match fault {
            Fault::Crash => {
                leader.server.crash_stop().await?;
                missed.await?;
                leader.server.start().await?;
            }
            Fault::Freeze => {
                let frozen = leader.freeze()?;
                wait_for_health(&cluster, "leader", Health::Unresponsive).await?;
                missed.await?;
                drop(frozen);
            }
        }
        wait_for_updates(&cluster).await?;
    }
    wait_for_more("the clients work", &progress.done, progress.done(), DONE_BETWEEN).await?;
    progress.stop.store(true, Ordering::Relaxed);
    let mut all = Ledger::default();
    while let Some(result) = bounded("clients", clients.join_next()).await? {
        let ledger = result??;
        all.acknowledged.extend(ledger.acknowledged);
        all.failed.extend(ledger.failed);
        all.unknown.extend(ledger.unknown);
    }
    let mut there = BTreeSet::new();
    for row in leader(&cluster).await?.run("SELECT number FROM ledger").await?.rows {
        there.insert(row[0].as_deref().unwrap_or_default().parse::<i64>()?);
    }
    println!("{} acknowledged, {} failed, {} unknown", all.acknowledged.len(), all.failed.len(), all.unknown.len());
    assert!(all.acknowledged.len() >= (FAULTS + 1) * DONE_BETWEEN, "too little was done to prove anything");
    let lost: Vec<_> = all.acknowledged.difference(&there).collect();
    assert!(lost.is_empty(), "acknowledged but lost: {lost:?}");
    let ghosts: Vec<_> = all.failed.intersection(&there).collect();
    assert!(ghosts.is_empty(), "reported as failed but there: {ghosts:?}");
    wait_for_epoch_on(&cluster, 2).await?;
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}

/// Spec: D1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_under_load_loses_nothing_acknowledged_and_keeps_nothing_refused() -> anyhow::Result<()> {
    leader_under_load(Fault::Crash).await
}

/// Spec: D1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_frozen_under_load_loses_nothing_acknowledged_and_keeps_nothing_refused() -> anyhow::Result<()> {
    leader_under_load(Fault::Freeze).await
}
