//! A server process killed in every state of a transaction: the client gets 57P01 (08007 for a commit), goes on with
//! the same connection, and what it was told is true.

use std::sync::atomic::{AtomicI64, Ordering};

use anyhow::Context;
use onecopy_router::Health;
use onecopy_tests::client::{Session, StatementResult};
use onecopy_tests::cluster::TestCluster;

use crate::harness::{
    bounded, busy_back_ends, code, kill_back_end, leader, make_commits_endless, run, run_once_there, start_usual,
    try_until, wait_for_health, wait_for_updates, wait_for_whole_epoch,
};

/// In which state a transaction is when its server process is lost.
#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Idle,
    Begun,
    HasRead,
    HasWritten,
    DuringStatement,
    DuringCommit,
    AutocommitRead,
    AutocommitUpdate,
}

const STATES: [State; 8] = [
    State::Idle,
    State::Begun,
    State::HasRead,
    State::HasWritten,
    State::DuringStatement,
    State::DuringCommit,
    State::AutocommitRead,
    State::AutocommitUpdate,
];

const READ: &str = "SELECT value FROM numbers WHERE id = 1";
const WRITE: &str = "UPDATE numbers SET value = value + 1 WHERE id = 1";
const ENDLESSLY: &str = "SET LOCAL synchronous_commit = on";

/// Runs a transaction up to `state`, calls `harm`, and goes on to the end. Gives the result of what was under way, or
/// of what came next.
async fn drive(
    cluster: &TestCluster,
    session: &Session,
    state: State,
    harm: impl AsyncFnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<StatementResult> {
    let before: &[&str] = match state {
        State::Idle | State::AutocommitRead | State::AutocommitUpdate => &[WRITE],
        State::Begun => &["BEGIN"],
        State::HasRead => &["BEGIN", READ],
        State::HasWritten | State::DuringStatement => &["BEGIN", READ, WRITE],
        State::DuringCommit => &["BEGIN", READ, WRITE, ENDLESSLY],
    };
    for sql in before {
        run(session, sql).await??;
    }
    let running = match state {
        State::DuringStatement | State::AutocommitRead => Some("SELECT pg_sleep(10)"),
        State::DuringCommit => Some("COMMIT"),
        State::AutocommitUpdate => Some("INSERT INTO numbers SELECT 77, 0 FROM pg_sleep(10)"),
        _ => None,
    };
    // What was abandoned on a server that was frozen sleeps on there.
    try_until("nothing sleeps", || async { Ok(sleepers(cluster).await? == 0) }).await?;
    let started = running.map(|sql| session.start(sql));
    if started.is_some() {
        try_until("it runs", || async { Ok(sleepers(cluster).await? == 1) }).await?;
    }
    harm().await?;
    match started {
        Some(started) => Ok(bounded("the statement under way", started).await??),
        None => run(session, WRITE).await,
    }
}

/// Statements and commits of sessions that wait on any server. Gates sleep, too, while they wait for a follower.
async fn sleepers(cluster: &TestCluster) -> anyhow::Result<i64> {
    let mut count = 0;
    for server in cluster.servers.all() {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event IN ('PgSleep', 'SyncRep') \
             AND application_name <> 'onecopy epoch'";
        count += server.connect("observer").await?.run(sql).await?.number()?;
    }
    Ok(count)
}

/// The SQLSTATE that is true to what happens in `state` when the server process is gone and another is to be had.
fn due(state: State) -> &'static [&'static str] {
    match state {
        // Nothing was under way there: the next statement gets another process.
        State::Idle | State::Begun => &["00000"],
        // It waits on the leader, where all reads run that tell something of the server.
        State::HasRead | State::HasWritten | State::DuringStatement | State::AutocommitRead => &["57P01"],
        State::DuringCommit => &["08007"],
        // Where the router has put it in a transaction of its own it knows that nothing is committed.
        State::AutocommitUpdate => &["08007", "57P01"],
    }
}

/// The same while the server says nothing: no other process is to be had.
fn due_on_frozen(state: State) -> &'static [&'static str] {
    match state {
        // Sent, in a transaction of the router's own or not.
        State::Idle => &["08007", "57P01"],
        // On a process that was there, or on one that would have to be made.
        State::Begun => &["57P01", "57P03"],
        _ => due(state),
    }
}

async fn value(cluster: &TestCluster) -> anyhow::Result<i64> {
    leader(cluster).await?.run(READ).await?.number()
}

