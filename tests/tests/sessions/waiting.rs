//! One who waits does not make others wait: long statements in the commit barrier, DDL under way, a frozen follower,
//! typos.

use onecopy_tests::cluster::TestCluster;
use tokio::task::JoinSet;

use crate::harness::{bounded, on_leader, run, run_once_there, start, start_usual, try_until, wait_for_epoch_on};
use crate::wire::{Wire, parse, run_extended, sync};

async fn wait_for_blocked(cluster: &TestCluster, count: i64) -> anyhow::Result<()> {
    try_until("a statement waits for a lock", || async {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
        Ok(on_leader(cluster, sql).await?.number()? == count)
    })
    .await
}

/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_an_autocommit_statement_waits_for_a_lock_others_commit_and_read() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let holder = cluster.updater("holder").await?;
    holder.run_all(&["BEGIN", "UPDATE numbers SET value = 100 WHERE id = 1"]).await?;
    let blocked = cluster.updater("blocked").await?;
    let update = blocked.start("UPDATE numbers SET value = value + 1 WHERE id = 1");
    wait_for_blocked(&cluster, 1).await?;
    for freshness in ["strict", "session"] {
        let (one, other) = (cluster.updater("one").await?, cluster.updater("other").await?);
        for session in [&one, &other] {
            session.run(&format!("SET onecopy.freshness = '{freshness}'")).await?;
        }
        for round in 1..=5 {
            run(&one, &format!("UPDATE numbers SET value = {round} WHERE id = 2")).await??;
            let read = "SELECT value FROM numbers WHERE id = 2";
            assert_eq!(run(&one, read).await??.number()?, round, "{freshness}");
            if freshness == "strict" {
                assert_eq!(run(&other, read).await??.number()?, round, "{freshness}");
            }
            for sql in ["BEGIN", "UPDATE numbers SET value = value + 1 WHERE id = 3", "COMMIT"] {
                run(&one, sql).await??;
            }
        }
    }
    assert!(!update.is_finished());
    holder.run("ROLLBACK").await?;
    assert_eq!(bounded("the statement that waited", update).await???.count, 1);
    assert_eq!(on_leader(&cluster, "SELECT sum(value) FROM numbers WHERE id IN (1, 3)").await?.number()?, 11);
    Ok(())
}

/// Spec: I2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_wait_for_an_epoch_when_ddl_begins_are_answered_by_the_leader() -> anyhow::Result<()> {
    let cluster = start(1, |settings| settings.gate_timeout_ms = 20).await?;
    wait_for_epoch_on(&cluster, 2).await?;
    let holder = cluster.updater("holder").await?;
    holder.run_all(&["BEGIN", "UPDATE numbers SET value = 100 WHERE id = 1"]).await?;
    let blocked = cluster.updater("blocked").await?;
    // No gate closes while this is inside the commit barrier.
    let update = blocked.start("UPDATE numbers SET value = value + 1 WHERE id = 1");
    wait_for_blocked(&cluster, 1).await?;
    let mut readers = JoinSet::new();
    for _ in 0..12 {
        let session = cluster.updater("reader").await?;
        session.run("SET onecopy.freshness = 'strict'").await?;
        readers.spawn(async move {
            for _ in 0..3 {
                assert_eq!(run(&session, "SELECT count(*) FROM numbers").await??.number()?, 10);
            }
            run(&session, "BEGIN READ ONLY").await??;
            assert_eq!(run(&session, "SELECT count(*) FROM numbers").await??.number()?, 10);
            run(&session, "COMMIT").await??;
            anyhow::Ok(())
        });
    }
    // DDL whose transaction stays open until all of them have their answers.
    let maker = cluster.updater("maker").await?;
    for sql in ["BEGIN", "CREATE TABLE made (a int)"] {
        run(&maker, sql).await??;
    }
    while let Some(result) = bounded("readers", readers.join_next()).await? {
        result??;
    }
    run(&maker, "COMMIT").await??;
    holder.run("ROLLBACK").await?;
    assert_eq!(bounded("the statement that waited", update).await???.count, 1);
    assert_eq!(run(&maker, "SELECT count(*) FROM made").await??.number()?, 0);
    Ok(())
}

/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ddl_goes_on_while_a_follower_is_frozen_and_after_it() -> anyhow::Result<()> {
    let cluster = start(1, |settings| {
        settings.server_timeout_ms = 5000;
        settings.follower_timeout_ms = 200;
    })
    .await?;
    wait_for_epoch_on(&cluster, 2).await?;
    let (one, other) = (cluster.updater("one").await?, cluster.updater("other").await?);
    for session in [&one, &other] {
        session.run("SET onecopy.freshness = 'strict'").await?;
        run(session, "SELECT count(*) FROM numbers").await??;
    }
    let frozen = cluster.servers.server("follower-1")?.freeze()?;
    for round in 0..3 {
        run(&one, &format!("CREATE TABLE made_{round} (a int)")).await??;
        run(&one, &format!("INSERT INTO made_{round} VALUES ({round})")).await??;
        run(&one, &format!("ALTER TABLE made_{round} ADD COLUMN b int DEFAULT 5")).await??;
        for session in [&one, &other] {
            assert_eq!(run(session, &format!("SELECT a + b FROM made_{round}")).await??.number()?, round + 5);
        }
        run(&other, &format!("TRUNCATE made_{round}")).await??;
        assert_eq!(run(&one, &format!("SELECT count(*) FROM made_{round}")).await??.number()?, 0);
    }
    drop(frozen);
    wait_for_epoch_on(&cluster, 2).await?;
    run(&one, "DROP TABLE made_0").await??;
    let reader = cluster.reader("reader", "follower-1").await?;
    reader.run("SET onecopy.freshness = 'strict'").await?;
    // Its server may not be in the epoch yet: then it is told 57P03. What it is shown otherwise is right at once.
    let made = run_once_there(&reader, "SELECT count(*) FROM pg_class WHERE relname LIKE 'made%'").await?;
    assert_eq!(made.number()?, 2);
    Ok(())
}

/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_syntax_error_of_one_client_ends_nobodys_epoch() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    wait_for_epoch_on(&cluster, 2).await?;
    let mut other = Wire::connect(&cluster).await?;
    for server in ["leader", "follower-1"] {
        let reader = cluster.reader("reader", server).await?;
        reader.run_all(&["BEGIN READ ONLY", "SELECT count(*) FROM numbers"]).await?;
        for sql in
            ["SELEC 1", "SELECT * FROM", "DROP TABEL numbers", "'", "SELECT 1; TRUNCAT numbers", "BEGIN; SELEC 1"]
        {
            assert_eq!(other.query(sql).await?.code(), "42601", "{sql}");
            other.query("ROLLBACK").await?;
            assert_eq!(other.ask(&[parse("", sql), sync()].concat()).await?.code(), "42601", "{sql}");
            assert_eq!(other.ask(&[run_extended(sql, &[]), sync()].concat()).await?.code(), "42601", "{sql}");
            other.query("BEGIN").await?;
            assert_eq!(other.query(sql).await?.code(), "42601", "{sql}");
            other.query("ROLLBACK").await?;
            assert_eq!(run(&reader, "SELECT count(*) FROM numbers").await??.number()?, 10, "{server}, after {sql}");
        }
        run(&reader, "COMMIT").await??;
    }
    Ok(())
}
