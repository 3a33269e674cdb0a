//! DDL while others read: no reader ever sees what no serial order explains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use onecopy_tests::client::Session;

use crate::harness::{bounded, code, on_leader, run, start_usual, try_until};
use crate::wire::Wire;

/// TRUNCATE is not MVCC: at an older epoch the table would look empty.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_reader_never_sees_a_truncated_table_empty() -> anyhow::Result<()> {
    let cluster = start_usual(2).await?;
    for server in ["leader", "follower-1", "follower-2"] {
        for truncate in ["TRUNCATE filled", "BEGIN; TRUNCATE filled; COMMIT", "DO 'BEGIN TRUNCATE filled; END'"] {
            let what = format!("{server}: {truncate}");
            let writer = cluster.updater("writer").await?;
            writer.run("DROP TABLE IF EXISTS filled").await?;
            writer.run("CREATE TABLE filled AS SELECT 1 AS a FROM generate_series(1, 10)").await?;
            let reader = cluster.reader("reader", server).await?;
            run(&reader, "SELECT count(*) FROM filled").await??;
            reader.run("BEGIN READ ONLY").await?;
            assert_eq!(run(&reader, "SELECT count(*) FROM numbers").await??.number()?, 10, "{what}");
            bounded(&what, writer.run(truncate)).await??;
            let error = run(&reader, "SELECT count(*) FROM filled").await?.expect_err("a doomed epoch");
            assert_eq!(error.code, "40001", "{what}: {error}");
            reader.run("ROLLBACK").await?;
            assert_eq!(run(&reader, "SELECT count(*) FROM filled").await??.number()?, 0, "{what}");
        }
    }
    Ok(())
}

/// On the leader a statement has its snapshot before it waits for TRUNCATE's lock: what it then sees is no serial
/// order.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_waited_for_truncate_never_sees_the_table_empty() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let writer = cluster.updater("writer").await?;
    writer.run("CREATE TABLE filled AS SELECT 1 AS a FROM generate_series(1, 10)").await?;
    writer.run("CREATE TABLE copied (a int)").await?;
    let (read, copy) = ("SELECT count(*) FROM filled", "INSERT INTO copied SELECT a FROM filled");
    for (begin, sql) in
        [("SELECT", read), ("BEGIN READ ONLY", read), ("BEGIN", read), ("SELECT", copy), ("BEGIN", copy)]
    {
        let what = format!("{begin}; {sql}");
        let session = cluster.updater("session").await?;
        run(&session, begin).await??;
        if begin == "BEGIN" {
            run(&session, "UPDATE numbers SET value = value WHERE id = 1").await??;
        }
        run(&writer, "DELETE FROM copied").await??;
        run(&writer, "BEGIN").await??;
        run(&writer, "TRUNCATE filled").await??;
        run(&writer, "INSERT INTO filled SELECT 1 FROM generate_series(1, 10)").await??;
        let waiting = session.start(sql);
        try_until("it waits for the lock", || async {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
            Ok(on_leader(&cluster, sql).await?.number()? == 1)
        })
        .await?;
        run(&writer, "COMMIT").await??;
        let answered = bounded(&what, waiting).await??;
        match &answered {
            Ok(answer) if sql == read => assert_eq!(answer.number()?, 10, "{what}"),
            Ok(answer) => assert_eq!(answer.count, 10, "{what}"),
            Err(error) => assert_eq!(error.code, "40001", "{what}: {error}"),
        }
        let ended = run(&session, "COMMIT").await?;
        assert!(["00000", "40001"].contains(&code(&ended).as_str()), "{what}: {ended:?}");
        // What was told is what is there.
        let is_copied = sql == copy && answered.is_ok() && ended.is_ok();
        let copied = on_leader(&cluster, "SELECT count(*) FROM copied").await?.number()?;
        assert_eq!(copied, if is_copied { 10 } else { 0 }, "{what}: {answered:?}, {ended:?}");
        // Whoever is told to try again gets all rows then.
        run(&session, "ROLLBACK").await??;
        assert_eq!(run(&session, read).await??.number()?, 10, "{what}, once more");
    }
    Ok(())
}

/// How often the table is filled anew at once, and how often when every reader has read it as it was.
const QUICK_REFILLS: u32 = 60;
const SLOW_REFILLS: u32 = 20;

