//! Followers that freeze, die and come back: out of the epochs, back in, and nobody waits for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use onecopy_router::Health;
use onecopy_tests::client::Session;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::ensure_servers_equal;
use tokio::task::JoinSet;

use crate::harness::{
    bounded, epoch_servers, run, run_once_there, start, start_usual, try_until, wait_for_epoch_on, wait_for_health,
    wait_for_whole_epoch,
};

/// Gates close all the time, so a server that stops does so inside one sooner or later.
///
/// Spec: A1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_follower_is_frozen_updates_commit_and_readers_read_elsewhere() -> anyhow::Result<()> {
    let cluster = start(2, |settings| settings.server_timeout_ms = 5000).await?;
    wait_for_epoch_on(&cluster, 3).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let (reads, updates) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut clients = JoinSet::new();
    for number in 0..4 {
        let session = cluster.updater("client").await?;
        session.run("SET onecopy.freshness = 'strict'").await?;
        let (stop, reads, updates) = (stop.clone(), reads.clone(), updates.clone());
        clients.spawn(async move {
            let mut expected = 0;
            while !stop.load(Ordering::Relaxed) {
                let id = number + 1;
                let update = format!("UPDATE numbers SET value = value + 1 WHERE id = {id}");
                run(&session, &update).await??;
                expected += 1;
                updates.fetch_add(1, Ordering::Relaxed);
                let read = format!("SELECT value FROM numbers WHERE id = {id}");
                assert_eq!(run(&session, &read).await??.number()?, expected, "a read is not strict");
                reads.fetch_add(1, Ordering::Relaxed);
            }
            anyhow::Ok(())
        });
    }
    for round in 0..4 {
        let name = format!("follower-{}", 1 + round % 2);
        let frozen = cluster.servers.server(&name)?.freeze()?;
        try_until("the epochs go on without it", || async {
            Ok(!epoch_servers(&cluster).is_empty() && !epoch_servers(&cluster).contains(&name))
        })
        .await?;
        let (reads_then, updates_then) = (reads.load(Ordering::Relaxed), updates.load(Ordering::Relaxed));
        try_until("work goes on", || async {
            Ok(reads.load(Ordering::Relaxed) > reads_then + 20 && updates.load(Ordering::Relaxed) > updates_then + 20)
        })
        .await?;
        drop(frozen);
        try_until("it is back", || async { Ok(epoch_servers(&cluster).contains(&name)) }).await?;
    }
    stop.store(true, Ordering::Relaxed);
    while let Some(result) = bounded("clients", clients.join_next()).await? {
        result??;
    }
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}

/// Spec: A1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_on_a_follower_that_freezes_is_answered_by_another_server() -> anyhow::Result<()> {
    let cluster = start(1, |settings| settings.server_timeout_ms = 5000).await?;
    let observer = cluster.updater("observer").await?;
    wait_for_all(&cluster, &observer).await?;
    let chosen = cluster.reader("chosen", "follower-1").await?;
    read_there(&chosen).await?;
    let open = cluster.reader("open", "follower-1").await?;
    run(&open, "BEGIN READ ONLY").await??;
    read_there(&open).await?;
    let mut free = Vec::new();
    for _ in 0..6 {
        let session = cluster.updater("free").await?;
        run(&session, "SELECT count(*) FROM numbers").await??;
        free.push(session);
    }
    let frozen = cluster.servers.server("follower-1")?.freeze()?;
    let started: Vec<_> = free.iter().map(|session| session.start("SELECT count(*) FROM numbers")).collect();
    for reader in started {
        assert_eq!(bounded("a reader", reader).await???.number()?, 10);
    }
    let lost = run(&open, "SELECT count(*) FROM numbers").await?.expect_err("its server is frozen");
    assert_eq!(lost.code, "57P01", "{lost}");
    let refused = run(&chosen, "SELECT count(*) FROM numbers").await?.expect_err("its server is frozen");
    assert_eq!(refused.code, "57P03", "{refused}");
    wait_for_health(&cluster, "follower-1", Health::Unresponsive).await?;
    let newcomer = bounded("a log-in", cluster.updater("newcomer")).await??;
    assert_eq!(run(&newcomer, "SELECT count(*) FROM numbers").await??.number()?, 10);
    drop(frozen);
    run(&open, "ROLLBACK").await??;
    wait_for_health(&cluster, "follower-1", Health::Up).await?;
    // The epoch of before is none any more.
    run_once_there(&observer, "UPDATE numbers SET value = value WHERE id = 10").await?;
    wait_for_all(&cluster, &observer).await?;
    read_there(&open).await?;
    read_there(&chosen).await
}

/// Reads on the session's chosen server: once a whole epoch is there, and nobody writes, at the first try.
async fn read_there(session: &Session) -> anyhow::Result<()> {
    assert_eq!(run(session, "SELECT count(*) FROM numbers").await??.number()?, 10);
    let place = run(session, "SHOW onecopy.served_by").await??;
    assert!(place.text()?.starts_with("follower-1 at epoch "), "{place:?}");
    Ok(())
}

/// Waits until `session` finds all servers in an epoch that lacks nothing.
async fn wait_for_all(cluster: &TestCluster, session: &Session) -> anyhow::Result<()> {
    let servers: Vec<&str> = cluster.servers.all().iter().map(|server| server.name.as_str()).collect();
    wait_for_whole_epoch(cluster, session, "SELECT count(*) FROM numbers", &servers).await
}

/// Spec: A1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_is_killed_is_missed_by_nobody_and_comes_back() -> anyhow::Result<()> {
    let cluster = start_usual(2).await?;
    wait_for_epoch_on(&cluster, 3).await?;
    let session = cluster.updater("session").await?;
    for round in 1..=2 {
        wait_for_all(&cluster, &session).await?;
        let follower = cluster.servers.server("follower-1")?;
        let open = cluster.reader("open", "follower-1").await?;
        run(&open, "BEGIN READ ONLY").await??;
        read_there(&open).await?;
        follower.server.crash_stop().await?;
        let lost = run(&open, "SELECT count(*) FROM numbers").await?.expect_err("its server is dead");
        assert_eq!(lost.code, "57P01", "{lost}");
        for value in 1..=20 {
            run(&session, &format!("UPDATE numbers SET value = {value} WHERE id = 1")).await??;
            assert_eq!(run(&session, "SELECT value FROM numbers WHERE id = 1").await??.number()?, value, "{round}");
        }
        wait_for_health(&cluster, "follower-1", Health::Down).await?;
        follower.server.start().await?;
        wait_for_health(&cluster, "follower-1", Health::Up).await?;
        wait_for_all(&cluster, &session).await?;
        let chosen = cluster.reader("chosen", "follower-1").await?;
        read_there(&chosen).await?;
        assert_eq!(run(&chosen, "SELECT value FROM numbers WHERE id = 1").await??.number()?, 20, "{round}");
    }
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}
