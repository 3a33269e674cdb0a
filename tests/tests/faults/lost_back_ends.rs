//! A server process killed in every state of a transaction: the client gets 57P01 (08007 for a commit), goes on with
//! the same connection, and what it was told is true.

use onecopy_tests::client::{Session, StatementResult};
use onecopy_tests::cluster::TestCluster;
use rustix::process::{Pid, Signal};

use crate::laboratory::{bounded, code, leader, run, start_usual, wait_for_updates, wait_until};

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
/// Nobody is the standby for which a commit waits that asks for it: it is in flight for ever.
const ENDLESS_COMMITS: [&str; 3] = [
    "ALTER SYSTEM SET synchronous_commit = local",
    "ALTER SYSTEM SET synchronous_standby_names = 'nobody'",
    "SELECT pg_reload_conf()",
];
const ENDLESSLY: &str = "SET LOCAL synchronous_commit = on";

/// Runs a transaction up to `state`, calls `harm`, and goes on to the end. Gives the result of what was under way, or of
/// what came next.
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
    wait_until("nothing sleeps", || async { Ok(sleepers(cluster).await? == 0) }).await?;
    let started = running.map(|sql| session.start(sql));
    if started.is_some() {
        wait_until("it runs", || async { Ok(sleepers(cluster).await? == 1) }).await?;
    }
    harm().await?;
    match started {
        Some(started) => Ok(bounded("the statement under way", started).await??),
        None => run(session, WRITE).await,
    }
}

/// Statements and commits that wait on any server.
async fn sleepers(cluster: &TestCluster) -> anyhow::Result<i64> {
    let mut count = 0;
    for server in cluster.servers.all() {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event IN ('PgSleep', 'SyncRep')";
        count += server.connect("observer").await?.run(sql).await?.number()?;
    }
    Ok(count)
}

/// The SQLSTATEs that are true to what happens in `state`.
fn due(state: State) -> &'static [&'static str] {
    match state {
        // A router may find the loss first, and take another server process: both are right.
        State::Idle | State::Begun => &["00000", "57P01", "57P03", "08007"],
        State::HasRead | State::HasWritten | State::DuringStatement => &["57P01", "57P02"],
        State::AutocommitRead => &["00000", "57P01", "57P02", "57P03"],
        State::DuringCommit => &["08007"],
        State::AutocommitUpdate => &["08007", "57P01", "57P02"],
    }
}

async fn value(cluster: &TestCluster) -> anyhow::Result<i64> {
    leader(cluster).await?.run(READ).await?.number()
}

/// Ends the process of every session on the leader.
async fn end_sessions(cluster: &TestCluster) -> anyhow::Result<()> {
    let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE 'onecopy %' \
         AND pid <> pg_backend_pid()";
    leader(cluster).await?.run(sql).await?;
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
    let _ = run(session, "ROLLBACK").await?;
    wait_for_updates(cluster).await?;
    // The same connection goes on, after at most one more refusal: the router may not know yet.
    wait_until("the session goes on", || async { Ok(session.run(READ).await.is_ok()) }).await?;
    wait_until("the session writes", || async {
        Ok(session.run("UPDATE numbers SET value = value WHERE id = 2").await.is_ok())
    })
    .await?;
    if code != "08007" {
        assert_eq!(leader(cluster).await?.run("SELECT count(*) FROM numbers WHERE id = 77").await?.number()?, 0);
    }
    let now = value(cluster).await?;
    match (state, code.as_str()) {
        (State::Idle, "00000") => assert_eq!(now, before + 2, "{state:?}"),
        (State::Idle, "57P01" | "57P03") | (State::AutocommitRead | State::AutocommitUpdate, _) => {
            assert_eq!(now, before + 1, "{state:?}");
        }
        (State::DuringCommit, _) => assert_eq!(now, before + 1, "it had committed where it stood"),
        (State::Idle, "08007") => {}
        // It was rolled back after the update succeeded, or could not be run.
        _ => assert_eq!(now, before, "{state:?}: {result:?}"),
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_back_end_that_is_ended_in_any_state_is_reported_and_replaced() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    leader(&cluster).await?.run_all(&ENDLESS_COMMITS).await?;
    for state in STATES {
        let session = cluster.updater("session").await?;
        let before = value(&cluster).await?;
        let result = drive(&cluster, &session, state, async || end_sessions(&cluster).await).await?;
        after(&cluster, &session, state, &result, before).await?;
    }
    Ok(())
}

/// SIGKILL of one process makes the postmaster end all of them and recover.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_back_end_that_is_killed_in_any_state_is_reported_and_the_leader_comes_back() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    leader(&cluster).await?.run_all(&ENDLESS_COMMITS).await?;
    for state in STATES {
        let session = cluster.updater("session").await?;
        let before = value(&cluster).await?;
        let kill = async || {
            let sql = "SELECT coalesce(min(pid), 0) FROM pg_stat_activity WHERE application_name = 'onecopy session'";
            let process = i32::try_from(leader(&cluster).await?.run(sql).await?.number()?)?;
            if let Some(process) = Pid::from_raw(process) {
                let observer = leader(&cluster).await?;
                rustix::process::kill_process(process, Signal::KILL)?;
                // The postmaster ends all others as soon as it notices.
                wait_until("all are ended", || async { Ok(observer.run("SELECT 1").await.is_err()) }).await?;
            }
            Ok(())
        };
        let result = drive(&cluster, &session, state, kill).await?;
        wait_until("the leader recovers", || async { Ok(leader(&cluster).await.is_ok()) }).await?;
        after(&cluster, &session, state, &result, before).await?;
    }
    Ok(())
}