/// Empties the table and fills it again in one transaction; one that is refused as not serializable is run again.
async fn refill(writer: &Session) -> anyhow::Result<()> {
    let sql = "BEGIN; TRUNCATE filled; INSERT INTO filled SELECT 1 FROM generate_series(1, 10); COMMIT";
    try_until("the table is filled anew", || async {
        match run(writer, sql).await? {
            Err(error) if error.is_retryable() => {
                run(writer, "ROLLBACK").await??;
                Ok(false)
            }
            answer => answer.map(|_| true).map_err(anyhow::Error::from),
        }
    })
    .await
}

/// Readers at all servers, in autocommit and in transactions, while the table is truncated and filled in one
/// transaction.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_under_truncate_and_refill_see_all_rows_or_an_error() -> anyhow::Result<()> {
    let cluster = Arc::new(start_usual(2).await?);
    let writer = cluster.updater("writer").await?;
    writer.run("CREATE TABLE filled AS SELECT 1 AS a FROM generate_series(1, 10)").await?;
    let stop = Arc::new(AtomicBool::new(false));
    // How often each reader has seen all rows.
    let good: Arc<[AtomicUsize; 4]> = Arc::default();
    let mut readers = tokio::task::JoinSet::new();
    for number in 0..good.len() {
        let session = cluster.updater("reader").await?;
        let (stop, good) = (stop.clone(), good.clone());
        readers.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let result = if number % 2 == 0 {
                    session.run("SELECT count(*) FROM filled").await
                } else {
                    session.run("BEGIN READ ONLY; SELECT 1; SELECT count(*) FROM filled").await
                };
                match result {
                    Ok(answer) => {
                        assert_eq!(answer.number()?, 10);
                        good[number].fetch_add(1, Ordering::Relaxed);
                    }
                    Err(error) => assert_eq!(error.code, "40001", "{error}"),
                }
                if number % 2 == 1 {
                    session.run("ROLLBACK").await?;
                }
            }
            anyhow::Ok(())
        });
    }
    let counts = || good.iter().map(|count| count.load(Ordering::Relaxed)).collect::<Vec<_>>();
    for _ in 0..QUICK_REFILLS {
        refill(&writer).await?;
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    for _ in 0..SLOW_REFILLS {
        refill(&writer).await?;
        let before = counts();
        // More than the one that was under way already.
        try_until("every reader sees all rows", || async {
            Ok(counts().iter().zip(&before).all(|(now, before)| *now > before + 1))
        })
        .await?;
    }
    let reads = || cluster.router().status().servers.iter().map(|server| server.reads).collect::<Vec<_>>();
    let before = reads();
    try_until("every server answers readers", || async {
        Ok(reads().iter().zip(&before).all(|(now, before)| now > before))
    })
    .await?;
    stop.store(true, Ordering::Relaxed);
    while let Some(result) = bounded("readers", readers.join_next()).await? {
        result??;
    }
    Ok(())
}

/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ddl_that_must_run_alone_runs_and_later_reads_see_it() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let mut idle = Wire::connect(&cluster).await?;
    idle.query("SELECT count(*) FROM numbers").await?;
    for sql in [
        "CREATE INDEX CONCURRENTLY by_value ON numbers (value)",
        "REINDEX INDEX CONCURRENTLY by_value",
        "VACUUM ANALYZE numbers",
        "DROP INDEX CONCURRENTLY by_value",
        "CREATE DATABASE other",
        "ALTER SYSTEM SET work_mem = '4MB'",
    ] {
        let answer = bounded(sql, wire.query(sql)).await??;
        assert_eq!((answer.code().as_str(), answer.status()?), ("00000", 'I'), "{sql}: {:?}", answer.errors());
        assert_eq!(wire.query("SELECT count(*) FROM numbers").await?.text_rows(), ["10"], "{sql}");
        wire.query("BEGIN").await?;
        assert_eq!(wire.query(sql).await?.code(), "25001", "{sql} in a transaction");
        wire.query("ROLLBACK").await?;
        if sql.starts_with("DROP INDEX") {
            wire.query("DROP INDEX IF EXISTS by_value").await?;
        }
    }
    // A prepared statement of another session goes on after its table has changed.
    idle.ask(&[crate::wire::parse("all", "SELECT * FROM numbers WHERE id = 1"), crate::wire::sync()].concat()).await?;
    wire.query("ALTER TABLE numbers ADD COLUMN more text DEFAULT 'new'").await?;
    let all = [crate::wire::bind("", "all", &[]), crate::wire::execute("", 0), crate::wire::sync()].concat();
    let answer = idle.ask(&all).await?;
    // PostgreSQL itself refuses a changed result type; what must not come is the old one.
    assert!(answer.text_rows() == ["1|0|new"] || answer.code() == "0A000", "{answer:?}");
    assert_eq!(idle.query("SELECT more FROM numbers WHERE id = 1").await?.text_rows(), ["new"]);
    Ok(())
}

