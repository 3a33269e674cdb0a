//! What users' functions and triggers hide: writes, settings, TRUNCATE, and a change of their own nature.

use onecopy_tests::cluster::TestCluster;

use crate::harness::{start_usual, wait_for_epoch_on, wait_for_whole_epoch};
use crate::wire::Wire;

/// A STABLE function whose write PostgreSQL does not see, because it is two calls away.
const HIDDEN_WRITE: &str = "CREATE TABLE log (a int);
    CREATE FUNCTION write() RETURNS int LANGUAGE plpgsql VOLATILE AS 'BEGIN INSERT INTO log VALUES (1); RETURN 1; END';
    CREATE FUNCTION looks_stable() RETURNS int LANGUAGE plpgsql STABLE AS 'BEGIN RETURN write(); END';";

const UPDATED_AT: &str = "CREATE TABLE stamped (id int PRIMARY KEY, value int NOT NULL, updated_at timestamptz);
    INSERT INTO stamped SELECT id, 0, NULL FROM generate_series(1, 30) id;
    CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.updated_at := now(); RETURN NEW; END';
    CREATE TRIGGER stamp BEFORE UPDATE ON stamped FOR EACH ROW EXECUTE FUNCTION stamp();";

async fn ok(wire: &mut Wire, sql: &str) -> anyhow::Result<Vec<String>> {
    let answer = wire.query(sql).await?;
    assert_eq!(answer.code(), "00000", "{sql}: {:?}", answer.errors());
    Ok(answer.text_rows())
}

fn reads_on(cluster: &TestCluster, name: &str) -> u64 {
    cluster.router().status().servers.iter().find(|server| server.name == name).map_or(0, |server| server.reads)
}

/// Spec: I2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_behind_a_stable_function_is_seen_by_the_sessions_next_read() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    ok(&mut wire, HIDDEN_WRITE).await?;
    wait_for_epoch_on(&cluster, 2).await?;
    ok(&mut wire, "SET onecopy.server = 'follower-1'").await?;
    for round in 0..20 {
        let count = format!("{}", 2 * round + 1);
        ok(&mut wire, "BEGIN").await?;
        ok(&mut wire, "SELECT looks_stable()").await?;
        ok(&mut wire, "COMMIT").await?;
        assert_eq!(ok(&mut wire, "SELECT count(*) FROM log").await?, [count], "round {round}");
        ok(&mut wire, "SELECT looks_stable()").await?;
        let count = format!("{}", 2 * round + 2);
        assert_eq!(ok(&mut wire, "SELECT count(*) FROM log").await?, [count], "round {round}, autocommit");
    }
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_a_function_changes_hold_for_the_sessions_later_reads() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    ok(
        &mut wire,
        "CREATE SCHEMA tenant;
         CREATE TABLE place (name text); INSERT INTO place VALUES ('public');
         CREATE TABLE tenant.place (name text); INSERT INTO tenant.place VALUES ('tenant');
         CREATE FUNCTION enter_tenant() RETURNS void LANGUAGE plpgsql AS $$ BEGIN
             PERFORM set_config('search_path', 'tenant, public', false);
             PERFORM set_config('shop.tenant', '42', false); END $$",
    )
    .await?;
    let look = "SELECT name, coalesce(current_setting('shop.tenant', true), '') FROM place";
    for enter in
        ["SELECT enter_tenant()", "BEGIN; SELECT enter_tenant(); COMMIT", "DO 'BEGIN PERFORM enter_tenant(); END'"]
    {
        let (mut one, mut other) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
        assert_eq!(ok(&mut one, look).await?, ["public|"], "{enter}");
        ok(&mut one, enter).await?;
        for round in 0..8 {
            assert_eq!(ok(&mut one, look).await?, ["tenant|42"], "{enter}, round {round}");
            assert_eq!(ok(&mut other, look).await?, ["public|"], "{enter}, round {round}");
            ok(&mut one, "BEGIN READ ONLY").await?;
            assert_eq!(ok(&mut one, look).await?, ["tenant|42"], "{enter}, READ ONLY");
            ok(&mut one, "COMMIT").await?;
            ok(&mut other, "UPDATE numbers SET value = value + 1 WHERE id = 1").await?;
        }
    }
    Ok(())
}

