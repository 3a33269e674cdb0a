//! The checks themselves: memory that is taken wrongly is found out.

use onecopy_postgres::StopMode;
use onecopy_tests::clones::version::Version;
use onecopy_tests::clones::{damage, programs};
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::integrity::ensure_sums;
use onecopy_tests::memory::pgbench::{Pgbench, Script, Until};
use onecopy_tests::memory::segment::Segment;

/// All of it is used by the tables.
const POOL_BYTES: u64 = 16 * MIB;
const PGBENCH_SCALE: u32 = 2;

/// Memory that goes without capture: pages in use are zeros, and what was changed in them is lost.
///
/// Spec: D3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m3_control_memory_taken_without_capture_is_found_out() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, POOL_BYTES).without_extension()).await?;
    let leader = harness.leader();
    programs::pgbench_initialize(leader, PGBENCH_SCALE)?;
    Pgbench::run(leader, &Script::Tpcb, 2, Until::Transactions(500)).await?;
    ensure_sums(leader).await?;
    let segment = Segment::of(leader)?;
    // Descriptors and locks lie at both ends.
    segment.punch(segment.length_bytes * 2 / 5..segment.length_bytes * 3 / 5)?;
    let error = format!("{:#}", ensure_sums(leader).await.expect_err("pages are gone"));
    // Data or an index that is damaged (SQLSTATE XX001 and XX002), or sums that do not agree; no server that is gone.
    assert!(error.contains("XX00") || error.contains("sums"), "{error}");
    Ok(())
}

/// A change that was in memory only and went with it: the page on disk is an older one, and sound by itself.
///
/// Spec: D3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m3_control_a_change_that_was_not_written_is_found_out() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, POOL_BYTES).without_extension()).await?;
    let leader = harness.leader();
    programs::pgbench_initialize(leader, PGBENCH_SCALE)?;
    leader.connect("checkpoint").await?.run("CHECKPOINT").await?;
    let path = damage::relation_path(leader, "pgbench_branches").await?;
    let old = damage::read_page(leader, &path, 0)?;
    Pgbench::run(leader, &Script::Tpcb, 1, Until::Transactions(20)).await?;
    leader.server.stop(StopMode::Fast).await?;
    damage::write_page(leader, &path, 0, &old)?;
    programs::checksums(leader)?;
    leader.server.start().await?;
    let error = ensure_sums(leader).await.expect_err("a change is lost").to_string();
    assert!(error.contains("sums"), "{error}");
    Ok(())
}
