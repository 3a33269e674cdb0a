//! What a server holds, as one text for each table: two servers with equal fingerprints hold the same rows.

use std::collections::BTreeMap;

use anyhow::ensure;

use crate::client::Session;
use crate::servers::{DATABASE, Servers};

/// Table name to number of rows and hash of all rows.
pub type Fingerprint = BTreeMap<String, String>;

/// Tables that live in the write-ahead log: unlogged ones, the tripwire among them, are not on a standby.
const TABLES: &str =
    "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND n.nspname NOT IN ('pg_catalog', 'information_schema')
    AND n.nspname NOT LIKE 'pg_toast%' ORDER BY 1";

/// The fingerprint of every table that `session` sees.
///
/// # Errors
///
/// The server's refusal.
pub async fn fingerprint(session: &Session) -> anyhow::Result<Fingerprint> {
    let mut fingerprint = Fingerprint::new();
    for row in session.run(TABLES).await?.rows {
        let Some(Some(table)) = row.into_iter().next() else { continue };
        let question = format!(
            "SELECT count(*) || ' rows, ' || coalesce(md5(string_agg(t::text, E'\\n' ORDER BY t::text)), 'none') \
             FROM {table} t"
        );
        let hash = session.run(&question).await?.text()?.to_owned();
        fingerprint.insert(table, hash);
    }
    Ok(fingerprint)
}

/// Waits for replay and checks that every server holds what the leader holds.
///
/// # Errors
///
/// A server whose tables differ, with both fingerprints; a leader without tables, because that would prove nothing.
pub async fn ensure_servers_equal(servers: &Servers) -> anyhow::Result<Fingerprint> {
    servers.wait_replayed().await?;
    let mut leaders = Fingerprint::new();
    for server in servers.all() {
        let session = Session::connect(&server.name, &server.config(DATABASE)).await?;
        let found = fingerprint(&session).await?;
        if leaders.is_empty() {
            leaders = found;
            ensure!(!leaders.is_empty(), "the leader has no tables to compare");
        } else {
            ensure!(found == leaders, "{} differs from the leader: {found:?} and {leaders:?}", server.name);
        }
    }
    Ok(leaders)
}
