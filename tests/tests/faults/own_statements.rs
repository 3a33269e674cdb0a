//! What the router runs on its own around a client's statement fails, or comes too late: the client is told what has
//! become of its statement, and of no other.

use std::time::Duration;

use anyhow::Context;
use onecopy_postgres::StopMode;
use onecopy_testing::Frozen;
use onecopy_testing::process::children_of;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::Servers;

use crate::harness::{bounded, on_leader, start_usual, try_until};
use crate::wire::{Wire, bind, execute, parse, query, run_extended, sync};

/// A table whose deferred trigger runs `body` at COMMIT.
async fn watched(wire: &mut Wire, body: &str) -> anyhow::Result<()> {
    for sql in [
        format!("CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} RETURN NULL; END $$"),
        "CREATE TABLE watched (id int)".to_owned(),
        "CREATE CONSTRAINT TRIGGER watch AFTER INSERT ON watched DEFERRABLE INITIALLY DEFERRED
         FOR EACH ROW EXECUTE FUNCTION at_commit()"
            .to_owned(),
    ] {
        let answer = wire.query(&sql).await?;
        assert!(answer.errors().is_empty(), "{sql}: {answer:?}");
    }
    Ok(())
}

/// Past the router, to the leader.
async fn direct(cluster: &TestCluster) -> anyhow::Result<Wire> {
    Wire::connect_to(cluster.servers.leader().port()).await
}

/// A statement is complete when its transaction has committed: in the simple protocol nothing is told of it before.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_whose_commit_fails_is_not_told_to_be_complete() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let (mut wire, mut direct) = (Wire::connect(&cluster).await?, direct(&cluster).await?);
    watched(&mut wire, "RAISE EXCEPTION 'refused at commit';").await?;
    let insert = "INSERT INTO watched VALUES (1)";
    let returning = format!("{insert} RETURNING id");
    for (statements, tags) in [
        (query(insert), "EZ"),
        (query(&returning), "TDEZ"),
        (query(&format!("{insert}; {returning}")), "CTDEZ"),
        (query(&format!("{insert}; SELECT 1")), "CTDEZ"),
        (query(&format!("BEGIN; {insert}; COMMIT")), "CCEZ"),
        // PostgreSQL completes the statement, and commits with Sync.
        ([run_extended(insert, &[]), sync()].concat(), "12nCEZ"),
    ] {
        assert_eq!(direct.ask(&statements).await?.tags(), tags, "PostgreSQL");
        assert_eq!(wire.ask(&statements).await?.tags(), tags);
    }
    assert_eq!(on_leader(&cluster, "SELECT count(*) FROM watched").await?.number()?, 0);
    Ok(())
}

/// Processes of the leader that wait for whoever writes its log.
fn waiting_for_the_log(cluster: &TestCluster) -> usize {
    let processes = cluster.servers.leader().server.process_id().map(children_of).unwrap_or_default();
    let waits = |process: &u32| {
        std::fs::read_to_string(format!("/proc/{process}/wchan")).is_ok_and(|place| place.contains("pipe_write"))
    };
    processes.iter().filter(|process| waits(process)).count()
}