/// Ends every process of the router's on the leader but the probe, for which the leader is there all the time, and
/// waits until they are gone.
async fn end_sessions(cluster: &TestCluster) -> anyhow::Result<()> {
    let observer = leader(cluster).await?;
    let sql = "SELECT string_agg(pid::text, ','), count(pg_terminate_backend(pid)) FROM pg_stat_activity \
         WHERE application_name LIKE 'onecopy %' AND application_name <> 'onecopy probe'";
    let ended = observer.run(sql).await?.text()?.to_owned();
    let left = format!("SELECT count(*) FROM pg_stat_activity WHERE pid IN ({ended})");
    try_until("they are gone", || async { Ok(observer.run(&left).await?.number()? == 0) }).await
}

/// Kills a process of the router's on the leader, the one that does something for a session if there is such.
async fn kill_one(cluster: &TestCluster) -> anyhow::Result<()> {
    kill_back_end(
        cluster,
        "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'onecopy %' \
         ORDER BY application_name = 'onecopy session' DESC, state IS DISTINCT FROM 'idle' DESC LIMIT 1",
    )
    .await
}

/// Rows that the update of [`State::AutocommitUpdate`] has left.
async fn inserted(cluster: &TestCluster) -> anyhow::Result<i64> {
    leader(cluster).await?.run("SELECT count(*) FROM numbers WHERE id = 77").await?.number()
}

/// The same connection goes on, to read and to write.
async fn goes_on(session: &Session) -> anyhow::Result<()> {
    run_once_there(session, READ).await?;
    assert_eq!(run_once_there(session, "UPDATE numbers SET value = value WHERE id = 2").await?.count, 1);
    Ok(())
}

async fn after(
    cluster: &TestCluster,
    session: &Session,
    state: State,
    result: &StatementResult,
    before: i64,
) -> anyhow::Result<()> {
    let code = code(result);
    assert!(due(state).contains(&code.as_str()), "{state:?}: {result:?}");
    run(session, "ROLLBACK").await??;
    wait_for_updates(cluster).await?;
    goes_on(session).await.with_context(|| format!("{state:?}"))?;
    // Whatever was said of it, its process was gone before it could commit.
    assert_eq!(inserted(cluster).await?, 0, "{state:?}: {result:?}");
    let committed = match state {
        // The update before it and that of after.
        State::Idle => 2,
        // The update before it; a COMMIT under way had committed where it stood.
        State::AutocommitRead | State::AutocommitUpdate | State::DuringCommit => 1,
        // Nobody has said COMMIT.
        State::Begun | State::HasRead | State::HasWritten | State::DuringStatement => 0,
    };
    assert_eq!(value(cluster).await?, before + committed, "{state:?}: {result:?}");
    Ok(())
}

/// Spec: A1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_back_end_that_is_ended_in_any_state_is_reported_and_replaced() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    make_commits_endless(&cluster).await?;
    for state in STATES {
        let session = cluster.updater("session").await?;
        let before = value(&cluster).await?;
        let result = drive(&cluster, &session, state, async || end_sessions(&cluster).await).await?;
        after(&cluster, &session, state, &result, before).await?;
    }
    Ok(())
}

/// A session whose state was on the server process that is lost, a temporary table, is told what has become of what was
/// under way, and then that it ends; nothing of it runs on another process.
///
/// Spec: A1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_loses_its_state_in_any_state_of_a_transaction_is_told_so() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    make_commits_endless(&cluster).await?;
    for state in STATES {
        let session = cluster.updater("session").await?;
        run(&session, "CREATE TEMPORARY TABLE mine (id int)").await??;
        let result = drive(&cluster, &session, state, async || end_sessions(&cluster).await).await?;
        let codes_due: &[&str] = match state {
            // Told while nothing was asked: this driver has a closed connection then. Or just when something was.
            State::Idle => &["08006", "57P01"],
            State::Begun => &["57P01"],
            _ => due(state),
        };
        assert!(codes_due.contains(&code(&result).as_str()), "{state:?}: {result:?}");
        let rolled_back = run(&session, "ROLLBACK").await?;
        let read = run(&session, "SELECT count(*) FROM mine").await?;
        let codes = [code(&rolled_back), code(&read), code(&run(&session, "SELECT 1").await?)];
        assert!(["57P01", "08006"].contains(&codes[1].as_str()) && codes[2] == "08006", "{state:?}: {codes:?}");
    }
    Ok(())
}

/// SIGKILL of one process makes the postmaster end all of them and recover.
///
/// Spec: A1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_back_end_that_is_killed_in_any_state_is_reported_and_the_leader_comes_back() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    make_commits_endless(&cluster).await?;
    for state in STATES {
        let session = cluster.updater("session").await?;
        let before = value(&cluster).await?;
        let result = drive(&cluster, &session, state, async || kill_one(&cluster).await).await?;
        after(&cluster, &session, state, &result, before).await?;
    }
    Ok(())
}

