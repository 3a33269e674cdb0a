//! DDL while others read: no reader ever sees what no serial order explains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use onecopy_tests::client::Session;

use crate::harness::{bounded, code, on_leader, run, start_usual, wait_until};
use crate::wire::Wire;

/// TRUNCATE is not MVCC: at an older epoch the table would look empty.
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

/// On the leader a statement has its snapshot before it waits for TRUNCATE's lock: what it then sees is no serial order.
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
        wait_until("it waits for the lock", || async {
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
    wait_until("the table is filled anew", || async {
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

/// Readers at all servers, in autocommit and in transactions, while the table is truncated and filled in one transaction.
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
        wait_until("every reader sees all rows", || async {
            Ok(counts().iter().zip(&before).all(|(now, before)| *now > before + 1))
        })
        .await?;
    }
    let reads = || cluster.router().status().servers.iter().map(|server| server.reads).collect::<Vec<_>>();
    let before = reads();
    wait_until("every server answers readers", || async {
        Ok(reads().iter().zip(&before).all(|(now, before)| now > before))
    })
    .await?;
    stop.store(true, Ordering::Relaxed);
    while let Some(result) = bounded("readers", readers.join_next()).await? {
        result??;
    }
    Ok(())
}

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
