//! That nothing was lost: the sums that transactions keep, the same rows on leader, standby and disk, indexes,
//! checksums.

use anyhow::{Context, ensure};
use onecopy_postgres::StopMode;

use crate::clones::contents::{contents, ensure_holds, ensure_same};
use crate::clones::programs;
use crate::clones::proof::quiet;
use crate::memory::harness::Harness;
use crate::servers::TestServer;

/// Checks all that can be checked of servers on which nobody works any more. They run again afterwards.
///
/// # Errors
///
/// The first thing that is not so.
pub async fn ensure_nothing_lost(harness: &Harness) -> anyhow::Result<()> {
    for server in harness.all() {
        quiet(server).await?;
        ensure_sums(server).await.with_context(|| server.name.clone())?;
    }
    let leader = harness.leader();
    let expected = match harness.standby() {
        Ok(standby) => ensure_same(leader, standby).await?,
        // To be compared with what is on its disk.
        Err(_) => contents(leader).await?,
    };
    for server in harness.all() {
        programs::amcheck(server).with_context(|| server.name.clone())?;
    }
    for server in harness.all().iter().rev() {
        // The shutdown checkpoint writes what is dirty; what was lost before is not there to be written.
        server.server.stop(StopMode::Fast).await?;
        programs::checksums(server).with_context(|| server.name.clone())?;
    }
    for server in harness.all() {
        server.server.start().await?;
        ensure_holds(server, &expected).await.context("from disk")?;
        ensure_sums(server).await.with_context(|| server.name.clone())?;
    }
    Ok(())
}

/// Checks that pgbench's four sums agree: each transaction adds the same to all.
///
/// # Errors
///
/// They do not.
pub async fn ensure_sums(server: &TestServer) -> anyhow::Result<()> {
    let session = server.connect("sums").await?;
    let sum = |column: &str, table: &str| format!("(SELECT coalesce(sum({column}), 0) FROM pgbench_{table})");
    let sums = ["abalance accounts", "tbalance tellers", "bbalance branches", "delta history"];
    let sums: Vec<String> =
        sums.iter().filter_map(|pair| pair.split_once(' ')).map(|(column, table)| sum(column, table)).collect();
    let answer = session.run(&format!("SELECT {}", sums.join(", "))).await?;
    let row = answer.rows.first().context("no sums")?;
    ensure!(row.iter().all(|value| *value == row[0]), "the sums of accounts, tellers, branches, history: {row:?}");
    Ok(())
}
