//! Nothing that a client says takes an update out of SERIALIZABLE.

use crate::harness::start_usual;
use crate::wire::Wire;

/// The level under which the server itself runs the statement; SHOW is answered by the router.
const LEVEL: &str =
    "UPDATE numbers SET value = value + 1 WHERE id = 1 RETURNING current_setting('transaction_isolation')";

/// Spec: I1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_inside_a_transaction_lowers_its_level() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    // After a query nothing can be changed, as on one server: what changes nothing is granted, all else refused.
    for (lower, code) in [
        ("RESET transaction_isolation", "00000"),
        ("SET transaction_isolation TO DEFAULT", "00000"),
        ("SET LOCAL transaction_isolation TO DEFAULT", "00000"),
        ("RESET ALL", "00000"),
        ("SET transaction_isolation = 'read committed'", "25001"),
        ("SET TRANSACTION ISOLATION LEVEL READ COMMITTED", "25001"),
        ("SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE", "25001"),
        ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ WRITE", "25001"),
        ("SELECT set_config('transaction_isolation', 'read committed', false)", "25001"),
        ("SELECT set_config('transaction_isolation', 'read committed', true)", "25001"),
        ("UPDATE pg_settings SET setting = 'read committed' WHERE name = 'transaction_isolation'", "25001"),
        ("DO $$ BEGIN SET TRANSACTION ISOLATION LEVEL READ COMMITTED; END $$", "25001"),
    ] {
        for first in ["SELECT", "SELECT count(*) FROM numbers", LEVEL] {
            let what = format!("{first}; {lower}");
            wire.query("BEGIN").await?;
            assert_eq!(wire.query(first).await?.code(), "00000", "{what}");
            let answer = wire.query(lower).await?;
            assert_eq!(answer.code(), code, "{what}: {:?}", answer.errors());
            if code == "00000" {
                let answer = wire.query(LEVEL).await?;
                assert_eq!(answer.text_rows(), ["serializable"], "{what}: {:?}", answer.errors());
            }
            wire.query("ROLLBACK").await?;
        }
    }
    // Before any query a client may ask for what it likes; it gets more.
    for lower in [
        "SET transaction_isolation = 'read committed'",
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ WRITE",
    ] {
        wire.query("BEGIN").await?;
        assert_eq!(wire.query(lower).await?.code(), "00000", "{lower}");
        let answer = wire.query(LEVEL).await?;
        assert_eq!(answer.text_rows(), ["serializable"], "{lower}: {:?}", answer.errors());
        wire.query("ROLLBACK").await?;
    }
    assert_eq!(wire.query("SELECT value FROM numbers WHERE id = 1").await?.text_rows(), ["0"]);
    Ok(())
}

/// Spec: I1
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
        // Granted as on one server, and of no effect.
        assert_eq!(wire.query(lower).await?.code(), "00000", "{lower}");
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
///
/// Spec: I1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_transaction_inside_do_or_call_runs_at_a_lower_level() -> anyhow::Result<()> {
    const NOTE: &str = "INSERT INTO levels VALUES (current_setting('transaction_isolation'))";
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    assert_eq!(wire.query("CREATE TABLE levels (level text)").await?.code(), "00000");
    for (between, code, notes) in [
        // What chooses no level is granted, and each of its transactions is serializable.
        ("", "00000", 2),
        ("COMMIT;", "00000", 2),
        ("ROLLBACK;", "00000", 1),
        ("COMMIT; SET LOCAL work_mem = '5MB';", "00000", 2),
        // What may choose one could not be judged by its words: it must not commit by itself, and none of it stays.
        ("COMMIT; SET TRANSACTION ISOLATION LEVEL READ COMMITTED;", "2D000", 0),
        ("COMMIT; SET LOCAL transaction_isolation = 'repeatable read';", "2D000", 0),
        ("PERFORM set_config('default_transaction_isolation', 'read committed', false); COMMIT;", "2D000", 0),
        ("COMMIT; EXECUTE 'SET TRANSACTION ISOLATION LEVEL READ COMMITTED';", "2D000", 0),
        ("COMMIT; RESET ALL;", "2D000", 0),
    ] {
        let body = format!("BEGIN {NOTE}; {between} {NOTE}; END");
        let procedure = format!("CREATE OR REPLACE PROCEDURE lower_level() LANGUAGE plpgsql AS $$ {body} $$");
        assert_eq!(wire.query(&procedure).await?.code(), "00000");
        for sql in [format!("DO $$ {body} $$"), "CALL lower_level()".to_owned()] {
            assert_eq!(wire.query("DELETE FROM levels").await?.code(), "00000", "{between}: {sql}");
            let answer = wire.query(&sql).await?;
            assert_eq!(answer.code(), code, "{between}: {sql}: {:?}", answer.errors());
            let levels = wire.query("SELECT level FROM levels").await?.text_rows();
            assert_eq!(levels, vec!["serializable"; notes], "{between}: {sql}");
        }
    }
    Ok(())
}

