//! Both directions of a session flow at once, and a client that goes, or stops in the midst, holds up nobody.

use std::time::{Duration, Instant};

use anyhow::ensure;
use bytes::BufMut;
use onecopy_router::GONE_CLIENT_BOUND;
use onecopy_tests::cluster::TestCluster;

use crate::harness::{bounded, leader, run, start, start_usual, try_until};
use crate::wire::{ANSWER_TIMEOUT, Answer, Wire, bind, execute, message, parse, query, run_extended, startup, sync};

/// Rows that are sent in one message; the first of them has a notice, which is much longer than all of them together.
const MESSAGE_ROWS: usize = 50;
const ROW_BYTES: usize = 100;
const NOTICE_BYTES: usize = 40_000;
/// So many messages that no sockets' buffers hold them, or their notices.
const MESSAGES: usize = 1500;

/// A table whose trigger says notices.
fn noisy() -> String {
    format!(
        "CREATE TABLE noisy (text text CHECK (text <> 'refused')); \
         CREATE FUNCTION say() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         IF NEW.text LIKE 'n%' THEN RAISE NOTICE '%', repeat('n', {NOTICE_BYTES}); END IF; RETURN NEW; END $$; \
         CREATE TRIGGER say BEFORE INSERT ON noisy FOR EACH ROW EXECUTE FUNCTION say()"
    )
}

fn copy_in(extended: bool) -> Vec<u8> {
    let sql = "COPY noisy FROM STDIN";
    if extended { [parse("", sql), bind("", "", &[]), execute("", 0), sync()].concat() } else { query(sql) }
}

/// All rows, of which the first of each message is `first`, then one more, and the end.
fn rows(first: &str, last: &str, extended: bool) -> Vec<u8> {
    let row = format!("{}\n", "x".repeat(ROW_BYTES - 1));
    let mut bytes = message(b'd', format!("{first}\n{}", row.repeat(MESSAGE_ROWS - 1)).as_bytes()).repeat(MESSAGES);
    bytes.extend_from_slice(&message(b'd', format!("{last}\n").as_bytes()));
    bytes.extend_from_slice(&message(b'c', b""));
    if extended {
        bytes.extend_from_slice(&sync());
    }
    bytes
}

/// Sends `bytes` and takes everything up to `ReadyForQuery`, both at once, as drivers do.
async fn exchange(wire: &mut Wire, bytes: &[u8]) -> anyhow::Result<Answer> {
    wire.channel.output.put_slice(bytes);
    let mut frames = Vec::new();
    while frames.last().is_none_or(|frame: &onecopy_router::wire::Frame| frame.tag != b'Z') {
        let frame = tokio::time::timeout(ANSWER_TIMEOUT, wire.channel.exchange()).await;
        frames.push(frame.map_err(|_| anyhow::anyhow!("it hangs after {} messages", frames.len()))??);
    }
    Ok(Answer { frames })
}

/// Notices of a copy reach the client while it still sends, as many as there are.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notices_of_a_copy_reach_the_client_while_it_still_sends() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let outside = leader(&cluster).await?;
    run(&outside, &noisy()).await??;
    let mut wire = Wire::connect(&cluster).await?;
    for extended in [false, true] {
        for (last, code) in [("taken", "00000"), ("refused", "23514")] {
            wire.send(&copy_in(extended)).await?;
            while wire.next().await?.tag != b'G' {}
            let answer = exchange(&mut wire, &rows("noisy", last, extended)).await?;
            let what = format!("{last}, extended {extended}");
            assert_eq!((answer.code().as_str(), answer.status()?), (code, 'I'), "{what}");
            assert_eq!(answer.tags().matches('N').count(), MESSAGES, "{what}");
            assert_eq!(wire.query("SELECT 'in step'").await?.text_rows(), ["in step"], "{what}");
        }
    }
    // A client that reads only when it has sent everything gets along as well, as far as it does with one server.
    wire.send(&copy_in(false)).await?;
    wire.send(&rows("quiet", "noisy", false)).await?;
    assert_eq!(wire.answer().await?.tags(), "GNCZ");
    let kept = 3 * (MESSAGES * MESSAGE_ROWS + 1);
    assert_eq!(wire.query("SELECT count(*) FROM noisy").await?.text_rows(), [kept.to_string()]);
    Ok(())
}