/// A server that ends the probe's session answers the next one: it never counts as down, so no read is refused.
///
/// Spec: A1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_ends_the_probes_session_is_not_down() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    wait_for_health(&cluster, "leader", Health::Up).await?;
    let observer = leader(&cluster).await?;
    // One that has answered: a server that ends the next one as well, before its first answer, does count as down.
    let probe = "SELECT coalesce(max(pid), 0) FROM pg_stat_activity
        WHERE application_name = 'onecopy probe' AND state = 'idle' AND query LIKE '%wal_lsn%'";
    let session = AtomicI64::new(0);
    for _ in 0..6 {
        let ended = session.load(Ordering::Relaxed);
        try_until("the probe has another session", || async {
            let health = cluster.router().status().servers[0].health;
            anyhow::ensure!(health == Health::Up, "{health:?}");
            session.store(observer.run(probe).await?.number()?, Ordering::Relaxed);
            Ok(![0, ended].contains(&session.load(Ordering::Relaxed)))
        })
        .await?;
        observer.run(&format!("SELECT pg_terminate_backend({})", session.load(Ordering::Relaxed))).await?;
    }
    Ok(())
}

/// A whole server that says nothing any more. What waits for it is given up within the bound; after it wakes up, all
/// goes on, and nothing is there that was reported as failed.
///
/// Spec: A1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_frozen_in_any_state_is_given_up_and_taken_back() -> anyhow::Result<()> {
    let cluster = crate::harness::start(1, |settings| {
        settings.server_timeout_ms = 4000;
        settings.backend_wait_ms = 8000;
    })
    .await?;
    make_commits_endless(&cluster).await?;
    for state in STATES {
        let session = cluster.updater("session").await?;
        let before = value(&cluster).await?;
        let mut frozen = None;
        let freeze = async || {
            frozen = Some(cluster.servers.leader().freeze()?);
            anyhow::Ok(())
        };
        let result = drive(&cluster, &session, state, freeze).await?;
        let code = code(&result);
        assert!(due_on_frozen(state).contains(&code.as_str()), "{state:?}: {result:?}");
        drop(frozen);
        run(&session, "ROLLBACK").await??;
        wait_for_updates(&cluster).await?;
        goes_on(&session).await.with_context(|| format!("{state:?}"))?;
        // What was never answered shows only when its process has ended: no gate closes before that.
        wait_for_whole_epoch(&cluster, &session, READ, &["leader", "follower-1"]).await?;
        try_until("nothing is left under way", || async {
            Ok(busy_back_ends(&cluster).await? == 0 && sleepers(&cluster).await? == 0)
        })
        .await?;
        let (now, inserted) = (value(&cluster).await?, inserted(&cluster).await?);
        // Of what nobody knows whether it is committed it is one or the other; all else is as it was told.
        let may_have_committed = i64::from(code == "08007");
        let (values, insertions) = match state {
            State::Idle => (before + 1..=before + 1 + may_have_committed, 0..=0),
            State::AutocommitUpdate => (before + 1..=before + 1, 0..=may_have_committed),
            // A COMMIT under way had committed where it stood.
            State::AutocommitRead | State::DuringCommit => (before + 1..=before + 1, 0..=0),
            State::Begun | State::HasRead | State::HasWritten | State::DuringStatement => (before..=before, 0..=0),
        };
        assert!(values.contains(&now), "{state:?}: {now}, {before} before: {result:?}");
        assert!(insertions.contains(&inserted), "{state:?}: {inserted} rows: {result:?}");
    }
    Ok(())
}

/// A commit without an answer still waits on the leader, with its locks: it is ended there although nobody reads, which
/// would ask for a gate. Else every update that is in conflict with it would be refused, or wait, for as long.
///
/// A commit without an answer keeps nobody from updating, also while nobody reads.
///
/// Spec: A1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_without_an_answer_keeps_nobody_from_updating() -> anyhow::Result<()> {
    let cluster = crate::harness::start(1, |settings| settings.server_timeout_ms = 4000).await?;
    make_commits_endless(&cluster).await?;
    let session = cluster.updater("session").await?;
    let before = value(&cluster).await?;
    let mut frozen = None;
    let freeze = async || {
        frozen = Some(cluster.servers.leader().freeze()?);
        anyhow::Ok(())
    };
    let result = drive(&cluster, &session, State::DuringCommit, freeze).await?;
    assert_eq!(code(&result), "08007", "{result:?}");
    drop(frozen);
    wait_for_health(&cluster, "leader", Health::Up).await?;
    // Of the very row that the commit has locked. Who has waited for it is in conflict with it.
    let update = "UPDATE numbers SET value = value WHERE id = 1";
    try_until("the row is updated", || async {
        match run(&session, update).await? {
            Err(refusal) if refusal.code == "40001" => Ok(false),
            answer => Ok(answer?.count == 1),
        }
    })
    .await?;
    assert_eq!(value(&cluster).await?, before + 1, "it had committed where it stood");
    Ok(())
}
