//! The leader dies: updates are refused clearly, reads go on as far as their freshness allows, nothing that was
//! acknowledged is lost, and all recovers by itself.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use onecopy_router::Health;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::ensure_servers_equal;
use rustix::process::Signal;
use tokio::task::JoinSet;

use crate::laboratory::{
    bounded, code, leader, run, start_usual, wait_for_epoch_on, wait_for_health, wait_for_updates, wait_until,
};

/// What an update may be answered with while there is no leader.
const NO_LEADER: [&str; 4] = ["57P01", "57P02", "57P03", "08007"];

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
    for server in ["follower-1", "follower-2"] {
        run(&strict, &format!("SET onecopy.server = '{server}'")).await??;
        let read = "SELECT value FROM numbers WHERE id = 1";
        wait_until("the epoch is there", || async {
            Ok(strict.run(read).await.is_ok_and(|answer| answer.number().is_ok_and(|value| value == 1)))
        })
        .await?;
    }
    run(&strict, "RESET onecopy.server").await??;
    cluster.servers.leader().server.crash_stop().await?;
    wait_for_health(&cluster, "leader", Health::Down).await?;
    for round in 0..3 {
        for name in ["session", "strict", "bounded"] {
            let reader = match name {
                "session" => &session,
                "strict" => &strict,
                _ => &bounded_age,
            };
            let answer = run(reader, "SELECT value FROM numbers WHERE id = 1").await?;
            assert_eq!(
                answer.as_ref().ok().map(|answer| answer.number()).transpose()?,
                Some(1),
                "{round} {name}: {answer:?}"
            );
            run(reader, "BEGIN READ ONLY").await??;
            assert_eq!(run(reader, "SELECT count(*) FROM numbers").await??.number()?, 10, "{round} {name}");
            run(reader, "COMMIT").await??;
        }
        for sql in [
            "UPDATE numbers SET value = 2 WHERE id = 1",
            "CREATE TABLE more (a int)",
            "SELECT 1 FROM numbers FOR UPDATE",
        ] {
            let refused = code(&run(&writer, sql).await?);
            assert!(NO_LEADER.contains(&refused.as_str()), "{round} {sql}: {refused}");
        }
        run(&writer, "BEGIN").await??;
        let refused = code(&run(&writer, "UPDATE numbers SET value = 2 WHERE id = 1").await?);
        assert!(NO_LEADER.contains(&refused.as_str()), "{round}: {refused}");
        run(&writer, "ROLLBACK").await??;
        // A newcomer can log in and read.
        let newcomer = bounded("a log-in", cluster.updater("newcomer")).await??;
        assert_eq!(run(&newcomer, "SELECT count(*) FROM numbers").await??.number()?, 10, "{round}");
    }
    cluster.servers.leader().server.start().await?;
    wait_for_updates(&cluster).await?;
    wait_for_health(&cluster, "leader", Health::Up).await?;
    run(&writer, "UPDATE numbers SET value = 3 WHERE id = 1").await??;
    assert_eq!(run(&strict, "SELECT value FROM numbers WHERE id = 1").await??.number()?, 3);
    wait_for_epoch_on(&cluster, 3).await?;
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}

