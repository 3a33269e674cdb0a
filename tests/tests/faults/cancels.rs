//! Cancel requests hit the statement that they mean and no other.

use std::time::Duration;

use anyhow::Context;
use onecopy_testing::Frozen;
use tokio::io::AsyncReadExt;

use crate::harness::{busy_back_ends, on_leader, start_usual, try_until};
use crate::wire::{ANSWER_TIMEOUT, Wire, query, run_extended, sync, with_length};
use onecopy_tests::client::Session;
use onecopy_tests::cluster::TestCluster;

const CANCEL: u32 = 80_877_102;

/// By then a request is on its way, or an answer has come that waits for nothing.
const UNDER_WAY: Duration = Duration::from_millis(300);

async fn cancel(cluster: &TestCluster, key: &[u8]) -> anyhow::Result<()> {
    let mut wire = tokio::net::TcpStream::connect(cluster.router().local_address()).await?;
    let packet = with_length(&[&CANCEL.to_be_bytes(), key].concat());
    tokio::io::AsyncWriteExt::write_all(&mut wire, &packet).await?;
    let mut answer = Vec::new();
    tokio::time::timeout(ANSWER_TIMEOUT, wire.read_to_end(&mut answer)).await??;
    assert_eq!(answer, b"", "a cancel request is answered by closing");
    Ok(())
}

async fn wait_for_sleepers(cluster: &TestCluster, count: i64) -> anyhow::Result<()> {
    try_until("the statements run", || async {
        let mut running = 0;
        for server in cluster.servers.all() {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
            running += server.connect("observer").await?.run(sql).await?.number()?;
        }
        Ok(running == count)
    })
    .await
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_request_ends_its_own_clients_statement_only() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    for (begin, sql) in [
        ("SELECT", "SELECT pg_sleep(600)"),
        ("BEGIN", "SELECT pg_sleep(600)"),
        ("BEGIN READ ONLY", "SELECT count(*), pg_sleep(600) FROM numbers"),
        ("SELECT", "UPDATE numbers SET value = 1 WHERE pg_sleep(600) IS NOT NULL"),
        ("SELECT", "SELECT 1; SELECT pg_sleep(600)"),
    ] {
        let mut one = Wire::connect(&cluster).await?;
        let mut two = Wire::connect(&cluster).await?;
        for wire in [&mut one, &mut two] {
            wire.query(begin).await?;
            if begin == "SELECT" && sql.starts_with("SELECT pg") {
                wire.query("SET onecopy.server = 'follower-1'").await?;
            }
            let own = if sql.starts_with("UPDATE") { "SELECT pg_sleep(600)" } else { sql };
            wire.send(&query(own)).await?;
        }
        wait_for_sleepers(&cluster, 2).await?;
        cancel(&cluster, &one.cancel_key.clone()).await?;
        let answer = one.answer().await?;
        assert_eq!(answer.code(), "57014", "{begin}; {sql}");
        assert_eq!(answer.status()?, if begin == "SELECT" { 'I' } else { 'E' }, "{begin}; {sql}");
        wait_for_sleepers(&cluster, 1).await?;
        one.query("ROLLBACK").await?;
        assert_eq!(one.query("SELECT 'on'").await?.text_rows(), ["on"]);
        cancel(&cluster, &two.cancel_key.clone()).await?;
        assert_eq!(two.answer().await?.code(), "57014", "{begin}; {sql}");
        two.query("ROLLBACK").await?;
    }
    try_until("no back end is busy", || async { Ok(busy_back_ends(&cluster).await? == 0) }).await
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancel_requests_with_wrong_keys_or_for_idle_clients_do_nothing() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let key = wire.cancel_key.to_vec();
    let mut wrong = key.clone();
    wrong[7] ^= 1;
    // It waits until all of these requests were heard, however long that takes.
    let holder = cluster.servers.leader().connect("holder").await?;
    holder.run("SELECT pg_advisory_lock(42)").await?;
    wire.send(&query("SELECT pg_advisory_xact_lock(42), 'slept'")).await?;
    try_until("the statement waits", || async {
        let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
        Ok(on_leader(&cluster, sql).await?.number()? == 1)
    })
    .await?;
    for key in [&wrong[..], &key[..4], &[0; 8][..], &[]] {
        let mut stranger = tokio::net::TcpStream::connect(cluster.router().local_address()).await?;
        let packet = with_length(&[&CANCEL.to_be_bytes(), key].concat());
        tokio::io::AsyncWriteExt::write_all(&mut stranger, &packet).await?;
        // However it is closed.
        drop(tokio::time::timeout(ANSWER_TIMEOUT, stranger.read_to_end(&mut Vec::new())).await?);
    }
    holder.run("SELECT pg_advisory_unlock(42)").await?;
    assert_eq!(wire.answer().await?.text_rows(), ["|slept"]);
    // For a client that is idle, and in a storm while it works: its statements are whole or cancelled, nothing else.
    cancel(&cluster, &key).await?;
    assert_eq!(wire.query("SELECT 1").await?.text_rows(), ["1"]);
    let mut bystander = Wire::connect(&cluster).await?;
    let mut done = 0;
    for _ in 0..40 {
        wire.send(&query("UPDATE numbers SET value = value + 1 WHERE id = 1")).await?;
        let (answer, sent, other) = tokio::join!(
            wire.answer(),
            cancel(&cluster, &key),
            bystander.query("UPDATE numbers SET value = value + 1 WHERE id = 2")
        );
        sent?;
        assert_eq!(other?.code(), "00000", "a cancel request hit another client");
        match answer?.code().as_str() {
            "00000" => done += 1,
            "57014" => {}
            code => panic!("{code}"),
        }
    }
    let values = bystander.query("SELECT value FROM numbers WHERE id IN (1, 2) ORDER BY id").await?.text_rows();
    assert_eq!(values, [done.to_string(), "40".to_owned()]);
    Ok(())
}