/// DDL runs event triggers, wherever it stands; what they leave in the session holds for its reads, and for no other's.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_an_event_trigger_changes_hold_for_the_session_and_for_no_other() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    ok(
        &mut wire,
        "CREATE SCHEMA tenant;
         CREATE TABLE place (name text); INSERT INTO place VALUES ('public');
         CREATE TABLE tenant.place (name text); INSERT INTO tenant.place VALUES ('tenant');
         CREATE FUNCTION make() RETURNS void LANGUAGE plpgsql AS 'BEGIN CREATE TABLE made (a int); END';
         CREATE FUNCTION enter_tenant() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
             PERFORM set_config('search_path', 'tenant, public', false); END $$",
    )
    .await?;
    ok(&mut wire, "CREATE EVENT TRIGGER enter_tenant ON ddl_command_end EXECUTE FUNCTION enter_tenant()").await?;
    // The first one at once: the catalog that is known has no event trigger.
    for define in [
        "CREATE TABLE plain (a int)",
        "BEGIN; COMMENT ON TABLE place IS 'a'; COMMIT",
        "ALTER TABLE place ADD b int",
        "SELECT name INTO copied FROM place",
        "SELECT make()",
        "DO 'BEGIN DROP TABLE made; END'",
    ] {
        let (mut one, mut other) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
        ok(&mut one, define).await?;
        for round in 0..8 {
            assert_eq!(ok(&mut one, "SELECT name FROM place").await?, ["tenant"], "{define}, round {round}");
            assert_eq!(ok(&mut other, "SELECT name FROM place").await?, ["public"], "{define}, round {round}");
            // An epoch with what was defined.
            ok(&mut other, "UPDATE numbers SET value = value + 1 WHERE id = 1").await?;
            wait_for_epoch_on(&cluster, 2).await?;
        }
    }
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trigger_that_stamps_rows_leaves_the_sessions_reads_on_followers() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    ok(&mut wire, UPDATED_AT).await?;
    let other = cluster.updater("other").await?;
    ok(&mut wire, "SET onecopy.server = 'follower-1'").await?;
    for update in
        ["UPDATE stamped SET value = value + 1 WHERE id = 1", "BEGIN; UPDATE stamped SET value = value + 1; COMMIT"]
    {
        for round in 0..5 {
            ok(&mut wire, update).await?;
            // Once there is an epoch with the update, only the session's own state could keep its read on the leader.
            wait_for_whole_epoch(&cluster, &other, "SELECT 1 FROM numbers", &["leader", "follower-1"]).await?;
            let before = reads_on(&cluster, "follower-1");
            let stamped = ok(&mut wire, "SELECT updated_at IS NOT NULL FROM stamped WHERE id = 1").await?;
            assert_eq!(stamped, ["t"], "{update}, round {round}");
            assert_eq!(reads_on(&cluster, "follower-1"), before + 1, "{update}, round {round}");
        }
    }
    assert_eq!(ok(&mut wire, "SHOW onecopy.server").await?, ["follower-1"]);
    assert_eq!(wire.query("RESET onecopy.server").await?.commands(), ["RESET"]);
    Ok(())
}

/// After ddl every session classifies statements by the new catalog.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_ddl_every_session_judges_statements_by_the_new_catalog() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let (mut one, mut other) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    ok(&mut one, "CREATE TABLE log (a int)").await?;
    let mut written = 0;
    for round in 0..5 {
        ok(&mut one, "CREATE OR REPLACE FUNCTION changing() RETURNS int LANGUAGE sql STABLE AS 'SELECT 1'").await?;
        for wire in [&mut one, &mut other] {
            assert_eq!(ok(wire, "SELECT changing()").await?, ["1"], "round {round}");
        }
        let retries = cluster.router().status().read_retries;
        let writes = "CREATE OR REPLACE FUNCTION changing() RETURNS int LANGUAGE sql VOLATILE AS \
             'INSERT INTO log VALUES (1) RETURNING 2'";
        if round % 2 == 0 {
            ok(&mut one, writes).await?;
        } else {
            ok(&mut one, "BEGIN").await?;
            ok(&mut one, writes).await?;
            ok(&mut one, "COMMIT").await?;
        }
        for wire in [&mut one, &mut other] {
            assert_eq!(ok(wire, "SELECT changing()").await?, ["2"], "round {round}");
            written += 1;
            assert_eq!(ok(wire, "SELECT count(*) FROM log").await?, [written.to_string()], "round {round}");
        }
        // Nobody had to be told by a server that it was no read.
        assert_eq!(cluster.router().status().read_retries, retries, "round {round}");
    }
    Ok(())
}