/// Back ends that do something for a client, on any server. Readers between two reads stay in their epoch.
async fn busy(cluster: &TestCluster) -> anyhow::Result<Vec<String>> {
    let sql = "SELECT application_name || ': ' || state || ': ' || left(query, 60) FROM pg_stat_activity \
               WHERE (application_name = 'onecopy session' AND state <> 'idle') \
               OR (application_name = 'onecopy reader' AND state = 'active')";
    let mut busy = Vec::new();
    for server in cluster.servers.all() {
        let answer = server.connect("observer").await?.run(sql).await?;
        busy.extend(answer.rows.into_iter().filter_map(|row| row.into_iter().next()?));
    }
    Ok(busy)
}

/// What a client has sent is under way by then; a client that stalls is given up only later.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// So many times the bound may be over on a busy machine.
const SLOWNESS_MAX: u32 = 10;

/// What the router takes without being read from it has taken by then.
const SEND_TIMEOUT: Duration = Duration::from_millis(300);

/// What clients wait for, or what waits for them, when they go. Row 1 is locked by somebody else meanwhile.
fn waits() -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let locked = "UPDATE numbers SET value = 7 WHERE id = 1";
    let huge = "SELECT repeat('x', 100000) FROM generate_series(1, 1000)";
    let long = "SELECT count(*) FROM generate_series(1, 1000000) a, generate_series(1, 1000000) b";
    vec![
        ("COPY FROM, notices unread", vec![copy_in(false), rows("noisy", "taken", false)]),
        ("COPY TO, unread", vec![query(&format!("COPY ({huge}) TO STDOUT"))]),
        ("a lock, in the commit barrier", vec![query(locked)]),
        ("a lock, in a transaction", vec![query("BEGIN"), query(locked)]),
        ("a sleep", vec![query("SELECT pg_sleep(1000)")]),
        (
            "a sleep that catches a cancel",
            vec![query(
                "DO $$ BEGIN LOOP BEGIN PERFORM pg_sleep(1000); \
                 EXCEPTION WHEN query_canceled THEN NULL; END; END LOOP; END $$",
            )],
        ),
        ("a huge result, unread", vec![query(huge)]),
        (
            "a huge result of an update, unread",
            vec![query(
                "INSERT INTO numbers SELECT id, 0 FROM generate_series(1001, 2000) id RETURNING repeat('x', 100000)",
            )],
        ),
        ("pipelined messages", vec![[run_extended(locked, &[]), sync()].concat().repeat(500)]),
        ("a long read on a follower", vec![query("SET onecopy.server = 'follower-1'"), query(long)]),
        ("a long read in a transaction", vec![query("BEGIN READ ONLY"), query(long)]),
    ]
}