/// A cancel request is under way to the server while its statement ends: the client hears of both only when it can hit
/// nothing any more, and its next statement on the same back end runs.
///
/// A cancel request ends the statement that runs when it comes, or nothing: its connection is closed, and its client's
/// next statement sent to the same back end, only when it has reached the server (5 s at the most).
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f65_a_cancel_request_never_hits_the_next_statement() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let holder = cluster.servers.leader().connect("holder").await?;
    let leader = cluster.servers.leader().server.process_id().context("the leader runs")?;
    for round in 0..3 {
        let mut wire = Wire::connect(&cluster).await?;
        wire.query("BEGIN").await?;
        wire.query("UPDATE numbers SET value = 1 WHERE id = 1").await?;
        holder.run("SELECT pg_advisory_lock(65)").await?;
        wire.send(&query("SELECT pg_advisory_xact_lock(65)")).await?;
        try_until("the statement waits", || async {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory'";
            Ok(holder.run(sql).await?.number()? == 1)
        })
        .await?;
        // Whoever passes the request on on the server stands still; the statement's process does not.
        let frozen = Frozen::of([leader]);
        let (key, next) = (wire.cancel_key.clone(), query("SELECT 'next', pg_sleep(0.5)"));
        let mut cancelling = std::pin::pin!(cancel(&cluster, &key));
        let early = tokio::time::timeout(UNDER_WAY, &mut cancelling).await;
        holder.run("SELECT pg_advisory_unlock(65)").await?;
        wire.send(&next).await?;
        let statement = tokio::time::timeout(UNDER_WAY, wire.answer()).await;
        // It has had its lock: the request that goes on now finds nothing of it.
        try_until("the statement has ended", || async {
            let sql = "SELECT count(*) FROM pg_stat_activity \
                       WHERE state = 'active' AND query = 'SELECT pg_advisory_xact_lock(65)'";
            Ok(holder.run(sql).await?.number()? == 0)
        })
        .await?;
        drop(frozen);
        if early.is_err() {
            cancelling.await?;
        }
        let statement = match statement {
            Ok(statement) => statement?,
            Err(_) => wire.answer().await?,
        };
        assert_eq!(statement.code(), "00000", "round {round}: it had its lock before the request came");
        assert_eq!(wire.answer().await?.text_rows(), ["next|"], "round {round}");
        wire.query("ROLLBACK").await?;
    }
    Ok(())
}

/// What one server would run by now is still in the router: a request that comes then is for that, once.
///
/// A cancel request that comes while the router still reads or classifies what its client has said ends that, and
/// nothing later.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f88_a_cancel_request_hits_a_batch_that_is_still_being_read() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let key = wire.cancel_key.clone();
    let number = u32::from_be_bytes(key[..4].try_into()?).to_string();
    let mut config = cluster.client_config();
    config.dbname("onecopy");
    let console = Session::connect("console", &config).await?;
    let is_active = async || -> anyhow::Result<bool> {
        let shown = console.run("SHOW CLIENTS").await?.rows;
        let own = shown.into_iter().find(|row| row[0].as_ref() == Some(&number)).context("the session is not shown")?;
        Ok(own[5].as_deref() == Some("active"))
    };
    for begin in [false, true] {
        if begin {
            wire.query("BEGIN").await?;
        }
        // What was answered before may be worked on still; the batch is once its beginning was read.
        try_until("nothing is under way", || async { Ok(!is_active().await?) }).await?;
        wire.send(&run_extended("UPDATE numbers SET value = 7 WHERE id = 1", &[])).await?;
        try_until("the batch's beginning was read", &is_active).await?;
        cancel(&cluster, &key).await?;
        let answer = wire.ask(&sync()).await?;
        assert_eq!((answer.code().as_str(), answer.status()?), ("57014", if begin { 'E' } else { 'I' }));
        if begin {
            wire.query("ROLLBACK").await?;
        }
        let read = "SELECT value FROM numbers WHERE id = 1";
        assert_eq!(wire.query(read).await?.text_rows(), ["0"], "it hits nothing later, and nothing was done");
    }
    Ok(())
}
