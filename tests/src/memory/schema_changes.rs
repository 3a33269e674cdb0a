//! What makes pages vanish while a pool is resized: DROP, TRUNCATE, VACUUM, databases that come and go, checkpoints;
//! and what touches every buffer: prewarm and the list of all buffers.

use crate::client::Session;
use crate::servers::{DATABASE, TestServer};

/// One round on a leader; what it makes, the next round removes.
///
/// # Errors
///
/// The server's refusal.
pub async fn round(leader: &TestServer, round: u64) -> anyhow::Result<()> {
    tables(leader, round).await?;
    databases(leader, round).await
}

/// The part of a round that changes tables.
///
/// # Errors
///
/// The server's refusal.
pub async fn tables(leader: &TestServer, round: u64) -> anyhow::Result<()> {
    let session = leader.connect("schema").await?;
    for sql in statements(round) {
        session.run(&sql).await?;
    }
    Ok(())
}

/// The part of a round that makes a database, works in it, and drops the one before.
///
/// # Errors
///
/// The server's refusal.
pub async fn databases(leader: &TestServer, round: u64) -> anyhow::Result<()> {
    let session = Session::connect("databases", &leader.config("postgres")).await?;
    let way = if round.is_multiple_of(2) { "wal_log" } else { "file_copy" };
    // After a crash in the middle of a round it is there already.
    session.run_when_unused(&format!("DROP DATABASE IF EXISTS made_{round} WITH (FORCE)")).await?;
    session.run_when_unused(&format!("CREATE DATABASE made_{round} STRATEGY {way}")).await?;
    let inside = Session::connect("inside", &leader.config(&format!("made_{round}"))).await?;
    inside.run("CREATE TABLE inside AS SELECT i AS id, md5(i::text) FROM generate_series(1, 20000) i").await?;
    inside.run("UPDATE inside SET id = -id").await?;
    drop(inside);
    if let Some(old) = round.checked_sub(1) {
        session.run_when_unused(&format!("DROP DATABASE IF EXISTS made_{old} WITH (FORCE)")).await?;
    }
    Ok(())
}

/// What a round does with tables, in its order.
pub fn statements(round: u64) -> Vec<String> {
    let mut statements = vec![
        // After a crash in the middle of a round it is there already.
        format!("DROP TABLE IF EXISTS made_{round}"),
        format!(
            "CREATE TABLE made_{round} AS SELECT i AS id, repeat(md5(i::text), 8) AS body \
             FROM generate_series(1, 8000) i"
        ),
        format!("CREATE INDEX ON made_{round} (body)"),
        format!("DELETE FROM made_{round} WHERE id > 4000"),
        // The end of the file goes.
        format!("VACUUM made_{round}"),
        "DROP TABLE IF EXISTS refilled".to_owned(),
        "CREATE TABLE refilled (id int, body text)".to_owned(),
    ];
    for size in [3000, 2000, 1000] {
        // The same pages again and again, with other contents: a page of before would show.
        statements.push("TRUNCATE refilled".to_owned());
        statements.push(format!(
            "INSERT INTO refilled SELECT i, repeat(md5((i + {round})::text), 8) FROM generate_series(1, {size}) i"
        ));
        statements.push(format!("DELETE FROM refilled WHERE id > {}", size / 2));
        statements.push("VACUUM refilled".to_owned());
    }
    statements.extend([
        "VACUUM FULL pgbench_tellers".to_owned(),
        "VACUUM pgbench_accounts".to_owned(),
        "REINDEX TABLE pgbench_branches".to_owned(),
        // One index: the locks on several, replayed on a standby in their order, end in a deadlock with who reads the
        // catalog by the others (40P01 for a plain SELECT there).
        "REINDEX INDEX pg_class_oid_index".to_owned(),
        "SELECT pg_prewarm('pgbench_accounts', 'buffer')".to_owned(),
        "SELECT count(*), sum(pinning_backends) FROM pg_buffercache".to_owned(),
        "CHECKPOINT".to_owned(),
    ]);
    if let Some(old) = round.checked_sub(1) {
        statements.push(format!("DROP TABLE IF EXISTS made_{old}"));
    }
    statements
}

/// What a standby's clients do beside reading: touch every buffer.
///
/// # Errors
///
/// The server's refusal.
pub async fn standby_round(standby: &TestServer) -> anyhow::Result<()> {
    let session = Session::connect("standby", &standby.config(DATABASE)).await?;
    session.run("SELECT pg_prewarm('pgbench_accounts', 'buffer')").await?;
    session.run("SELECT count(*), sum(pinning_backends) FROM pg_buffercache").await?;
    session.run("SELECT count(*), sum(abalance) FROM pgbench_accounts").await?;
    Ok(())
}
