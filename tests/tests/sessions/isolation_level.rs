//! Nothing that a client says takes an update out of SERIALIZABLE.

use crate::laboratory::start_usual;
use crate::wire::Wire;

/// The level under which the server itself runs the statement; SHOW is answered by the router.
const LEVEL: &str =
    "UPDATE numbers SET value = value + 1 WHERE id = 1 RETURNING current_setting('transaction_isolation')";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_inside_a_transaction_lowers_its_level() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for lower in [
        "RESET transaction_isolation",
        "SET transaction_isolation TO DEFAULT",
        "SET LOCAL transaction_isolation TO DEFAULT",
        "SET transaction_isolation = 'read committed'",
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE",
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ WRITE",
        "RESET ALL",
        "SELECT set_config('transaction_isolation', 'read committed', false)",
        "SELECT set_config('transaction_isolation', 'read committed', true)",
        "UPDATE pg_settings SET setting = 'read committed' WHERE name = 'transaction_isolation'",
        "DO $$ BEGIN SET TRANSACTION ISOLATION LEVEL READ COMMITTED; END $$",
    ] {
        for first in ["SELECT", "SELECT count(*) FROM numbers", LEVEL] {
            let what = format!("{first}; {lower}");
            wire.query("BEGIN").await?;
            assert_eq!(wire.query(first).await?.code(), "00000", "{what}");
            if wire.query(lower).await?.status()? == 'T' {
                let answer = wire.query(LEVEL).await?;
                assert_eq!(answer.text_rows(), ["serializable"], "{what}: {:?}", answer.errors());
            }
            wire.query("ROLLBACK").await?;
        }
    }
    assert_eq!(wire.query("SELECT value FROM numbers WHERE id = 1").await?.text_rows(), ["0"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_change_of_the_default_level_reaches_autocommit_updates() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let function = "CREATE FUNCTION lower_level() RETURNS void LANGUAGE plpgsql AS $$
         BEGIN PERFORM set_config('default_transaction_isolation', 'read committed', false); END $$";
    assert_eq!(Wire::connect(&cluster).await?.query(function).await?.code(), "00000");
    for lower in [
        "SET default_transaction_isolation = 'read committed'",
        "RESET default_transaction_isolation",
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "SELECT set_config('default_transaction_isolation', 'read committed', false)",
        "DO $$ BEGIN PERFORM set_config('default_transaction_isolation', 'read committed', false); END $$",
        "DO $$ BEGIN EXECUTE 'SET default_transaction_isolation = ''read committed'''; END $$",
        "SELECT lower_level()",
        "BEGIN; SELECT lower_level(); COMMIT",
        "UPDATE pg_settings SET setting = 'read committed' WHERE name = 'default_transaction_isolation'",
        "RESET ALL",
        "DISCARD ALL",
    ] {
        let mut wire = Wire::connect(&cluster).await?;
        let _ = wire.query(lower).await?;
        for round in 0..3 {
            let answer = wire.query(LEVEL).await?;
            assert_eq!(answer.text_rows(), ["serializable"], "{lower}, round {round}: {:?}", answer.errors());
        }
        wire.query("BEGIN").await?;
        assert_eq!(wire.query(LEVEL).await?.text_rows(), ["serializable"], "{lower}, in a transaction");
        wire.query("COMMIT").await?;
        // Whoever gets this back end next is no worse off.
        drop(wire);
        assert_eq!(Wire::connect(&cluster).await?.query(LEVEL).await?.text_rows(), ["serializable"], "after {lower}");
    }
    Ok(())
}

/// DO and CALL may commit and begin again by themselves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_transaction_inside_do_or_call_runs_at_a_lower_level() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    assert_eq!(wire.query("CREATE TABLE levels (level text)").await?.code(), "00000");
    for lower in [
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "SET LOCAL transaction_isolation = 'repeatable read'",
        "PERFORM set_config('default_transaction_isolation', 'read committed', false); COMMIT",
    ] {
        let body =
            format!("BEGIN COMMIT; {lower}; INSERT INTO levels VALUES (current_setting('transaction_isolation')); END");
        let procedure = format!("CREATE OR REPLACE PROCEDURE lower_level() LANGUAGE plpgsql AS $$ {body} $$");
        assert_eq!(wire.query(&procedure).await?.code(), "00000");
        for sql in [format!("DO $$ {body} $$"), "CALL lower_level()".to_owned()] {
            // What is refused is as good as what runs SERIALIZABLE.
            let code = wire.query(&sql).await?.code();
            let levels = wire.query("SELECT DISTINCT level FROM levels WHERE level <> 'serializable'").await?;
            assert_eq!(levels.text_rows(), Vec::<String>::new(), "{sql}: {code}");
        }
    }
    Ok(())
}
