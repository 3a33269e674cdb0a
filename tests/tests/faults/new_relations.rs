//! Relations that come, and whom they concern.

use crate::harness::{code, run, start_usual};

/// What an application does all day: its own temporary tables, and relations that nobody knows yet.
const EVERYDAY: &[&str] = &[
    "CREATE TEMP TABLE own (a int)",
    "TRUNCATE own",
    "ALTER TABLE own ADD b int",
    "CREATE INDEX ON pg_temp.own (a)",
    "BEGIN; DROP TABLE own; CREATE TEMP TABLE own ON COMMIT DROP AS SELECT 1 AS a; INSERT INTO own VALUES (2); COMMIT",
    "CREATE TEMP TABLE own AS SELECT id FROM numbers",
    "DROP TABLE pg_temp.own",
    "SELECT makes_and_drops()",
    "CREATE TABLE fresh AS SELECT 1 AS a FROM generate_series(1, 10)",
    "CREATE TABLE keyed (id int PRIMARY KEY)",
    "CREATE TABLE of_keyed (id int REFERENCES keyed)",
    "BEGIN; CREATE TABLE more (a int); CREATE INDEX ON more (a); ALTER TABLE more ADD b int; \
     INSERT INTO more VALUES (1); COMMIT",
    "CREATE VIEW fresh_view AS SELECT * FROM fresh",
    "CREATE SEQUENCE fresh_sequence",
];

/// Transactions that were open before go on, at epochs on every server and on the leader, whatever others do with
/// temporary tables and new relations. Only who names a relation that is newer than what he reads is refused: he would
/// find it empty.
///
/// Temporary tables and new relations end nobody's transaction; only who names a relation that is newer than his
/// snapshot is refused; a new relation that hides an older one of its name ends older epochs.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f80_temporary_tables_and_new_relations_end_nobodys_transaction() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let maker = cluster.updater("maker").await?;
    maker
        .run(
            "CREATE FUNCTION makes_and_drops() RETURNS void LANGUAGE plpgsql AS $$BEGIN
             CREATE TEMP TABLE scratch AS SELECT 1 AS a; DROP TABLE scratch; END$$",
        )
        .await?;
    let mut readers = Vec::new();
    for server in ["leader", "follower-1"] {
        let reader = cluster.reader("reader", server).await?;
        cluster.read_until_at_epoch(&reader, "SELECT count(*) FROM numbers").await?;
        reader.run("BEGIN READ ONLY").await?;
        assert_eq!(run(&reader, "SELECT count(*) FROM numbers").await??.number()?, 10, "{server}");
        readers.push(reader);
    }
    let updater = cluster.updater("updater").await?;
    updater.run("BEGIN").await?;
    run(&updater, "UPDATE numbers SET value = value + 1 WHERE id = 1").await??;
    for sql in EVERYDAY {
        run(&maker, sql).await??;
        for reader in &readers {
            let answer = run(reader, "SELECT count(*) FROM numbers").await?;
            assert_eq!(answer.map_err(|error| anyhow::anyhow!("after {sql}: {error}"))?.number()?, 10);
        }
        run(&updater, "UPDATE numbers SET value = value + 1 WHERE id = 1").await??;
    }
    run(&updater, "COMMIT").await??;
    // Each of those would find the new table empty.
    let late = cluster.updater("late").await?;
    late.run("BEGIN").await?;
    run(&late, "UPDATE numbers SET value = value + 1 WHERE id = 2").await??;
    run(&maker, "CREATE TABLE latest AS SELECT 1 AS a FROM generate_series(1, 10)").await??;
    readers.push(late);
    // It has reached the follower.
    let follower = cluster.reader("follower", "follower-1").await?;
    cluster.read_until_at_epoch(&follower, "SELECT count(*) FROM latest").await?;
    for reader in &readers {
        let seen = run(reader, "SELECT count(*) FROM latest").await?;
        assert_eq!(code(&seen), "40001", "{seen:?}");
        run(reader, "ROLLBACK").await??;
        assert_eq!(run(reader, "SELECT count(*) FROM latest").await??.number()?, 10);
    }
    let value = "SELECT value FROM numbers WHERE id = 1";
    assert_eq!(run(&maker, value).await??.number()?, i64::try_from(EVERYDAY.len())? + 1);
    Ok(())
}

/// Relations that only look new: what hides another one of its name dooms epochs as before.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f80_a_new_relation_that_hides_an_older_one_ends_older_epochs() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let writer = cluster.updater("writer").await?;
    writer.run("CREATE TABLE filled AS SELECT 1 AS a FROM generate_series(1, 10)").await?;
    writer.run("CREATE SCHEMA nearer").await?;
    for server in ["leader", "follower-1"] {
        writer.run("DROP TABLE IF EXISTS nearer.filled").await?;
        let reader = cluster.reader("reader", server).await?;
        reader.run("SET search_path = nearer, public").await?;
        cluster.read_until_at_epoch(&reader, "SELECT count(*) FROM filled").await?;
        reader.run("BEGIN READ ONLY").await?;
        run(&reader, "SELECT count(*) FROM numbers").await??;
        run(&writer, "CREATE TABLE nearer.filled AS SELECT 1 AS a FROM generate_series(1, 20)").await??;
        let seen = run(&reader, "SELECT count(*) FROM filled").await?;
        assert_eq!(code(&seen), "40001", "{server}: {seen:?}");
        run(&reader, "ROLLBACK").await??;
        assert_eq!(run(&reader, "SELECT count(*) FROM filled").await??.number()?, 20, "{server}");
    }
    Ok(())
}