/// A server whose log stands still waits in the middle of the router's BEGIN, until `statement_timeout` ends that.
///
/// Nothing of a transaction runs that was not begun.
///
/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_runs_in_a_transaction_that_was_not_begun() -> anyhow::Result<()> {
    const STATEMENT_TIMEOUT: Duration = Duration::from_millis(1500);
    let servers = Servers::start(0).await?;
    servers.leader().connect("setup").await?.run("ALTER SYSTEM SET logging_collector = on").await?;
    servers.leader().server.restart(StopMode::Fast).await?;
    let mut cluster = TestCluster::before(servers).await?;
    cluster.start_router(|_| {}).await?;
    let mut setup = Wire::connect(&cluster).await?;
    for sql in [
        "CREATE TABLE marks (id int)",
        "CREATE FUNCTION mark() RETURNS int LANGUAGE sql AS 'INSERT INTO marks VALUES (1) RETURNING id'",
        "CREATE FUNCTION only_looks() RETURNS int STABLE LANGUAGE plpgsql AS 'BEGIN RETURN mark(); END'",
    ] {
        assert!(setup.query(sql).await?.errors().is_empty(), "{sql}");
    }
    let leader = cluster.servers.leader().server.process_id().context("the leader runs")?;
    let is_logger = |process: &u32| {
        std::fs::read_to_string(format!("/proc/{process}/cmdline")).is_ok_and(|line| line.contains("logger"))
    };
    let logger = children_of(leader).into_iter().find(is_logger).context("somebody writes the log")?;
    let insert = "INSERT INTO marks VALUES (1)";
    let extended = [parse("", insert), bind("", "", &[]), execute("", 0), sync()].concat();
    for (begin, statement) in [
        ("BEGIN", query(insert)),
        ("BEGIN", extended),
        ("BEGIN", query("COPY marks FROM STDIN")),
        ("SELECT", query("SELECT mark()")),
        ("SELECT", query(&format!("{insert}; {insert}"))),
        ("SELECT", query("SELECT only_looks()")),
        // Before the COMMIT of what looks like reads the server is asked whether it has written.
        ("BEGIN; SELECT count(*) FROM marks", query("COMMIT")),
    ] {
        let what = format!("{begin}, {}", String::from_utf8_lossy(&statement));
        let mut wire = Wire::connect(&cluster).await?;
        for sql in [
            "SET log_statement = 'all'".to_owned(),
            // Long enough for what is to succeed on a busy machine.
            format!("SET statement_timeout = {}", STATEMENT_TIMEOUT.as_millis()),
            // Its back end has these from here on.
            "UPDATE marks SET id = id".to_owned(),
            begin.to_owned(),
        ] {
            assert!(wire.query(&sql).await?.errors().is_empty(), "{what}: {sql}");
        }
        let frozen = Frozen::of([logger]);
        let mut filler = direct(&cluster).await?;
        // So long that it fills the pipe by whole pages: nothing can be added to the last one.
        filler.send(&query("DO $$ BEGIN RAISE LOG '%', repeat('x', 1000000); END $$")).await?;
        try_until("the log is full", async || Ok(waiting_for_the_log(&cluster) == 1)).await?;
        wire.send(&statement).await?;
        try_until("the statement waits", async || Ok(waiting_for_the_log(&cluster) == 2)).await?;
        tokio::time::sleep(STATEMENT_TIMEOUT + Duration::from_millis(200)).await;
        drop(frozen);
        let answer = bounded(&what, wire.answer()).await??;
        // What was to be read at an epoch, and could not be, runs again elsewhere.
        let runs_again = what.contains("only_looks") && answer.tags() == "TDCZ";
        let due = if runs_again { ("TDCZ", "00000", 1) } else { ("EZ", "57014", 0) };
        wire.query("ROLLBACK").await?;
        wire.query("SET statement_timeout = 0").await?;
        filler.answer().await?;
        let rows = on_leader(&cluster, "SELECT count(*) FROM marks").await?.number()?;
        assert_eq!((answer.tags().as_str(), answer.code().as_str(), rows), due, "{what}: {answer:?}");
        assert_eq!(wire.query("SELECT mark()").await?.text_rows(), ["1"], "{what}: it goes on");
        setup.query("DELETE FROM marks").await?;
    }
    Ok(())
}

/// A SET that the router cannot keep is refused before it is in force, and its session goes on.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_setting_too_many_is_refused_and_changes_nothing() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    for before in ["SELECT 1", "CREATE TEMPORARY TABLE own (id int)"] {
        let mut wire = Wire::connect(&cluster).await?;
        wire.query(before).await?;
        let mut set = 0;
        let refusal = loop {
            let answer = wire.query(&format!("SET own.setting_{set} = 'a'")).await?;
            if answer.code() != "00000" {
                break answer;
            }
            set += 1;
        };
        assert!(set > 50, "{set}");
        assert_eq!((refusal.tags().as_str(), refusal.code().as_str()), ("EZ", "54000"), "{before}");
        let value = format!("SELECT current_setting('own.setting_{set}', true)");
        assert_eq!(wire.query(&value).await?.text_rows(), ["~"], "{before}: it is not set");
        wire.query("BEGIN; UPDATE numbers SET value = 1 WHERE id = 1").await?;
        let refusal = wire.query(&format!("SET own.setting_{set} = 'a'")).await?;
        assert_eq!((refusal.tags().as_str(), refusal.code().as_str()), ("EZ", "54000"), "{before}");
        wire.query("ROLLBACK").await?;
        assert_eq!(wire.query("SET own.setting_0 = 'b'; SHOW own.setting_0").await?.text_rows(), ["b"], "{before}");
    }
    Ok(())
}

