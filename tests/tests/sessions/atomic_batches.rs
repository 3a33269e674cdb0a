//! What a client sends before one Sync is one transaction, whoever of server and router finds the error in it.

use crate::harness::{on_leader, start_usual};
use crate::wire::{Wire, bind, describe, execute, parse, run_extended, sync};

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
        assert!(["23505", "25001"].contains(&answer.code().as_str()), "{middle}: {:?}", answer.errors());
        assert_eq!(on_leader(&cluster, "SELECT count(*) FROM numbers").await?.number()?, 10, "{middle}");
    }
    Ok(())
}
