//! Clients that go away or stop reading: their locks go, back ends are not leaked, others go on.

use std::time::Duration;

use anyhow::Context;

use crate::laboratory::{bounded, busy_back_ends, leader, run, session_back_ends, start_usual, wait_until};
use crate::wire::{Wire, message, parse, query, run_extended};
use onecopy_tests::cluster::TestCluster;

/// What a client has sent when it goes. Each holds, or is about to take, the lock of row 1.
fn steps() -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let update = "UPDATE numbers SET value = value + 1 WHERE id = 1";
    let copy = vec![query("BEGIN"), query(update), query("COPY numbers FROM STDIN"), message(b'd', b"500\t")];
    vec![
        ("in a transaction", vec![query("BEGIN"), query(update)]),
        ("in a transaction that failed", vec![query("BEGIN"), query(update), query("SELECT 1 / 0")]),
        ("in a read-only transaction", vec![query("BEGIN READ ONLY"), query("SELECT * FROM numbers")]),
        ("in COPY IN", copy),
        ("in COPY IN without a transaction", vec![query("COPY numbers FROM STDIN"), message(b'd', b"500\t1\n")]),
        ("in the middle of a batch", vec![run_extended("BEGIN", &[]), run_extended(update, &[])]),
        ("after Flush", vec![run_extended(update, &[]), message(b'H', b"")]),
        ("in the middle of a message", vec![query("BEGIN"), query(update), parse("", "SELECT 1")[..7].to_vec()]),
        ("during a statement", vec![query("BEGIN"), query(update), query("SELECT pg_sleep(0.2)")]),
        ("with pinned state", vec![query("CREATE TEMP TABLE mine (a int)"), query("BEGIN"), query(update)]),
    ]
}

async fn vanish(cluster: &TestCluster, messages: &[Vec<u8>]) -> anyhow::Result<()> {
    let mut wire = Wire::connect(cluster).await?;
    for bytes in messages {
        wire.send(bytes).await?;
    }
    // So that at least something of it has begun.
    tokio::time::sleep(Duration::from_millis(20)).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_vanishes_leaves_no_lock_no_row_and_no_back_end() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let outside = leader(&cluster).await?;
    run(&outside, "SET lock_timeout = '100s'").await??;
    for (what, messages) in steps() {
        for _ in 0..4 {
            vanish(&cluster, &messages).await?;
        }
        wait_until(what, || async {
            Ok(cluster.router().status().clients == 0 && busy_back_ends(&cluster).await? == 0)
        })
        .await?;
        assert_eq!(run(&outside, "UPDATE numbers SET value = value WHERE id = 1").await??.count, 1, "{what}");
        let rows = run(&outside, "SELECT value, (SELECT count(*) FROM numbers) FROM numbers WHERE id = 1").await??.rows;
        assert_eq!(rows, [[Some("0".to_owned()), Some("10".to_owned())]], "{what}");
    }
    wait_until("all clients are forgotten", || async { Ok(cluster.router().status().clients == 0) }).await?;
    // Back ends may be kept for others, but never more than were in use at once.
    wait_until("no back end is left over", || async { Ok(session_back_ends(&cluster).await? <= 4) }).await?;
    let mut wire = Wire::connect(&cluster).await?;
    assert_eq!(wire.query("UPDATE numbers SET value = 5 WHERE id = 1").await?.commands(), ["UPDATE 1"]);
    assert_eq!(wire.query("SELECT value FROM numbers WHERE id = 1").await?.text_rows(), ["5"]);
    Ok(())
}

/// Many at once; nothing piles up in the router or on the servers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_vanished_clients_leave_the_counts_as_they_were() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    for round in 0..5 {
        let mut clients = Vec::new();
        for number in 0..40 {
            let mut wire = Wire::connect(&cluster).await?;
            wire.send(&query("BEGIN")).await?;
            wire.send(&query(&format!("UPDATE numbers SET value = 9 WHERE id = {}", 1 + number % 10))).await?;
            clients.push(wire);
        }
        drop(clients);
        wait_until("the round is over", || async {
            Ok(cluster.router().status().clients == 0 && busy_back_ends(&cluster).await? == 0)
        })
        .await?;
        wait_until("no more back ends than may be", || async { Ok(session_back_ends(&cluster).await? <= 64) })
            .await
            .with_context(|| format!("round {round}"))?;
    }
    let mut wire = Wire::connect(&cluster).await?;
    assert_eq!(wire.query("SELECT sum(value) FROM numbers").await?.text_rows(), ["0"]);
    assert_eq!(wire.query("UPDATE numbers SET value = 1").await?.commands(), ["UPDATE 10"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_stop_reading_hold_up_nobody() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut other = Wire::connect(&cluster).await?;
    other.query("SET onecopy.freshness = 'strict'").await?;
    let huge = "SELECT repeat('x', 100000) FROM generate_series(1, 2000)";
    let huge_update = "INSERT INTO numbers SELECT id, 0 FROM generate_series(1001, 3000) id \
         RETURNING repeat('x', 100000)";
    let mut silent = Vec::new();
    for messages in [
        vec![query(huge)],
        vec![query("BEGIN"), query(huge)],
        vec![query("BEGIN READ ONLY"), query(huge)],
        vec![run_extended(huge, &[]), crate::wire::sync()],
        vec![query(huge_update)],
        vec![query("COPY (SELECT repeat('x', 100000) FROM generate_series(1, 2000)) TO STDOUT")],
    ] {
        let mut wire = Wire::connect(&cluster).await?;
        for bytes in messages {
            wire.send(&bytes).await?;
        }
        silent.push(wire);
        tokio::time::sleep(Duration::from_millis(300)).await;
        for _ in 0..5 {
            let answer =
                bounded("an update", other.query("UPDATE numbers SET value = value + 1 WHERE id = 1")).await??;
            assert_eq!(answer.code(), "00000", "{} silent clients", silent.len());
            let answer = bounded("a read", other.query("SELECT count(*) FROM numbers WHERE id <= 10")).await??;
            assert_eq!(answer.text_rows(), ["10"], "{} silent clients", silent.len());
        }
    }
    // One that reads on after all gets everything. Not the first: on a busy machine it may have been silent for longer than is borne.
    let mut last = Wire::connect(&cluster).await?;
    last.send(&query(huge)).await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(last.answer().await?.rows().len(), 2000);
    drop(silent);
    wait_until("their back ends are free", || async { Ok(busy_back_ends(&cluster).await? == 0) }).await
}
