//! A table with one row a page, so that a pool's contents can be counted in rows.

use anyhow::ensure;

use crate::servers::TestServer;

/// Its name.
pub const TABLE: &str = "pages";
/// PostgreSQL's page.
pub const PAGE_BYTES: u64 = 8192;
/// So long that a page has no room for two, and stored as it is.
const ROW_BODY_BYTES: u64 = 7000;

/// Makes the table with so many rows, each on a page of its own, and an index.
///
/// # Errors
///
/// The server's refusal; rows that do not lie as they should.
pub async fn make(server: &TestServer, rows: u64) -> anyhow::Result<()> {
    let session = server.connect("pages").await?;
    session
        .run_all(&[
            "CREATE TABLE pages (id int, changes int, body text) WITH (autovacuum_enabled = off)",
            "ALTER TABLE pages ALTER body SET STORAGE PLAIN",
            &format!("INSERT INTO pages SELECT i, 0, repeat('p', {ROW_BODY_BYTES}) FROM generate_series(1, {rows}) i"),
            "ALTER TABLE pages ADD PRIMARY KEY (id)",
            "VACUUM FREEZE pages",
            "CHECKPOINT",
        ])
        .await?;
    let found = session.run("SELECT pg_relation_size('pages') / 8192").await?.number()?;
    ensure!(found == i64::try_from(rows)?, "{found} pages for {rows} rows");
    Ok(())
}

/// Reads every page once, through the pool's whole and not through a ring of some buffers.
///
/// # Errors
///
/// The server's refusal.
pub async fn read_all(server: &TestServer) -> anyhow::Result<()> {
    server.connect("pages").await?.run("SELECT pg_prewarm('pages', 'buffer')").await?;
    Ok(())
}

/// How many pages of the table are in the pool.
///
/// # Errors
///
/// The server's refusal.
pub async fn cached(server: &TestServer) -> anyhow::Result<u64> {
    let question = "SELECT count(*) FROM pg_buffercache WHERE relforknumber = 0
        AND relfilenode = pg_relation_filenode('pages')
        AND reldatabase = (SELECT oid FROM pg_database WHERE datname = current_database())";
    Ok(server.connect("pages").await?.run(question).await?.number()?.try_into()?)
}
