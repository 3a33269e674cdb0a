//! That a clone is an ordinary, whole, independent server.

use std::time::Duration;

use anyhow::ensure;
use onecopy_postgres::{Lsn, StopMode};
use onecopy_testing::try_until_async;

use crate::client::Session;
use crate::clones::contents::{Contents, contents, ensure_holds, ensure_same_as};
use crate::clones::harness::SECOND_DATABASE;
use crate::clones::{pages, programs};
use crate::servers::{DATABASE, TestServer};

const PROMOTION_TIMEOUT: Duration = Duration::from_secs(180);

/// A launcher that has not read the setting yet begins another worker.
const AUTOVACUUMS: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE backend_type IN ('autovacuum launcher', 'autovacuum worker')";

/// Rows that the visibility map promises to everybody and that are not visible to everybody, or not frozen: a map that
/// is newer or older than its table.
const WRONG_VISIBILITY: &str = "SELECT coalesce(sum((SELECT count(*) FROM pg_check_visible(c.oid))
    + (SELECT count(*) FROM pg_check_frozen(c.oid))), 0)::bigint
    FROM pg_class c WHERE c.relkind IN ('r', 'm', 't') AND c.relpersistence = 'p'";

/// Proves a clone that is whole while its source rests: all rows at their places; all checksums; no page from after its
/// last position; the same after a restart from its plain directory; all indexes; promotion; visibility; writes.
/// It is no standby afterwards.
///
/// # Errors
///
/// The first thing that is not so.
pub async fn prove(source: &TestServer, clone: &TestServer) -> anyhow::Result<()> {
    prove_all(source, [clone]).await
}

/// As [`prove`], for all clones of a source.
///
/// # Errors
///
/// As [`prove`].
pub async fn prove_all<'a>(
    source: &TestServer,
    clones: impl IntoIterator<Item = &'a TestServer>,
) -> anyhow::Result<()> {
    quiet(source).await?;
    let mut expected = contents(source).await?;
    for clone in clones {
        expected = prove_as(source, expected, clone).await?;
    }
    Ok(())
}

/// Of a quiet source that held `expected`; what it holds.
async fn prove_as(source: &TestServer, expected: Contents, clone: &TestServer) -> anyhow::Result<Contents> {
    let expected = ensure_same_as(source, expected, clone).await?;
    ensure_files_sound(clone).await?;
    // A primary that has just begun analyses its tables, too, and finds other things than its source.
    without_autovacuum(clone);
    clone.server.start().await?;
    let expected = ensure_same_as(source, expected, clone).await?;
    programs::amcheck(clone)?;
    clone.server.promote(PROMOTION_TIMEOUT).await?;
    ensure_holds(clone, &expected).await?;
    ensure_takes_writes(clone).await?;
    Ok(expected)
}

/// Ends what a primary does by itself: from here on its tables stay as they are.
///
/// # Errors
///
/// It does not run; an autovacuum that is at work does not come to its end.
pub async fn quiet(server: &TestServer) -> anyhow::Result<()> {
    without_autovacuum(server);
    server.server.reload().await?;
    // Workers that have begun go on through their whole database, whatever the setting is meanwhile.
    let session = Session::connect("quiet", &server.config("postgres")).await?;
    let what = format!("{} vacuums no more by itself", server.name);
    try_until_async(&what, async || session.run(AUTOVACUUMS).await?.number(), |working| *working == 0).await?;
    Ok(())
}

fn without_autovacuum(server: &TestServer) {
    let mut settings = server.server.settings();
    settings.set("autovacuum", "off");
    server.server.set_settings(settings);
}

/// Stops a clone and looks at its files.
///
/// # Errors
///
/// Wrong checksums, pages from the future.
pub async fn ensure_files_sound(clone: &TestServer) -> anyhow::Result<()> {
    clone.server.stop(StopMode::Fast).await?;
    let verified = programs::checksums(clone)?;
    let control = clone.server.control_file()?;
    ensure!(control.min_recovery_point > Lsn(0), "{} was no standby: {control:?}", clone.name);
    let (pages, later) = pages::pages_after(clone.server.data_directory(), control.min_recovery_point)?;
    ensure!(later.is_empty(), "pages after {}: {later:?}", control.min_recovery_point);
    ensure!(verified >= pages, "{verified} pages verified, {pages} there");
    Ok(())
}

async fn ensure_takes_writes(server: &TestServer) -> anyhow::Result<()> {
    for database in [DATABASE, SECOND_DATABASE] {
        let session = Session::connect("visibility", &server.config(database)).await?;
        let wrong = session.run(WRONG_VISIBILITY).await?.number()?;
        ensure!(wrong == 0, "{wrong} rows of {database} on {} are not as their map says", server.name);
    }
    let session = server.connect("writer").await?;
    // Unlogged tables are made anew, and empty.
    ensure!(session.run("SELECT count(*) FROM scratch").await?.number()? == 0, "unlogged rows came along");
    session.run("INSERT INTO scratch VALUES (1)").await?;
    let next = session.run("SELECT nextval('numbers')").await?.number()?;
    ensure!(next > 0, "the sequence gave {next}");
    let before = session.run("SELECT sum(abalance) FROM pgbench_accounts").await?.number()?;
    session.run("UPDATE pgbench_accounts SET abalance = abalance + 1").await?;
    session.run_all(&["INSERT INTO placed VALUES (-1, 'written')", "VACUUM"]).await?;
    // Who has looked at its template may be on the way out still.
    session.run_when_unused("CREATE DATABASE written").await?;
    let after = session.run("SELECT sum(abalance) - count(*) FROM pgbench_accounts").await?.number()?;
    ensure!(before == after, "{} held {before}, then {after}", server.name);
    Ok(())
}
