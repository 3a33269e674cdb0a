//! Schema changes of every kind that makes, cuts, rewrites, moves or removes files.

use std::time::Duration;

use tokio_postgres::Config;

use crate::client::Session;
use crate::clones::harness::{SECOND_DATABASE, TABLESPACE};

/// Between two looks at something that other sessions may hold.
const LOCK_TIMEOUT: &str = "SET lock_timeout = '120s'";
/// Whoever is in a database that must be left has left it by then.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(120);

/// One round; what it makes, the next rounds remove. `maintenance` leads to the database `postgres`.
///
/// # Errors
///
/// The server's refusal.
pub async fn round(session: &Session, maintenance: &Config, round: u64) -> anyhow::Result<()> {
    session.run(LOCK_TIMEOUT).await?;
    for sql in statements(round) {
        session.run(&sql).await?;
    }
    databases(maintenance, round).await
}

fn statements(round: u64) -> Vec<String> {
    let mut statements = vec![
        // New files, with an index and storage out of line.
        format!(
            "CREATE TABLE made_{round} AS SELECT i AS id, repeat(md5(i::text), 8) AS body \
             FROM generate_series(1, 1500) i"
        ),
        format!("CREATE INDEX ON made_{round} (body)"),
        format!(
            "INSERT INTO documents SELECT i, (SELECT string_agg(md5((i * j)::text), '') FROM generate_series(1, 200) j)
            FROM generate_series({0}, {0} + 20) i",
            1000 * (round + 1)
        ),
        // Files that shrink: all of a table at once, and its end by vacuum.
        "TRUNCATE pgbench_history".to_owned(),
        format!("DELETE FROM documents WHERE id BETWEEN {} AND {}", 380 - 10 * (round % 30), 400 - 10 * (round % 30)),
        "VACUUM documents".to_owned(),
        // Files that are written anew under another name.
        "VACUUM FULL pgbench_tellers".to_owned(),
        "REINDEX TABLE documents".to_owned(),
        "REFRESH MATERIALIZED VIEW summary".to_owned(),
        // Catalogs, whose file names are mapped. One index: the locks on several, replayed on a standby in their order,
        // end in a deadlock with who reads the catalog by the others (40P01 for a plain SELECT there).
        "REINDEX INDEX pg_class_oid_index".to_owned(),
        "VACUUM FULL pg_statistic".to_owned(),
        format!("UPDATE placed SET filler = 'round {round}' WHERE id % 50 = {}", round % 50),
        "INSERT INTO wide SELECT i, 'more' FROM generate_series(1, 50) i".to_owned(),
        "INSERT INTO scratch SELECT max(id) + 1 FROM scratch".to_owned(),
    ];
    // Files that move between tablespaces.
    let place = if round.is_multiple_of(2) { "pg_default" } else { TABLESPACE };
    statements.push(format!("ALTER TABLE placed SET TABLESPACE {place}"));
    if let Some(old) = round.checked_sub(2) {
        statements.push(format!("DROP TABLE made_{old}"));
    }
    if round.is_multiple_of(2) {
        // Everything that is dirty is written out, and what was dropped loses its files.
        statements.push("CHECKPOINT".to_owned());
    }
    statements
}

/// Makes a database in one of the two ways that PostgreSQL has, works in it, and drops the one before.
async fn databases(maintenance: &Config, round: u64) -> anyhow::Result<()> {
    let session = Session::connect("databases", maintenance).await?;
    let way = if round.is_multiple_of(2) { "wal_log" } else { "file_copy" };
    run_alone(&session, &format!("CREATE DATABASE made_{round} TEMPLATE template1 STRATEGY {way}")).await?;
    if let Some(old) = round.checked_sub(1) {
        run_alone(&session, &format!("DROP DATABASE made_{old} WITH (FORCE)")).await?;
    }
    let mut inside = maintenance.clone();
    inside.dbname(format!("made_{round}"));
    let session = Session::connect("inside", &inside).await?;
    session.run("CREATE TABLE inside AS SELECT i AS id FROM generate_series(1, 3000) i").await?;
    let mut archive = maintenance.clone();
    archive.dbname(SECOND_DATABASE);
    let session = Session::connect("archive", &archive).await?;
    session.run(&format!("UPDATE old SET body = md5(body) WHERE id % 100 = {}", round % 100)).await?;
    Ok(())
}

/// What nobody else may be in a database for. PostgreSQL itself waits five seconds for those that it has told to leave,
/// autovacuum's workers and sessions that are ending (object_in_use); on a busy machine they take longer.
async fn run_alone(session: &Session, sql: &str) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + LEAVE_TIMEOUT;
    loop {
        match session.run(sql).await {
            Err(error) if error.code == "55006" && tokio::time::Instant::now() < deadline => {}
            done => return Ok(done.map(drop)?),
        }
    }
}
