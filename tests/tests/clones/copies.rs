//! PostgreSQL's own base backup under the same load and the same checker: what other methods are compared with.

use onecopy_tests::clones::harness::Harness;
use onecopy_tests::clones::load::{Load, LoadReport};
use onecopy_tests::clones::proof::prove;
use onecopy_tests::clones::version::Version;

async fn a_base_backup_is_the_same(version: Version) -> anyhow::Result<()> {
    let harness = Harness::start(version).await?;
    harness.widen().await?;
    let load = Load::start(&harness.source).await?;
    load.go_on(LoadReport { updates: 50, schema_rounds: 1 }).await?;
    let clone = harness.copy("clone-1").await?;
    load.go_on(LoadReport { updates: 50, schema_rounds: 3 }).await?;
    load.stop().await?;
    prove(&harness.source, &clone).await
}

/// Spec: D2, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_base_backup_under_load_is_the_same_on_15() -> anyhow::Result<()> {
    a_base_backup_is_the_same(Version::Fifteen).await
}

/// Spec: D2, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_base_backup_under_load_is_the_same_on_17() -> anyhow::Result<()> {
    a_base_backup_is_the_same(Version::Seventeen).await
}