/// What a log-in has asked for is shown, also of the router's own settings, and RESET leads back to it.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_level_that_a_log_in_asked_for_is_shown_and_no_other_is_had() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let router = cluster.router().local_address().port();
    let options = r"-c default_transaction_isolation=repeatable\ read";
    for port in [router, cluster.servers.leader().port()] {
        let mut wire = Wire::connect_with(port, &[("options", options)]).await?;
        for back in ["RESET default_transaction_isolation", "RESET ALL", "DISCARD ALL"] {
            let shown = wire.query("SHOW default_transaction_isolation").await?.text_rows();
            assert_eq!(shown, ["repeatable read"], "{port}");
            wire.query("SET default_transaction_isolation = 'read committed'").await?;
            let shown = wire.query("SHOW default_transaction_isolation").await?.text_rows();
            assert_eq!(shown, ["read committed"], "{port}");
            assert_eq!(wire.query(back).await?.code(), "00000", "{port}: {back}");
            let shown = wire.query("SHOW default_transaction_isolation").await?.text_rows();
            assert_eq!(shown, ["repeatable read"], "{port}: {back}");
        }
        let name = "default_transaction_isolation";
        let (local, set) = (format!("SET LOCAL {name} = 'serializable'"), format!("SET {name} = 'read uncommitted'"));
        let characteristics = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ UNCOMMITTED";
        // What is set in a transaction, and the level that is shown in it and behind it.
        for (changes, inside, behind) in [
            ([local.as_str(), "SELECT 1"], "serializable", "read committed"),
            ([&local, "SET LOCAL default_transaction_isolation TO DEFAULT"], "repeatable read", "read committed"),
            ([&local, &set], "read uncommitted", "read uncommitted"),
            ([&set, &local], "serializable", "read uncommitted"),
            ([&local, characteristics], "read uncommitted", "read uncommitted"),
            ([&local, "RESET ALL"], "repeatable read", "repeatable read"),
        ] {
            for end in ["COMMIT", "ROLLBACK"] {
                wire.query(&format!("SET {name} = 'read committed'")).await?;
                for statement in ["BEGIN", changes[0], changes[1]] {
                    assert_eq!(wire.query(statement).await?.code(), "00000", "{port}: {statement}");
                }
                let shown = wire.query("SHOW default_transaction_isolation").await?.text_rows();
                assert_eq!(shown, [inside], "{port}: {changes:?}");
                assert_eq!(wire.query(end).await?.code(), "00000");
                let shown = wire.query("SHOW default_transaction_isolation").await?.text_rows();
                let behind = if end == "COMMIT" { behind } else { "read committed" };
                assert_eq!(shown, [behind], "{port}: {changes:?} {end}");
            }
        }
        let wrong = [("options", "-c default_transaction_isolation=none")];
        let refused = Wire::connect_with(port, &wrong).await.map(drop).expect_err("refused").to_string();
        assert!(refused.contains("22023"), "{port}: {refused}");
    }
    let options = r"-c default_transaction_isolation=read\ committed
        -c onecopy.freshness=strict -c onecopy.server=leader";
    let mut wire = Wire::connect_with(router, &[("options", options)]).await?;
    assert_eq!(wire.query(LEVEL).await?.text_rows(), ["serializable"]);
    for back in ["RESET ALL", "RESET onecopy.freshness; RESET onecopy.server", "DISCARD ALL"] {
        wire.query("SET onecopy.freshness = 'session'; SET onecopy.server = ''").await?;
        assert_eq!(wire.query("SHOW onecopy.server").await?.text_rows(), [""], "{back}");
        assert_eq!(wire.query(back).await?.code(), "00000", "{back}");
        assert_eq!(wire.query("SHOW onecopy.freshness").await?.text_rows(), ["strict"], "{back}");
        assert_eq!(wire.query("SHOW onecopy.server").await?.text_rows(), ["leader"], "{back}");
    }
    Ok(())
}
