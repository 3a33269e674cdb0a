//! The checker itself: clones that are wrong on purpose are found out.

use onecopy_postgres::StopMode;
use onecopy_testing::try_until_async;
use onecopy_tests::clones::contents::{ensure_holds, ensure_same};
use onecopy_tests::clones::damage::{read_page, relation_path, write_page};
use onecopy_tests::clones::harness::Harness;
use onecopy_tests::clones::pages::PAGE_BYTES;
use onecopy_tests::clones::programs;
use onecopy_tests::clones::proof::{ensure_files_sound, quiet};
use onecopy_tests::clones::version::Version;

/// A page of zeros is a valid page without rows: only what it held gives it away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_that_was_never_filled_is_found() -> anyhow::Result<()> {
    let harness = Harness::start(Version::Fifteen).await?;
    // It must not write the page anew.
    quiet(&harness.source).await?;
    let clone = harness.copy("clone-1").await?;
    ensure_same(&harness.source, &clone).await?;
    programs::amcheck(&clone)?;
    let path = relation_path(&clone, "pgbench_accounts").await?;
    clone.server.stop(StopMode::Fast).await?;
    write_page(&clone, &path, 7, &[0; PAGE_BYTES])?;
    programs::checksums(&clone)?;
    clone.server.start().await?;
    let error = ensure_same(&harness.source, &clone).await.expect_err("rows are missing").to_string();
    assert!(error.contains("shop: public.pgbench_accounts"), "{error}");
    // An index that points to nothing, or rows that an index does not know.
    let path = relation_path(&clone, "pgbench_accounts_pkey").await?;
    clone.server.stop(StopMode::Fast).await?;
    write_page(&clone, &path, 3, &[0; PAGE_BYTES])?;
    clone.server.start().await?;
    let error = programs::amcheck(&clone).expect_err("an index page is missing").to_string();
    assert!(error.contains("pgbench_accounts_pkey"), "{error}");
    Ok(())
}

/// A page that was changed after the freeze: with what a reader sees, and with its position in the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_from_the_future_is_found() -> anyhow::Result<()> {
    let harness = Harness::start(Version::Fifteen).await?;
    // Whoever looks at a table keeps its rows from being frozen.
    quiet(&harness.source).await?;
    let clone = harness.copy("clone-1").await?;
    let frozen = ensure_same(&harness.source, &clone).await?;
    let path = relation_path(&clone, "pgbench_accounts").await?;
    clone.server.stop(StopMode::Fast).await?;
    let session = harness.source.connect("future").await?;
    // What the clone has said of its snapshots would keep the old row.
    let sender = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'walsender'";
    try_until_async("its sender ends", async || session.run(sender).await?.number(), |senders| *senders == 0).await?;
    session.run("SELECT pg_drop_replication_slot('clone_1')").await?;
    session.run("UPDATE pgbench_accounts SET abalance = 1 WHERE aid = 1").await?;
    // A row of a transaction that the clone does not know is not shown yet; one that is known to all is.
    session.run_all(&["VACUUM FREEZE pgbench_accounts", "CHECKPOINT"]).await?;
    let end = session.run("SELECT (pg_relation_size('pgbench_accounts') / 8192 - 1)::int").await?.number()?;
    for page in [0, u64::try_from(end)?] {
        write_page(&clone, &path, page, &read_page(&harness.source, &path, page)?)?;
    }
    let error = ensure_files_sound(&clone).await.expect_err("pages of the future").to_string();
    assert!(error.contains("pages after"), "{error}");
    // It must not see the log that would make the page right.
    harness.source.server.stop(StopMode::Fast).await?;
    clone.server.start().await?;
    let error = ensure_holds(&clone, &frozen).await.expect_err("a row of the future").to_string();
    assert!(error.contains("shop: public.pgbench_accounts"), "{error}");
    Ok(())
}
