//! Clients that go away or stop reading: their locks go, back ends are not leaked, others go on.

use std::time::Duration;

use anyhow::Context;

use crate::harness::{
    bounded, busy_back_ends, leader, run, start, start_usual, try_until, wait_until_all_back_ends_are_free,
};
use crate::wire::{Wire, message, parse, query, run_extended};
use onecopy_tests::cluster::TestCluster;

/// What a client has sent when it goes, and the last messages of the answers to that: whoever has them is in the midst
/// of it. Each holds, or is about to take, the lock of row 1.
fn steps() -> Vec<(&'static str, Vec<Vec<u8>>, &'static str)> {
    let update = "UPDATE numbers SET value = value + 1 WHERE id = 1";
    let copy = vec![query("BEGIN"), query(update), query("COPY numbers FROM STDIN"), message(b'd', b"500\t")];
    vec![
        ("in a transaction", vec![query("BEGIN"), query(update)], "ZZ"),
        ("in a transaction that failed", vec![query("BEGIN"), query(update), query("SELECT 1 / 0")], "ZZZ"),
        ("in a read-only transaction", vec![query("BEGIN READ ONLY"), query("SELECT * FROM numbers")], "ZZ"),
        ("in COPY IN", copy, "ZZG"),
        ("in COPY IN without a transaction", vec![query("COPY numbers FROM STDIN"), message(b'd', b"500\t1\n")], "G"),
        // Nothing is answered before Sync or Flush.
        ("in the middle of a batch", vec![run_extended("BEGIN", &[]), run_extended(update, &[])], ""),
        ("after Flush", vec![run_extended(update, &[]), message(b'H', b"")], "C"),
        ("in the middle of a message", vec![query("BEGIN"), query(update), parse("", "SELECT 1")[..7].to_vec()], "ZZ"),
        ("during a statement", vec![query("BEGIN"), query(update), query("SELECT pg_sleep(100)")], "ZZ"),
        ("with pinned state", vec![query("CREATE TEMP TABLE mine (a int)"), query("BEGIN"), query(update)], "ZZZ"),
    ]
}

/// A client that sends messages and goes, once it has these answers and after a pause.
async fn vanish(cluster: &TestCluster, messages: &[Vec<u8>], awaited: &str, pause_ms: u64) -> anyhow::Result<()> {
    let mut wire = Wire::connect(cluster).await?;
    for bytes in messages {
        wire.send(bytes).await?;
    }
    for tag in awaited.bytes() {
        while wire.next().await?.tag != tag {}
    }
    tokio::time::sleep(Duration::from_millis(pause_ms)).await;
    Ok(())
}

/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_vanishes_leaves_no_lock_no_row_and_no_back_end() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let outside = leader(&cluster).await?;
    run(&outside, "SET lock_timeout = '100s'").await??;
    for (what, messages, awaited) in steps() {
        // One that is in the midst of it, and some that are wherever they are by then, or wait for its lock.
        vanish(&cluster, &messages, awaited, 0).await.with_context(|| what)?;
        for pause_ms in [0, 5, 20] {
            vanish(&cluster, &messages, "", pause_ms).await.with_context(|| what)?;
        }
        try_until(what, || async { Ok(cluster.router().status().clients == 0) }).await?;
        wait_until_all_back_ends_are_free(&cluster).await.with_context(|| what)?;
        assert_eq!(run(&outside, "UPDATE numbers SET value = value WHERE id = 1").await??.count, 1, "{what}");
        let rows = run(&outside, "SELECT value, (SELECT count(*) FROM numbers) FROM numbers WHERE id = 1").await??.rows;
        assert_eq!(rows, [[Some("0".to_owned()), Some("10".to_owned())]], "{what}");
    }
    let mut wire = Wire::connect(&cluster).await?;
    assert_eq!(wire.query("UPDATE numbers SET value = 5 WHERE id = 1").await?.commands(), ["UPDATE 1"]);
    assert_eq!(wire.query("SELECT value FROM numbers WHERE id = 1").await?.text_rows(), ["5"]);
    Ok(())
}

