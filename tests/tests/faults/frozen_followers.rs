//! Followers that freeze, die and come back: out of the epochs, back in, and nobody waits for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use onecopy_router::Health;
use onecopy_tests::client::Session;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::ensure_servers_equal;
use onecopy_tests::servers::TestServer;
use rustix::process::Signal;
use tokio::task::JoinSet;

use crate::laboratory::{
    bounded, epoch_servers, run, start, start_usual, wait_for_epoch_on, wait_for_health, wait_until,
};

/// A frozen server, let go when dropped.
struct Frozen<'a>(&'a TestServer);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let _ = self.0.signal(Signal::CONT);
    }
}

fn freeze<'a>(cluster: &'a TestCluster, name: &str) -> anyhow::Result<Frozen<'a>> {
    let server = cluster.servers.server(name)?;
    server.signal(Signal::STOP)?;
    Ok(Frozen(server))
}

/// Gates close all the time, so a server that stops does so inside one sooner or later.
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
        let frozen = freeze(&cluster, &name)?;
        wait_until("the epochs go on without it", || async {
            Ok(!epoch_servers(&cluster).is_empty() && !epoch_servers(&cluster).contains(&name))
        })
        .await?;
        let (reads_then, updates_then) = (reads.load(Ordering::Relaxed), updates.load(Ordering::Relaxed));
        wait_until("work goes on", || async {
            Ok(reads.load(Ordering::Relaxed) > reads_then + 20 && updates.load(Ordering::Relaxed) > updates_then + 20)
        })
        .await?;
        drop(frozen);
        wait_until("it is back", || async { Ok(epoch_servers(&cluster).contains(&name)) }).await?;
    }
    stop.store(true, Ordering::Relaxed);
    while let Some(result) = bounded("clients", clients.join_next()).await? {
        result??;
    }
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_on_a_follower_that_freezes_is_answered_by_another_server() -> anyhow::Result<()> {
    let cluster = start(1, |settings| settings.server_timeout_ms = 5000).await?;
    wait_for_epoch_on(&cluster, 2).await?;
    let chosen = cluster.reader("chosen", "follower-1").await?;
    read_at_last(&chosen, "10").await?;
    let open = cluster.reader("open", "follower-1").await?;
    open_at_last(&open).await?;
    let mut free = Vec::new();
    for _ in 0..6 {
        let session = cluster.updater("free").await?;
        run(&session, "SELECT count(*) FROM numbers").await??;
        free.push(session);
    }
    let frozen = freeze(&cluster, "follower-1")?;
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
    wait_for_epoch_on(&cluster, 2).await?;
    run(&open, "ROLLBACK").await??;
    read_at_last(&open, "10").await?;
    read_at_last(&chosen, "10").await
}

/// A follower that is late for one gate, on a busy machine, is not in that one epoch.
async fn read_at_last(session: &Session, count: &str) -> anyhow::Result<()> {
    wait_until("a read on the chosen server", || async {
        match run(session, "SELECT count(*) FROM numbers").await? {
            Ok(answer) => Ok(answer.text()? == count),
            Err(error) if error.code == "57P03" => Ok(false),
            Err(error) => Err(error.into()),
        }
    })
    .await
}

/// Opens a transaction with a read on the session's chosen server.
async fn open_at_last(session: &Session) -> anyhow::Result<()> {
    wait_until("a transaction on the chosen server", || async {
        run(session, "ROLLBACK").await??;
        run(session, "BEGIN READ ONLY").await??;
        Ok(run(session, "SELECT count(*) FROM numbers").await?.is_ok())
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_is_killed_is_missed_by_nobody_and_comes_back() -> anyhow::Result<()> {
    let cluster = start_usual(2).await?;
    wait_for_epoch_on(&cluster, 3).await?;
    let session = cluster.updater("session").await?;
    for round in 1..=2 {
        let follower = cluster.servers.server("follower-1")?;
        let open = cluster.reader("open", "follower-1").await?;
        open_at_last(&open).await?;
        follower.server.crash_stop().await?;
        let lost = run(&open, "SELECT count(*) FROM numbers").await?.expect_err("its server is dead");
        assert!(["57P01", "57P02"].contains(&lost.code.as_str()), "{lost}");
        for value in 1..=20 {
            run(&session, &format!("UPDATE numbers SET value = {value} WHERE id = 1")).await??;
            assert_eq!(run(&session, "SELECT value FROM numbers WHERE id = 1").await??.number()?, value, "{round}");
        }
        wait_for_health(&cluster, "follower-1", Health::Down).await?;
        follower.server.start().await?;
        wait_for_epoch_on(&cluster, 3).await?;
        let read = cluster.reader("chosen", "follower-1").await?;
        wait_until("it shows the last value", || async {
            Ok(read
                .run("SELECT value FROM numbers WHERE id = 1")
                .await
                .is_ok_and(|answer| answer.text().is_ok_and(|value| value == "20")))
        })
        .await?;
    }
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}