/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_is_dropped_and_made_again_through_the_router() -> anyhow::Result<()> {
    use onecopy_tests::servers::{PASSWORD, USER};
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for round in 0..2 {
        assert_eq!(bounded("CREATE DATABASE", wire.query("CREATE DATABASE other")).await??.code(), "00000", "{round}");
        let parameters = [("user", USER), ("database", "other")];
        let mut other = Wire::log_in(&cluster, &parameters, PASSWORD).await?.expect("may log in");
        assert_eq!(other.query("CREATE TABLE here (a int)").await?.code(), "00000", "{round}");
        assert_eq!(other.query("SELECT count(*) FROM here").await?.text_rows(), ["0"], "{round}");
        other.send(&crate::wire::message(b'X', b"")).await?;
        other.until_closed().await?;
        let answer = bounded("DROP DATABASE", wire.query("DROP DATABASE other")).await??;
        assert_eq!(answer.code(), "00000", "{round}: {:?}", answer.errors());
        let refused = Wire::log_in(&cluster, &parameters, PASSWORD).await?.err().expect("it is gone");
        assert_eq!(refused.code, "3D000", "{round}");
    }
    Ok(())
}

/// A migration is DDL in a row: the catalog is read on one connection, which is gone where the database must be vacant,
/// and made anew where a server process has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_catalog_is_read_on_one_connection_that_stands_in_nobodys_way() -> anyhow::Result<()> {
    const CATALOG: &str = "FROM pg_stat_activity WHERE application_name = 'onecopy catalog'";
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let mut change = async |name: &str| {
        wire.query(&format!("CREATE TABLE {name} (a int)")).await?;
        // Classified by the new catalog.
        assert_eq!(wire.query(&format!("SELECT count(*) FROM {name}")).await?.text_rows(), ["0"]);
        on_leader(&cluster, &format!("SELECT pid {CATALOG}")).await?.number()
    };
    let process = change("first").await?;
    assert_eq!(change("second").await?, process);
    on_leader(&cluster, &format!("SELECT pg_terminate_backend(pid, 5000) {CATALOG}")).await?;
    assert_ne!(change("third").await?, process);
    let template = onecopy_tests::servers::DATABASE;
    for sql in [&format!("CREATE DATABASE copied TEMPLATE {template}"), "DROP DATABASE copied"] {
        let answer = bounded(sql, wire.query(sql)).await??;
        assert_eq!(answer.code(), "00000", "{sql}: {:?}", answer.errors());
    }
    Ok(())
}

/// Beside TRUNCATE, open and committed, only those are refused who have to do with that table; single statements are
/// not refused at all.
///
/// On the leader TRUNCATE refuses only transactions that have opened its table with an older snapshot; a single
/// statement that it has overtaken is run again; *not held* for what a block of a function has read whose exception was
/// caught, nor for code of users in a single statement, which is refused.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f81_beside_truncate_only_those_are_refused_whom_it_concerns() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let writer = cluster.updater("writer").await?;
    writer.run("CREATE TABLE filled AS SELECT 1 AS a FROM generate_series(1, 10)").await?;
    writer.run("CREATE TABLE elsewhere AS SELECT id, 0 AS value FROM generate_series(1, 10) id").await?;
    let bystander = cluster.updater("bystander").await?;
    let update = "UPDATE numbers SET value = value + 1 WHERE id = 1";
    let single = ["NOTIFY here", "SELECT count(*) FROM numbers", "CREATE TEMP TABLE IF NOT EXISTS own (a int)", update];
    for _ in 0..3 {
        let open = cluster.updater("open").await?;
        open.run("BEGIN").await?;
        run(&open, "UPDATE elsewhere SET value = value + 1 WHERE id = 2").await??;
        run(&writer, "BEGIN").await??;
        run(&writer, "TRUNCATE filled").await??;
        run(&writer, "INSERT INTO filled SELECT 1 FROM generate_series(1, 10)").await??;
        for sql in single {
            run(&bystander, sql).await??;
        }
        run(&open, "UPDATE elsewhere SET value = value + 1 WHERE id = 3").await??;
        run(&writer, "COMMIT").await??;
        for sql in single {
            run(&bystander, sql).await??;
        }
        run(&open, "SELECT count(*) FROM elsewhere").await??;
        let concerned = run(&open, "SELECT count(*) FROM filled").await?;
        assert_eq!(code(&concerned), "40001", "{concerned:?}");
        run(&open, "ROLLBACK").await??;
    }
    let values = "SELECT sum(value) FROM numbers";
    assert_eq!(run(&bystander, values).await??.number()?, 6, "no statement has run twice");
    Ok(())
}