/// As many clients at once as there may be back ends.
const CLIENTS: usize = 40;

/// Many at once; nothing piles up in the router or on the servers, and every back end is there for the next.
///
/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_vanished_clients_leave_the_counts_as_they_were() -> anyhow::Result<()> {
    let cluster = start(1, |settings| settings.leader_backends_max = CLIENTS).await?;
    for round in 0..5 {
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            let mut wire = Wire::connect(&cluster).await?;
            wire.send(&query("BEGIN")).await?;
            wire.send(&query(&format!("UPDATE numbers SET value = 9 WHERE id = {}", 1 + number % 10))).await?;
            clients.push(wire);
        }
        drop(clients);
        try_until("the round is over", || async { Ok(cluster.router().status().clients == 0) })
            .await
            .with_context(|| format!("round {round}"))?;
        wait_until_all_back_ends_are_free(&cluster).await.with_context(|| format!("round {round}"))?;
    }
    // All places at once: one that had not been given back would be missing.
    let mut holders = Vec::new();
    for number in 0..CLIENTS {
        let mut wire = Wire::connect(&cluster).await?;
        let insert = format!("BEGIN; INSERT INTO numbers VALUES ({}, 0)", 1000 + number);
        assert_eq!(wire.query(&insert).await?.code(), "00000", "holder {number}");
        holders.push(wire);
    }
    assert_eq!(busy_back_ends(&cluster).await?, i64::try_from(CLIENTS)?);
    drop(holders);
    try_until("the holders are gone", || async { Ok(cluster.router().status().clients == 0) }).await?;
    wait_until_all_back_ends_are_free(&cluster).await?;
    let mut wire = Wire::connect(&cluster).await?;
    assert_eq!(wire.query("SELECT sum(value) FROM numbers").await?.text_rows(), ["0"]);
    assert_eq!(wire.query("UPDATE numbers SET value = 1").await?.commands(), ["UPDATE 10"]);
    Ok(())
}

/// Waits until the answers to so many clients stand still, because nobody reads them.
async fn wait_until_unread(cluster: &TestCluster, clients: usize) -> anyhow::Result<()> {
    let mut observers = Vec::new();
    for server in cluster.servers.all() {
        observers.push(server.connect("observer").await?);
    }
    try_until("the answers are not read", || async {
        let mut writing = 0;
        for observer in &observers {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'ClientWrite'";
            writing += observer.run(sql).await?.number()?;
        }
        Ok(usize::try_from(writing)? >= clients)
    })
    .await
}

/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_stop_reading_hold_up_nobody() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut other = Wire::connect(&cluster).await?;
    other.query("SET onecopy.freshness = 'strict'").await?;
    let huge = "SELECT repeat('x', 100000) FROM generate_series(1, 2000)";
    let huge_update = "INSERT INTO numbers SELECT id, 0 FROM generate_series(1001, 3000) id \
         RETURNING repeat('x', 100000)";
    let mut unresponsive = Vec::new();
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
        unresponsive.push(wire);
        wait_until_unread(&cluster, unresponsive.len()).await?;
        for _ in 0..5 {
            let answer =
                bounded("an update", other.query("UPDATE numbers SET value = value + 1 WHERE id = 1")).await??;
            assert_eq!(answer.code(), "00000", "{} unresponsive clients", unresponsive.len());
            let answer = bounded("a read", other.query("SELECT count(*) FROM numbers WHERE id <= 10")).await??;
            assert_eq!(answer.text_rows(), ["10"], "{} unresponsive clients", unresponsive.len());
        }
    }
    // One that reads on after all gets everything. Not the first: on a busy machine it may have been unresponsive for
    // longer than is borne.
    let mut last = Wire::connect(&cluster).await?;
    last.send(&query(huge)).await?;
    wait_until_unread(&cluster, unresponsive.len() + 1).await?;
    assert_eq!(last.answer().await?.rows().len(), 2000);
    drop(unresponsive);
    try_until("their back ends are free", || async { Ok(busy_back_ends(&cluster).await? == 0) }).await
}
