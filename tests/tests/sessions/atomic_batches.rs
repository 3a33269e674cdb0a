//! What a client sends before one Sync is one transaction, whoever of server and router finds the error in it.

use crate::harness::{on_leader, start_usual};
use crate::wire::{Wire, bind, describe, execute, flush, parse, run_extended, sync};

const INSERT: &str = "INSERT INTO numbers VALUES (100, 1)";

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_of_the_routers_own_takes_the_whole_batch_back() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.ask(&[parse("taken", "SELECT 1"), sync()].concat()).await?;
    let cases = [
        ("an unknown statement is bound", bind("", "missing", &[]), "26000"),
        ("an unknown statement is described", describe('S', "missing"), "26000"),
        ("an unknown portal is executed", execute("missing", 0), "34000"),
        ("an unknown portal is described", describe('P', "missing"), "34000"),
        ("a name is taken", parse("taken", "SELECT 2"), "42P05"),
        ("two commands are parsed", parse("two", "SELECT 1; SELECT 2"), "42601"),
        ("a syntax error is parsed", parse("wrong", "SELEC 1"), "42601"),
    ];
    for (what, bytes, code) in cases {
        for middle in
            [Vec::new(), run_extended("SELECT count(*) FROM numbers", &[]), run_extended("SHOW work_mem", &[])]
        {
            let batch =
                [run_extended(INSERT, &[]), middle, bytes.clone(), run_extended("SELECT 1", &[]), sync()].concat();
            let answer = wire.ask(&batch).await?;
            assert_eq!((answer.code().as_str(), answer.status()?), (code, 'I'), "{what}");
            assert!(answer.tags().ends_with("EZ"), "{what}: {}", answer.tags());
            assert_eq!(on_leader(&cluster, "SELECT count(*) FROM numbers").await?.number()?, 10, "{what}");
        }
    }
    assert_eq!(wire.ask(&[run_extended(INSERT, &[]), sync()].concat()).await?.commands(), ["INSERT 0 1"]);
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_router_answers_in_a_batch_does_not_cut_it_in_two() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for middle in [
        "SET work_mem = '5MB'",
        "SET onecopy.freshness = 'strict'",
        "SET default_transaction_isolation = 'read committed'",
        "SET LOCAL work_mem = '5MB'",
        "RESET work_mem",
        "SHOW work_mem",
        "SHOW transaction_isolation",
        "SHOW onecopy.freshness",
        "DEALLOCATE ALL",
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
    ] {
        let duplicate = run_extended("INSERT INTO numbers VALUES (1, 1)", &[]);
        let batch = [run_extended(INSERT, &[]), run_extended(middle, &[]), duplicate, sync()].concat();
        let answer = wire.ask(&batch).await?;
        assert_eq!(answer.status()?, 'I', "{middle}");
        // A plain server refuses SET TRANSACTION after the first statement.
        let code = if middle.starts_with("SET TRANSACTION") { "25001" } else { "23505" };
        assert_eq!(answer.code(), code, "{middle}: {:?}", answer.errors());
        assert_eq!(on_leader(&cluster, "SELECT count(*) FROM numbers").await?.number()?, 10, "{middle}");
    }
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_of_code_in_a_batch_is_taken_back_with_it() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let block = "DO $$BEGIN INSERT INTO numbers VALUES (101, 1); END$$";
    for statements in [[INSERT, block, "SELECT 1 / 0"], [block, INSERT, "SELECT 1 / 0"]] {
        let batch = statements.map(|statement| run_extended(statement, &[])).concat();
        let answer = wire.ask(&[batch, sync()].concat()).await?;
        assert_eq!((answer.code().as_str(), answer.status()?), ("22012", 'I'), "{statements:?}");
        assert_eq!(on_leader(&cluster, "SELECT count(*) FROM numbers").await?.number()?, 10, "{statements:?}");
    }
    // Also where the batch comes in parts, or the router itself answers something in it.
    for between in [flush(), run_extended("SET work_mem = '5MB'", &[])] {
        let first = [run_extended(block, &[]), run_extended(INSERT, &[]), between].concat();
        let answer = wire.ask(&[first, run_extended("SELECT 1 / 0", &[]), sync()].concat()).await?;
        assert_eq!((answer.code().as_str(), answer.status()?), ("22012", 'I'));
        assert_eq!(on_leader(&cluster, "SELECT count(*) FROM numbers").await?.number()?, 10);
    }
    let answer = wire.ask(&[run_extended(INSERT, &[]), run_extended(block, &[]), sync()].concat()).await?;
    assert_eq!(answer.commands(), ["INSERT 0 1", "DO"]);
    assert_eq!(on_leader(&cluster, "SELECT count(*) FROM numbers").await?.number()?, 12);
    Ok(())
}