/// A client that goes frees its back end within 5 s, whatever is waited for: a lock, a long statement, a place in a
/// pool, the client itself; one that has only closed its side gets what it has asked for while statements end or it
/// takes answers.
///
/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_frees_its_back_end_whatever_is_waited_for() -> anyhow::Result<()> {
    let places = waits().len();
    let cluster = start(1, |settings| settings.leader_backends_max = places).await?;
    let outside = leader(&cluster).await?;
    run(&outside, &noisy()).await??;
    run(&outside, "CREATE DATABASE other").await??;
    let holder = leader(&cluster).await?;
    holder.run_all(&["BEGIN", "UPDATE numbers SET value = 1 WHERE id = 1"]).await?;
    let mut clients = Vec::new();
    for (name, messages) in waits() {
        let mut wire = Wire::connect(&cluster).await?;
        for bytes in messages {
            wire.channel.output.put_slice(&bytes);
            // What is not taken any more is not sent.
            let _ = tokio::time::timeout(SEND_TIMEOUT, wire.channel.flush()).await;
        }
        clients.push(wire);
        let deadline = Instant::now() + START_TIMEOUT;
        while busy(&cluster).await?.len() < clients.len() {
            ensure!(Instant::now() < deadline, "{name} does not wait: {:?}", busy(&cluster).await?);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    // For most of these no back end is left, and one is in the midst of its log-in.
    for _ in 0..places {
        let mut wire = Wire::connect(&cluster).await?;
        wire.send(&query("UPDATE numbers SET value = 9 WHERE id = 1")).await?;
        clients.push(wire);
    }
    let mut wire = Wire::unauthenticated(&cluster).await?;
    wire.send(&startup(&[("user", "postgres"), ("database", "shop")])).await?;
    clients.push(wire);
    let count = clients.len();
    // The last one has sent its words, and the router may not have taken its connection yet.
    try_until("every client is there", || async { Ok(cluster.router().status().clients >= count) }).await?;

    drop(clients);
    let freed = try_until("every back end is free", || async {
        Ok(cluster.router().status().clients == 0 && busy(&cluster).await?.is_empty())
    });
    if tokio::time::timeout(GONE_CLIENT_BOUND * SLOWNESS_MAX, freed).await.is_err() {
        anyhow::bail!("of {count} clients are left: {:?}", busy(&cluster).await?);
    }
    holder.run("ROLLBACK").await?;
    assert_eq!(run(&outside, "UPDATE numbers SET value = 3 WHERE id = 1").await??.count, 1);
    let session = cluster.updater("later").await?;
    assert_eq!(run(&session, "UPDATE numbers SET value = value + 1 WHERE id = 1").await??.count, 1);
    cluster.read_until_at_epoch(&session, "SELECT value FROM numbers WHERE id = 1").await?;
    assert_eq!(run(&session, "SELECT value FROM numbers WHERE id = 1").await??.number()?, 4);
    run(&session, "DROP DATABASE other").await??;
    Ok(())
}

/// A server process that is blocked on its client holds up DROP DATABASE, as PostgreSQL does on one server (it waits
/// for all of them). Epochs wait for neither.
///
/// A client that stalls in copy holds up no epoch, nor does a DROP DATABASE that waits for it.
///
/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_stalls_in_copy_holds_up_no_epoch() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let outside = leader(&cluster).await?;
    run(&outside, &noisy()).await??;
    run(&outside, "CREATE DATABASE other").await??;
    let mut stalled = Wire::connect(&cluster).await?;
    stalled.send(&copy_in(false)).await?;
    stalled.channel.output.put_slice(&rows("noisy", "taken", false));
    // It sends as long as something is taken.
    let sending = async {
        let _ = stalled.channel.flush().await;
        std::future::pending::<()>().await;
    };
    let blocked = try_until("its back end is blocked", || async {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'ClientWrite'";
        Ok(outside.run(sql).await?.number()? == 1)
    });
    tokio::select! {
        blocked = blocked => blocked?,
        () = sending => {}
    }
    let dropping = cluster.updater("dropping").await?.start("DROP DATABASE other");
    try_until("the database is being dropped", || async {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query = 'DROP DATABASE other'";
        Ok(dropping.is_finished() || outside.run(sql).await?.number()? == 1)
    })
    .await?;
    let session = cluster.updater("reader").await?;
    run(&session, "SET onecopy.freshness = 'strict'").await??;
    for value in 1..=5 {
        run(&session, &format!("UPDATE numbers SET value = {value} WHERE id = 1")).await??;
        cluster.read_until_at_epoch(&session, "SELECT value FROM numbers WHERE id = 1").await?;
    }
    drop(stalled);
    bounded("DROP DATABASE", dropping).await???;
    Ok(())
}
