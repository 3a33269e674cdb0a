//! Clones that share their blocks with the source.

use onecopy_clone::plan::Recovery;
use onecopy_tests::clones::harness::Harness;
use onecopy_tests::clones::load::{Load, LoadReport};
use onecopy_tests::clones::proof::prove;
use onecopy_tests::clones::traces;
use onecopy_tests::clones::version::Version;

async fn a_clone_by_reflink_is_the_same(version: Version, recovery: Recovery) -> anyhow::Result<()> {
    let harness = Harness::start_on_xfs(version).await?;
    harness.widen().await?;
    let load = Load::start(&harness.source).await?;
    load.go_on(LoadReport { updates: 50, schema_rounds: 1 }).await?;
    let mut plan = harness.plan(&harness.source, None, "clone-1");
    plan.recovery = recovery;
    let cloned = harness.clone_by_reflink(&harness.source, vec![plan]).await?.remove(0);
    traces::ensure_ordinary(cloned.clone.server.data_directory())?;
    load.go_on(LoadReport { updates: 50, schema_rounds: 2 }).await?;
    load.stop().await?;
    prove(&harness.source, &cloned.clone).await
}

/// Spec: D2, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_by_reflink_is_the_same_on_15_after_a_crash() -> anyhow::Result<()> {
    a_clone_by_reflink_is_the_same(Version::Fifteen, Recovery::Crash).await
}

/// The same for `reflink` and `copy`.
///
/// Spec: D2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_by_reflink_is_the_same_on_15_from_a_backup() -> anyhow::Result<()> {
    a_clone_by_reflink_is_the_same(Version::Fifteen, Recovery::Backup).await
}

/// Spec: D2, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_by_reflink_is_the_same_on_17_after_a_crash() -> anyhow::Result<()> {
    a_clone_by_reflink_is_the_same(Version::Seventeen, Recovery::Crash).await
}
