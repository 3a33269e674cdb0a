//! Sessions that pin many pages at once, in the smallest pool that there may be.

use anyhow::ensure;
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::pages::{self, PAGE_BYTES};

/// One row a page: so many that a session comes to add as many pages at once as it ever does.
const ROWS: u64 = 400;
const SESSIONS: u64 = 48;
/// What a session pins that adds pages to its table, from 16 on (`MAX_BUFFERS_TO_EXTEND_BY` of PostgreSQL's `hio.c`).
const PAGES_ADDED_AT_ONCE: u64 = 64;

/// PostgreSQL lets each session pin its share of the ceiling, and who then finds no buffer fails. The ceiling is some
/// times the floor: where it is a hundred times that, who is halted in its search finds none (`docs/decisions/0008`).
async fn there_are_buffers_at_the_floor(plan: Plan, pinned_at_once: u64) -> anyhow::Result<()> {
    let ceiling_bytes = plan.ceiling_bytes;
    let harness = Harness::start(plan.set("onecopy.memory_floor", "1MB")).await?;
    let (leader, pool) = (harness.leader(), harness.pool().await?);
    pages::make(leader, ROWS).await?;
    let file = leader.server.data_directory().join("rows");
    pool.session().run(&format!("COPY pages TO '{}' (FORMAT binary)", file.display())).await?;
    let floor_bytes = pool.status().await?.floor_bytes;
    ensure!(floor_bytes >= SESSIONS * pinned_at_once * PAGE_BYTES, "the floor is {floor_bytes} bytes");
    ensure!(floor_bytes < ceiling_bytes / 2, "it was no test: the floor is {floor_bytes} bytes");
    assert_eq!(pool.resize(floor_bytes).await?, floor_bytes);
    let mut loads = Vec::new();
    for number in 0..SESSIONS {
        let session = leader.connect("loader").await?;
        session.run(&format!("CREATE TABLE loaded_{number} (LIKE pages INCLUDING STORAGE)")).await?;
        loads.push(session.start(&format!("COPY loaded_{number} FROM '{}' (FORMAT binary)", file.display())));
    }
    for load in loads {
        assert_eq!(load.await??.count, ROWS);
    }
    assert_eq!(pool.steady().await?.pool_bytes, floor_bytes);
    Ok(())
}

/// In a much smaller pool a process that looks for a buffer can come to believe that all are pinned.
///
/// Spec: L1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m30_no_floor_is_below_a_64th_of_the_ceiling() -> anyhow::Result<()> {
    let plan = Plan::new(Version::Fifteen, 1024 * MIB).set("onecopy.memory_floor", "1MB");
    let harness = Harness::start(plan).await?;
    let pool = harness.pool().await?;
    assert_eq!(pool.status().await?.floor_bytes, 16 * MIB);
    let refusal = pool.want("8MB", true).await.expect_err("below the floor");
    assert_eq!(refusal.code, "22003", "{refusal}");
    assert_eq!(pool.resize(16 * MIB).await?, 16 * MIB);
    Ok(())
}

/// At the floor there are buffers for what all sessions pin at once: none fails for want of one (up to 128 that read or
/// write ahead by the server's settings).
///
/// Spec: L1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m30_there_are_buffers_at_the_floor_on_15() -> anyhow::Result<()> {
    there_are_buffers_at_the_floor(Plan::new(Version::Fifteen, 64 * MIB), 16).await
}

/// Spec: L1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m30_there_are_buffers_at_the_floor_on_17() -> anyhow::Result<()> {
    there_are_buffers_at_the_floor(Plan::new(Version::Seventeen, 256 * MIB), PAGES_ADDED_AT_ONCE).await
}

/// Spec: L1, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m30_there_are_buffers_at_the_floor_on_16() -> anyhow::Result<()> {
    there_are_buffers_at_the_floor(Plan::new(Version::Sixteen, 256 * MIB), PAGES_ADDED_AT_ONCE).await
}

/// Spec: L1, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m30_there_are_buffers_at_the_floor_on_18() -> anyhow::Result<()> {
    // The server's defaults.
    let plan = Plan::new(Version::Eighteen, 512 * MIB);
    let plan = plan.set("effective_io_concurrency", 16).set("maintenance_io_concurrency", 16);
    there_are_buffers_at_the_floor(plan, PAGES_ADDED_AT_ONCE).await
}