/// A function of users may define others, in a transaction or by itself.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_function_defines_is_known_to_every_session() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut one = Wire::connect(&cluster).await?;
    ok(
        &mut one,
        "CREATE SCHEMA tenant;
         CREATE TABLE place (name text); INSERT INTO place VALUES ('public');
         CREATE TABLE tenant.place (name text); INSERT INTO tenant.place VALUES ('tenant');
         CREATE FUNCTION hidden() RETURNS text LANGUAGE sql STABLE AS $$ SELECT 'nothing' $$;
         CREATE FUNCTION define(body text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN EXECUTE format(
             'CREATE OR REPLACE FUNCTION hidden() RETURNS text LANGUAGE sql STABLE AS %L', body); END $$",
    )
    .await?;
    let define = |body: &str| format!("define('SELECT {body}')");
    let enters = define("set_config(''search_path'', ''tenant, public'', false)");
    for round in 0..6 {
        let mut other = Wire::connect(&cluster).await?;
        assert_eq!(ok(&mut other, "SELECT hidden()").await?, ["nothing"], "round {round}");
        let retries = cluster.router().status().read_retries;
        let enter = match round % 3 {
            0 => format!("SELECT {enters}"),
            1 => format!("BEGIN; SELECT {enters}; COMMIT"),
            _ => format!("DO $$ BEGIN PERFORM {enters}; END $$"),
        };
        ok(&mut one, &enter).await?;
        assert_eq!(ok(&mut other, "SELECT hidden()").await?, ["tenant, public"], "{enter}");
        for _ in 0..4 {
            assert_eq!(ok(&mut other, "SELECT name FROM place").await?, ["tenant"], "{enter}");
        }
        // Nobody had to be told by a server that it was no read.
        assert_eq!(cluster.router().status().read_retries, retries, "{enter}");
        ok(&mut one, &format!("SELECT {}", define("''nothing''"))).await?;
    }
    Ok(())
}

/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncate_in_a_deferred_trigger_ends_older_epochs() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut writer = Wire::connect(&cluster).await?;
    ok(
        &mut writer,
        "CREATE TABLE filled (a int); CREATE TABLE cause (a int);
         CREATE FUNCTION empty() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN TRUNCATE filled; RETURN NULL; END';
         CREATE CONSTRAINT TRIGGER empty AFTER INSERT ON cause DEFERRABLE INITIALLY DEFERRED
             FOR EACH ROW EXECUTE FUNCTION empty();",
    )
    .await?;
    for server in ["leader", "follower-1"] {
        for insert in ["INSERT INTO cause VALUES (1)", "BEGIN; INSERT INTO cause VALUES (1); COMMIT"] {
            let what = format!("{server}: {insert}");
            ok(&mut writer, "INSERT INTO filled SELECT 1 FROM generate_series(1, 10)").await?;
            wait_for_epoch_on(&cluster, 2).await?;
            let mut reader = Wire::connect(&cluster).await?;
            ok(&mut reader, &format!("SET onecopy.server = '{server}'; SET onecopy.freshness = 'strict'")).await?;
            ok(&mut reader, "BEGIN READ ONLY").await?;
            ok(&mut reader, "SELECT count(*) FROM numbers").await?;
            ok(&mut writer, insert).await?;
            let answer = reader.query("SELECT count(*) FROM filled").await?;
            assert_eq!(answer.code(), "40001", "{what}: {:?}", answer.text_rows());
            reader.query("ROLLBACK").await?;
            assert_eq!(ok(&mut reader, "SELECT count(*) FROM filled").await?, ["0"], "{what}");
        }
    }
    Ok(())
}
