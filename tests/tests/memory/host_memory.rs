//! A pool that grew over its group's limit would be killed, or swapped: it is not grown.

use anyhow::ensure;
use onecopy_testing::ControlGroup;
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::pages::{self, PAGE_BYTES};
use onecopy_tests::memory::pgbench::{Pgbench, Script, Until};

const CEILING_BYTES: u64 = 256 * MIB;
const LIMIT_BYTES: u64 = 160 * MIB;
const ROWS: u64 = 240 * MIB / PAGE_BYTES;

/// Growth for which host or control group have no room is refused.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m15_growth_without_room_is_refused() -> anyhow::Result<()> {
    let plan = Plan::new(Version::Fifteen, CEILING_BYTES).set("onecopy.memory_target", "64MB");
    let harness = Harness::start(plan).await?;
    let (leader, group) = (harness.leader(), ControlGroup::make()?);
    group.take(&leader.server)?;
    pages::make(leader, ROWS).await?;
    group.limit(LIMIT_BYTES).await?;
    let pool = harness.pool().await?;
    let refusal = pool.want("256MB", true).await.expect_err("there is no room");
    assert_eq!(refusal.code, "53200", "{refusal}");
    let status = pool.steady().await?;
    ensure!(status.pool_bytes < LIMIT_BYTES, "{status:?}");
    Pgbench::run(leader, &Script::uniform_pages(ROWS), 2, Until::Seconds(3)).await?;
    assert_eq!(group.usage()?.oom_kills, 0);
    // With room again it grows.
    group.limit(2 * CEILING_BYTES).await?;
    assert_eq!(pool.resize(CEILING_BYTES).await?, CEILING_BYTES);
    Ok(())
}