/// What a transaction has read with locks that it has let go, behind a savepoint that it takes back in the same message
/// or that an error ends, is not believed when something has changed; nor is a view that is newer than its snapshot.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f81_what_is_read_behind_a_savepoint_or_in_a_new_view_is_not_believed() -> anyhow::Result<()> {
    const MAKE: &str = "CREATE TABLE filled AS SELECT 1 AS a FROM generate_series(1, 10)";
    let (numbers, filled) = ("SELECT count(*) FROM numbers", "SELECT count(*) FROM filled");
    let cluster = start_usual(1).await?;
    let writer = cluster.updater("writer").await?;
    for place in ["leader", "follower-1", "a transaction of updates"] {
        let is_update = place.starts_with('a');
        let session = cluster.reader("session", if is_update { "leader" } else { place }).await?;
        let begin = async || {
            if is_update {
                run(&session, "BEGIN").await??;
                run(&session, "UPDATE numbers SET value = value WHERE id = 1").await??;
            } else {
                cluster.read_until_at_epoch(&session, numbers).await?;
                run(&session, "BEGIN READ ONLY").await??;
            }
            run(&session, numbers).await??;
            anyhow::Ok(())
        };
        for taken_back in ["; ROLLBACK TO one", "; SELECT 1 / 0"] {
            begin().await?;
            run(&writer, MAKE).await??;
            if !is_update {
                // It is there on that server.
                let other = cluster.reader("other", place).await?;
                cluster.read_until_at_epoch(&other, filled).await?;
            }
            run(&session, "SAVEPOINT one").await??;
            let seen = run(&session, &format!("{filled}{taken_back}")).await?;
            assert_eq!(code(&seen), "40001", "{place}{taken_back}: {seen:?}");
            run(&session, "ROLLBACK").await??;
            run(&writer, "DROP TABLE filled").await??;
        }
        begin().await?;
        run(&writer, "CREATE VIEW later AS SELECT count(*) FROM numbers").await??;
        // It is there on every server.
        cluster.servers.wait_replayed().await?;
        run(&session, "SAVEPOINT one; SELECT 1; RELEASE one").await??;
        let seen = run(&session, "TABLE later").await?;
        assert_eq!(code(&seen), "40001", "{place}: {seen:?}");
        run(&session, "ROLLBACK").await??;
        run(&writer, "DROP VIEW later").await??;
    }
    Ok(())
}

/// A single statement that waits for TRUNCATE is run again by the router: its client gets all rows, never an error.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f81_a_single_statement_that_truncate_has_overtaken_is_run_again() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let writer = cluster.updater("writer").await?;
    writer.run("CREATE TABLE filled AS SELECT 1 AS a FROM generate_series(1, 10)").await?;
    writer.run("CREATE TABLE copied (a int)").await?;
    let session = cluster.updater("session").await?;
    for sql in ["SELECT count(*) FROM filled", "INSERT INTO copied SELECT a FROM filled"] {
        run(&writer, "BEGIN").await??;
        run(&writer, "TRUNCATE filled").await??;
        run(&writer, "INSERT INTO filled SELECT 1 FROM generate_series(1, 10)").await??;
        let waiting = session.start(sql);
        try_until("it waits for the lock", || async {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
            Ok(on_leader(&cluster, sql).await?.number()? == 1)
        })
        .await?;
        run(&writer, "COMMIT").await??;
        bounded(sql, waiting).await???;
    }
    assert_eq!(run(&session, "SELECT count(*) FROM copied").await??.number()?, 10);
    Ok(())
}