/// Something newer than the last epoch may be committed: who must see it is told 57P03, who need not reads on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_leader_reads_that_need_a_newer_epoch_fail_with_57p03() -> anyhow::Result<()> {
    let cluster = crate::laboratory::start(1, |settings| {
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
    let read = "SELECT value FROM numbers WHERE id = 1";
    assert_eq!(run(&other, read).await??.number()?, 0, "it has seen nothing newer");
    for session in [&strict, &writer] {
        let refused = run(session, read).await?.expect_err("it must see the commit");
        assert_eq!(refused.code, "57P03", "{refused}");
    }
    wait_until("the bound is over", || async { Ok(code(&run(&aged, read).await?) == "57P03") }).await?;
    cluster.servers.leader().server.start().await?;
    wait_for_updates(&cluster).await?;
    for session in [&strict, &writer, &aged] {
        wait_until("reads are back", || async { Ok(session.run(read).await.is_ok()) }).await?;
        assert_eq!(run(session, read).await??.number()?, 1, "{}", session.name());
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

/// One client: transactions that insert a number in two tables, some explicit, some in one statement.
async fn load(
    cluster: &TestCluster,
    next: Arc<AtomicI64>,
    done: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
) -> anyhow::Result<Ledger> {
    let mut ledger = Ledger::default();
    let mut session = cluster.updater("load").await?;
    while !stop.load(Ordering::Relaxed) {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let insert = format!("INSERT INTO ledger VALUES ({number})");
        let result = if number % 2 == 0 {
            bounded("an update", session.run(&insert)).await?
        } else {
            let work = async { session.run_all(&["BEGIN", "SELECT count(*) FROM numbers", &insert, "COMMIT"]).await };
            bounded("a transaction", work).await?.map(|_| Default::default())
        };
        match code(&result).as_str() {
            "00000" => {
                done.fetch_add(1, Ordering::Relaxed);
                ledger.acknowledged.insert(number)
            }
            "08007" => ledger.unknown.insert(number),
            // The connection itself broke: then the answer may be lost as well. It must not, the router lives.
            "08006" => panic!("the router closed a connection: {result:?}"),
            _ => ledger.failed.insert(number),
        };
        if result.is_err() {
            let _ = bounded("ROLLBACK", session.run("ROLLBACK")).await?;
            tokio::time::sleep(Duration::from_millis(20)).await;
            if session.run("SELECT 1").await.is_err_and(|error| error.code == "08006") {
                session = cluster.updater("load").await?;
            }
        }
    }
    Ok(ledger)
}

async fn leader_under_load(harm: impl AsyncFn(&TestCluster) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let cluster = Arc::new(crate::laboratory::start(1, |settings| settings.server_timeout_ms = 2000).await?);
    cluster.updater("setup").await?.run("CREATE TABLE ledger (number bigint PRIMARY KEY)").await?;
    let (next, stop) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicBool::new(false)));
    let done = Arc::new(AtomicUsize::new(0));
    let mut clients = JoinSet::new();
    for _ in 0..8 {
        let (cluster, next, done, stop) = (cluster.clone(), next.clone(), done.clone(), stop.clone());
        clients.spawn(async move { load(&cluster, next, done, stop).await });
    }
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(700)).await;
        harm(&cluster).await?;
        wait_for_updates(&cluster).await?;
    }
    wait_until("enough is done", || async { Ok(done.load(Ordering::Relaxed) > 50) }).await?;
    stop.store(true, Ordering::Relaxed);
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
    assert!(all.acknowledged.len() > 50, "too little was done to prove anything");
    assert!(!all.failed.is_empty() || !all.unknown.is_empty(), "the leader was never missed");
    let lost: Vec<_> = all.acknowledged.difference(&there).collect();
    assert!(lost.is_empty(), "acknowledged but lost: {lost:?}");
    let ghosts: Vec<_> = all.failed.intersection(&there).collect();
    assert!(ghosts.is_empty(), "reported as failed but there: {ghosts:?}");
    wait_for_epoch_on(&cluster, 2).await?;
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_under_load_loses_nothing_acknowledged_and_keeps_nothing_refused() -> anyhow::Result<()> {
    leader_under_load(async |cluster| {
        let server = &cluster.servers.leader().server;
        server.crash_stop().await?;
        tokio::time::sleep(Duration::from_millis(200)).await;
        server.start().await?;
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_frozen_under_load_loses_nothing_acknowledged_and_keeps_nothing_refused() -> anyhow::Result<()> {
    leader_under_load(async |cluster| {
        cluster.servers.leader().signal(Signal::STOP)?;
        // Until the router has given it up, and some time more.
        wait_for_health(cluster, "leader", Health::Unresponsive).await?;
        tokio::time::sleep(Duration::from_millis(2000)).await;
        cluster.servers.leader().signal(Signal::CONT)
    })
    .await
}