/// What begins a batch and is about its transaction holds until its Sync, as on one server, which warns all the same.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_set_for_the_transaction_first_in_a_batch_holds_in_it() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let ask = "SELECT current_setting('app.tenant', true)";
    let answer =
        wire.ask(&[run_extended("SET LOCAL app.tenant = '7'", &[]), run_extended(ask, &[]), sync()].concat()).await?;
    assert_eq!((answer.text_rows(), answer.status()?), (vec!["7".to_owned()], 'I'));
    assert!(answer.fields(b'N')?.contains(&('C', "25P01".to_owned())));
    assert_eq!(wire.ask(&[run_extended(ask, &[]), sync()].concat()).await?.text_rows(), [""]);
    let role = [run_extended("SET LOCAL ROLE pg_monitor", &[]), run_extended("SELECT current_user", &[]), sync()];
    assert_eq!(wire.ask(&role.concat()).await?.text_rows(), ["pg_monitor"]);
    assert_ne!(wire.query("SELECT current_user").await?.text_rows(), ["pg_monitor"]);
    let read_only = [run_extended("SET TRANSACTION READ ONLY", &[]), run_extended(INSERT, &[]), sync()].concat();
    assert_eq!(wire.ask(&read_only).await?.code(), "25006");
    assert_eq!(on_leader(&cluster, "SELECT count(*) FROM numbers").await?.number()?, 10);
    Ok(())
}

/// VACUUM commits by itself; what follows in its batch is another transaction, which the session's next read shows.
///
/// Spec: I1, I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_follows_a_command_that_stands_alone_commits_in_the_barrier() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for number in 100..150 {
        let insert = format!("INSERT INTO numbers VALUES ({number}, 1)");
        let batch = [run_extended("VACUUM numbers", &[]), run_extended(&insert, &[]), sync()].concat();
        assert_eq!(wire.ask(&batch).await?.commands(), ["VACUUM", "INSERT 0 1"]);
        let seen = wire.query(&format!("SELECT count(*) FROM numbers WHERE id = {number}")).await?;
        assert_eq!(seen.text_rows(), ["1"], "{number}");
    }
    Ok(())
}

/// In a transaction that reads an epoch nobody is told, locked out or signalled by what only another server does.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_acts_on_the_server_is_refused_at_an_epoch_and_runs_on_the_leader_otherwise() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for statement in ["NOTIFY told", "SELECT pg_notify('told', '')", "SELECT pg_advisory_xact_lock(42)"] {
        wire.query("BEGIN READ ONLY").await?;
        wire.query("SELECT count(*) FROM numbers").await?;
        assert_eq!(wire.query(statement).await?.code(), "25006", "{statement}");
        wire.query("ROLLBACK").await?;
        wire.query("BEGIN READ ONLY").await?;
        assert_eq!(wire.query(statement).await?.code(), "00000", "{statement}");
        if statement.contains("lock") {
            let others = on_leader(&cluster, "SELECT pg_try_advisory_xact_lock(42)::int").await?;
            assert_eq!(others.number()?, 0, "it is held on the leader");
        }
        wire.query("COMMIT").await?;
    }
    Ok(())
}

/// Settings that are not like others: one whose value cannot be read back, and a search path by which tables are
/// temporary.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_and_a_temporary_search_path_are_their_back_ends() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let mut drawn = Vec::new();
    for _ in 0..2 {
        assert_eq!(wire.query("SET seed = 0.5").await?.commands(), ["SET"]);
        drawn.push(wire.query("SELECT random()").await?.text_rows());
    }
    assert_eq!(drawn[0], drawn[1]);
    assert_eq!(wire.query("RESET ALL").await?.code(), "00000");
    wire.query("SET search_path = pg_temp, public").await?;
    wire.query("CREATE TABLE numbers AS SELECT 1 AS id").await?;
    assert_eq!(wire.query("SELECT count(*) FROM numbers").await?.text_rows(), ["1"]);
    Ok(())
}