/// DO that truncates and commits in its middle: whoever has read before and goes on after is refused while the block
/// runs on, and never sees the table empty.
///
/// DO and CALL that truncate and commit are never seen half way.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f82_a_block_that_truncates_and_commits_is_never_seen_half_way() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let writer = cluster.updater("writer").await?;
    writer.run("CREATE TABLE filled AS SELECT 1 AS a FROM generate_series(1, 10)").await?;
    let holder = crate::harness::leader(&cluster).await?;
    holder.run("SELECT pg_advisory_lock(1), pg_advisory_lock(2)").await?;
    let waiters = |event: &'static str, count: i64| {
        let cluster = &cluster;
        let sql =
            format!("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event = '{event}'");
        try_until(event, move || {
            let sql = sql.clone();
            async move { Ok(on_leader(cluster, &sql).await?.number()? == count) }
        })
    };
    let block = writer.start(
        "DO $$BEGIN TRUNCATE filled; INSERT INTO filled SELECT 1 FROM generate_series(1, 10);
         PERFORM pg_advisory_xact_lock(1); COMMIT; PERFORM pg_advisory_xact_lock(2); END$$",
    );
    waiters("advisory", 1).await?;
    let session = cluster.updater("session").await?;
    session.run("BEGIN").await?;
    run(&session, "UPDATE numbers SET value = value + 1 WHERE id = 1").await??;
    let overtaken = session.start("SELECT count(*) FROM filled");
    waiters("relation", 1).await?;
    holder.run("SELECT pg_advisory_unlock(1)").await?;
    let overtaken = bounded("the read behind the block", overtaken).await??;
    assert_eq!(code(&overtaken), "40001", "{overtaken:?}");
    run(&session, "ROLLBACK").await??;
    assert_eq!(run(&session, "SELECT count(*) FROM filled").await??.number()?, 10, "beside the block");
    holder.run("SELECT pg_advisory_unlock(2)").await?;
    bounded("the block", block).await???;
    assert_eq!(run(&session, "SELECT count(*) FROM filled").await??.number()?, 10);
    Ok(())
}

/// Deferred triggers read when their transaction commits: TRUNCATE that came before is not missed there.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f83_a_deferred_trigger_never_sees_a_truncated_table_empty() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let writer = cluster.updater("writer").await?;
    for sql in [
        "CREATE TABLE filled AS SELECT 1 AS a FROM generate_series(1, 10)",
        "CREATE TABLE counted (found bigint)",
        "CREATE TABLE checked (a int)",
        "CREATE FUNCTION count_filled() RETURNS trigger LANGUAGE plpgsql AS
         'BEGIN INSERT INTO counted SELECT count(*) FROM filled; RETURN NULL; END'",
        "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON checked DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
         EXECUTE FUNCTION count_filled()",
    ] {
        run(&writer, sql).await??;
    }
    let session = cluster.updater("session").await?;
    session.run("BEGIN").await?;
    run(&session, "INSERT INTO checked VALUES (1)").await??;
    refill(&writer).await?;
    let committed = run(&session, "COMMIT").await?;
    assert_eq!(code(&committed), "40001", "{committed:?}");
    assert_eq!(run(&session, "SELECT count(*) FROM counted").await??.number()?, 0);
    run(&session, "INSERT INTO checked VALUES (2)").await??;
    assert_eq!(run(&session, "SELECT found FROM counted").await??.number()?, 10);
    Ok(())
}

/// A COPY whose trigger truncates another table is DDL as much as any other.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f84_a_copy_whose_trigger_truncates_ends_older_epochs() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for sql in [
        "CREATE TABLE filled AS SELECT 1 AS a FROM generate_series(1, 10)",
        "CREATE TABLE loaded (a int)",
        "CREATE FUNCTION empties() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN TRUNCATE filled; RETURN NULL; END'",
        "CREATE TRIGGER after_load AFTER INSERT ON loaded EXECUTE FUNCTION empties()",
    ] {
        assert_eq!(wire.query(sql).await?.code(), "00000", "{sql}");
    }
    let reader = cluster.reader("reader", "follower-1").await?;
    cluster.read_until_at_epoch(&reader, "SELECT count(*) FROM filled").await?;
    reader.run("BEGIN READ ONLY").await?;
    run(&reader, "SELECT count(*) FROM numbers").await??;
    wire.send(&crate::wire::query("COPY loaded FROM STDIN")).await?;
    wire.send(&[crate::wire::message(b'd', b"1\n"), crate::wire::message(b'c', b"")].concat()).await?;
    assert_eq!(bounded("COPY", wire.answer()).await??.code(), "00000");
    let seen = run(&reader, "SELECT count(*) FROM filled").await?;
    assert_eq!(code(&seen), "40001", "{seen:?}");
    Ok(())
}
