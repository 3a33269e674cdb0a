//! What a server holds in all databases: every row of every table, of the catalogs and of what is stored out of line,
//! with its place in the file. A physical standby holds the same as its primary, bit for bit as far as SQL can see.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};

use crate::client::Session;
use crate::servers::TestServer;

/// Database and table to number of rows and a hash of all rows and places.
pub type Contents = BTreeMap<String, String>;

/// How often two servers are compared again because autovacuum has changed the source between two looks.
const LOOKS_MAX: usize = 20;

/// What VACUUM notes in the catalogs is seen at once and goes into the log some seconds later, when nobody commits: so
/// many looks at a source that stays the same, with this pause between two, last longer.
const LOOKS_ALIKE: usize = 3;
const LOOK_PAUSE: Duration = Duration::from_secs(2);

/// A harness has four databases with a good hundred tables each, catalogs included; fewer would prove little.
const TABLES_MIN: usize = 200;

/// Without those that nobody can connect to any more, because their server died while it dropped them (datconnlimit
/// -2).
const DATABASES: &str = "SELECT datname FROM pg_database WHERE datallowconn AND datconnlimit <> -2 ORDER BY 1";

/// What lives in the log: ordinary tables, materialized views, out-of-line storage, sequences.
const RELATIONS: &str = "SELECT format('%I.%I', n.nspname, c.relname), c.relkind FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'm', 't', 'S') AND c.relpersistence = 'p'
    ORDER BY 1";

/// All that a server holds.
///
/// # Errors
///
/// The server's refusal.
pub async fn contents(server: &TestServer) -> anyhow::Result<Contents> {
    let session = Session::connect(&server.name, &server.config("postgres")).await?;
    let mut contents = Contents::new();
    for row in session.run(DATABASES).await?.rows {
        let database = row.into_iter().next().flatten().context("a database without a name")?;
        let session = Session::connect(&server.name, &server.config(&database)).await?;
        let mut questions = Vec::new();
        for row in session.run(RELATIONS).await?.rows {
            let [Some(table), Some(kind)] = row.as_slice() else { continue };
            questions.push(question(table, kind));
        }
        // One statement for all: one snapshot, one parse, one answer.
        let answer = session.run(&questions.join(" UNION ALL ")).await;
        let answer = answer.map_err(|error| anyhow!("{} of {}: {}", database, server.name, error.message))?;
        for row in answer.rows {
            let [Some(table), Some(hash)] = row.as_slice() else { continue };
            contents.insert(format!("{database}: {table}"), hash.clone());
        }
    }
    Ok(contents)
}

fn question(table: &str, kind: &str) -> String {
    let name = table.replace('\'', "''");
    if kind == "S" {
        // A sequence logs numbers in advance: its sum is what primary and standby agree on.
        return format!("SELECT '{name}', (last_value + log_cnt)::text || is_called FROM {table}");
    }
    // Storage out of line has no row type.
    let row = if kind == "t" { "ROW(t.chunk_id, t.chunk_seq, t.chunk_data)" } else { "t" };
    // The sum of hashes does not depend on the order; the place is part of each.
    let hash = format!("coalesce(sum(hashtextextended(t.ctid::text || {row}::text, 0)), 0)");
    format!("SELECT '{name}', count(*) || ' rows, ' || {hash} FROM {table} t")
}

/// Waits until `clone` has replayed what `source` has flushed. Nobody may write meanwhile.
///
/// # Errors
///
/// A server's refusal.
pub async fn wait_replayed(source: &TestServer, clone: &TestServer) -> anyhow::Result<()> {
    let source = Session::connect(&source.name, &source.config("postgres")).await?;
    let clone = Session::connect(&clone.name, &clone.config("postgres")).await?;
    onecopy_testing::wait_replayed(source.client(), clone.client()).await
}

/// Checks that `clone` holds what `source` holds, and all of it. No client may write meanwhile; autovacuum may.
///
/// # Errors
///
/// The tables that differ, with both hashes; too few tables, because that would prove nothing.
pub async fn ensure_same(source: &TestServer, clone: &TestServer) -> anyhow::Result<Contents> {
    ensure_same_as(source, contents(source).await?, clone).await
}

/// As [`ensure_same`], of a source that held `expected` before: as long as the clone holds that, too, it is not looked
/// at.
///
/// # Errors
///
/// As [`ensure_same`].
pub async fn ensure_same_as(
    source: &TestServer,
    mut expected: Contents,
    clone: &TestServer,
) -> anyhow::Result<Contents> {
    let mut looks_alike = 0;
    for _ in 0..LOOKS_MAX {
        wait_replayed(source, clone).await?;
        let found = contents(clone).await?;
        let different = ensure_equal(&clone.name, &found, &expected);
        if different.is_ok() {
            return Ok(expected);
        }
        let now = contents(source).await?;
        looks_alike = if now == expected { looks_alike + 1 } else { 0 };
        if looks_alike == LOOKS_ALIKE {
            different?;
        }
        tokio::time::sleep(LOOK_PAUSE).await;
        expected = now;
    }
    bail!("{} is written to all the time: {LOOKS_MAX} looks in vain", source.name)
}

/// Checks that a server holds this.
///
/// # Errors
///
/// The tables that differ, with both hashes; too few tables, because that would prove nothing.
pub async fn ensure_holds(server: &TestServer, expected: &Contents) -> anyhow::Result<()> {
    ensure_equal(&server.name, &contents(server).await?, expected)
}

fn ensure_equal(name: &str, found: &Contents, expected: &Contents) -> anyhow::Result<()> {
    ensure!(expected.len() >= TABLES_MIN, "only {} tables to compare", expected.len());
    let tables: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
    let different = tables.into_iter().filter(|table| expected.get(*table) != found.get(*table));
    let different: Vec<String> =
        different.map(|table| format!("{table}: {:?}, not {:?}", found.get(table), expected.get(table))).collect();
    ensure!(different.is_empty(), "{name} differs: {}", different.join("; "));
    Ok(())
}