/// A setting that was reset behind a savepoint is again what it was when that is taken back, wherever it is asked for.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_that_a_savepoint_takes_back_is_taken_back_everywhere() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut setup = Wire::connect(&cluster).await?;
    let tables = "CREATE TABLE place (name text); INSERT INTO place VALUES ('public'); CREATE SCHEMA tenant;
        CREATE TABLE tenant.place (name text); INSERT INTO tenant.place VALUES ('tenant')";
    assert!(setup.query(tables).await?.errors().is_empty());
    for (reset, taken_back, place) in [
        ("RESET search_path", "ROLLBACK TO s", "tenant"),
        ("RESET ALL", "ROLLBACK TO s", "tenant"),
        ("RESET search_path", "RELEASE s", "public"),
        ("RESET ALL", "RELEASE s", "public"),
    ] {
        let mut wire = Wire::connect(&cluster).await?;
        for sql in [
            "SET search_path = tenant",
            "BEGIN",
            "UPDATE public.numbers SET value = value WHERE id = 1",
            "SAVEPOINT s",
            reset,
            taken_back,
            "COMMIT",
        ] {
            assert_eq!(wire.query(sql).await?.code(), "00000", "{reset}, {taken_back}: {sql}");
        }
        for server in ["leader", "follower-1"] {
            wire.query(&format!("SET onecopy.server = '{server}'")).await?;
            let answer = wire.query("SELECT name FROM place").await?;
            assert_eq!(answer.text_rows(), [place], "{reset}, {taken_back}, {server}");
        }
    }
    Ok(())
}

/// A statement that has a name stays prepared when the same text, without one, was skipped behind an error.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_named_statement_outlives_the_same_text_that_was_skipped() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let text = "UPDATE numbers SET value = value WHERE id = 3";
    let kept = [bind("", "kept", &[]), execute("", 0), sync()].concat();
    wire.query("BEGIN").await?;
    assert_eq!(wire.ask(&[parse("kept", text), kept.clone()].concat()).await?.commands(), ["UPDATE 1"]);
    let fails = [run_extended("SELECT 1 / 0", &[]), run_extended(text, &[]), sync()].concat();
    assert_eq!(wire.ask(&fails).await?.code(), "22012");
    for begin in ["ROLLBACK", "BEGIN"] {
        wire.query(begin).await?;
        let answer = wire.ask(&kept).await?;
        assert_eq!(answer.commands(), ["UPDATE 1"], "{begin}: {:?}", answer.errors());
    }
    Ok(())
}

/// The same where the transaction has set it, so that the router has nothing more and nothing less than before; also
/// where it reads an epoch.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_setting_that_ends_as_it_was_is_read_back_too() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut setup = Wire::connect(&cluster).await?;
    let tables = "CREATE TABLE place (name text); INSERT INTO place VALUES ('public'); CREATE SCHEMA tenant;
        CREATE TABLE tenant.place (name text); INSERT INTO tenant.place VALUES ('tenant')";
    assert!(setup.query(tables).await?.errors().is_empty());
    for (begin, first) in [
        ("BEGIN READ ONLY", "SELECT count(*) FROM public.numbers"),
        ("BEGIN", "UPDATE public.numbers SET value = value WHERE id = 1"),
    ] {
        let mut wire = Wire::connect(&cluster).await?;
        for sql in
            [begin, first, "SET search_path = tenant", "SAVEPOINT s", "RESET search_path", "ROLLBACK TO s", "COMMIT"]
        {
            assert_eq!(wire.query(sql).await?.code(), "00000", "{begin}: {sql}");
        }
        assert_eq!(wire.query("SELECT name FROM place").await?.text_rows(), ["tenant"], "{begin}");
        wire.query("RESET ALL").await?;
        for again in ["SELECT", "BEGIN"] {
            wire.query(again).await?;
            assert_eq!(wire.query("SELECT name FROM place").await?.text_rows(), ["public"], "{begin}, {again}");
            wire.query("ROLLBACK").await?;
        }
    }
    Ok(())
}