/// A whole server that says nothing any more. What waits for it is given up within the bound; after it wakes up, all
/// goes on, and nothing is there that was reported as failed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_frozen_in_any_state_is_given_up_and_taken_back() -> anyhow::Result<()> {
    let cluster = crate::laboratory::start(1, |settings| {
        settings.server_timeout_ms = 4000;
        settings.backend_wait_ms = 8000;
    })
    .await?;
    leader(&cluster).await?.run_all(&ENDLESS_COMMITS).await?;
    for state in STATES {
        let session = cluster.updater("session").await?;
        let before = value(&cluster).await?;
        let server = cluster.servers.leader();
        let frozen = Frozen(server);
        let result = drive(&cluster, &session, state, async || Ok(server.signal(Signal::STOP)?)).await?;
        let code = code(&result);
        let known = ["57P01", "57P03", "08007"];
        // Where an epoch holds the write already, another server answers a read.
        let is_answered = state == State::AutocommitRead && code == "00000";
        assert!(is_answered || known.contains(&code.as_str()), "{state:?}: {result:?}");
        assert!(state != State::DuringCommit || code == "08007", "{state:?}: {result:?}");
        drop(frozen);
        let _ = run(&session, "ROLLBACK").await?;
        wait_for_updates(&cluster).await?;
        // A commit that was never answered shows only when its process has ended.
        wait_until("the session goes on, and nothing is left under way", || async {
            Ok(session.run(READ).await.is_ok() && sleepers(&cluster).await? == 0)
        })
        .await?;
        let now = value(&cluster).await?;
        match (state, code.as_str()) {
            (_, "08007") => assert!(now >= before, "{state:?}"),
            (State::Idle | State::AutocommitRead, _) => assert_eq!(now, before + 1, "{state:?}"),
            _ => assert_eq!(now, before, "{state:?}: {result:?}"),
        }
    }
    Ok(())
}

/// A commit without an answer still waits on the leader, with its locks: it is ended there although nobody reads, which would ask for a
/// gate. Else every update that is in conflict with it would be refused, or wait, for as long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_without_an_answer_keeps_nobody_from_updating() -> anyhow::Result<()> {
    let cluster = crate::laboratory::start(1, |settings| settings.server_timeout_ms = 4000).await?;
    leader(&cluster).await?.run_all(&ENDLESS_COMMITS).await?;
    let session = cluster.updater("session").await?;
    let before = value(&cluster).await?;
    let frozen = Frozen(cluster.servers.leader());
    let stop = async || Ok(cluster.servers.leader().signal(Signal::STOP)?);
    let result = drive(&cluster, &session, State::DuringCommit, stop).await?;
    assert_eq!(code(&result), "08007", "{result:?}");
    drop(frozen);
    // Of the very row that the commit has locked.
    let update = "UPDATE numbers SET value = value WHERE id = 1";
    wait_until("the row is updated", || async { Ok(run(&session, update).await?.is_ok()) }).await?;
    assert_eq!(value(&cluster).await?, before + 1, "it had committed where it stood");
    Ok(())
}

/// A frozen server, let go when dropped.
struct Frozen<'a>(&'a onecopy_tests::servers::TestServer);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let _ = self.0.signal(Signal::CONT);
    }
}
