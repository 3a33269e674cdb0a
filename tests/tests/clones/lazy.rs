//! Clones that are filled while they run: under updates and schema changes of every kind, in both ways of recovery, on
//! both versions, several at once, and from each other.

use onecopy_clone::plan::Recovery;
use onecopy_tests::clones::cloning::Cloned;
use onecopy_tests::clones::contents::ensure_same;
use onecopy_tests::clones::harness::Harness;
use onecopy_tests::clones::load::{Load, LoadReport};
use onecopy_tests::clones::proof::{prove, prove_all, quiet};
use onecopy_tests::clones::traces;
use onecopy_tests::clones::version::Version;

/// Slow enough that several rounds of schema changes happen before the clone is whole.
const SLOW_BYTES_PER_SECOND: u64 = 128 << 10;

/// What must have happened on the source while content was missing.
const MEANWHILE: LoadReport = LoadReport { updates: 50, schema_rounds: 3 };

/// Lets much happen while clones are filled, then lets them become whole, then proves that they are clones.
async fn fill_under_load_and_prove(harness: &Harness, load: Load, clones: &[Cloned]) -> anyhow::Result<()> {
    load.go_on(MEANWHILE).await?;
    for cloned in clones {
        cloned.ensure_filling().await?;
        cloned.set_limit(None).await?;
    }
    for cloned in clones {
        cloned.wait_whole().await?;
    }
    load.stop().await?;
    for cloned in clones {
        traces::ensure_none(cloned.rendezvous()?, &cloned.clone).await?;
    }
    prove_all(&harness.source, clones.iter().map(|cloned| &cloned.clone)).await
}

async fn a_lazy_clone_is_the_same(version: Version, recovery: Recovery) -> anyhow::Result<()> {
    let harness = Harness::start(version).await?;
    harness.widen().await?;
    let load = Load::start(&harness.source).await?;
    load.go_on(LoadReport { updates: 50, schema_rounds: 1 }).await?;
    let mut plan = harness.plan(&harness.source, None, "clone-1");
    plan.recovery = recovery;
    plan.fill.limit_bytes_per_second = Some(SLOW_BYTES_PER_SECOND);
    let clones = harness.clone_lazily(&harness.source, vec![plan]).await?;
    fill_under_load_and_prove(&harness, load, &clones).await
}

/// Spec: D2, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lazy_clone_is_the_same_on_15_after_a_crash() -> anyhow::Result<()> {
    a_lazy_clone_is_the_same(Version::Fifteen, Recovery::Crash).await
}

/// Every row and ctid of every database is the source's, with updates, DROP, TRUNCATE, VACUUM FULL, REINDEX, CREATE and
/// DROP DATABASE while it is filled; with a tablespace and a relation over 1 GB; `lazy`, on 15 and 17, in both modes.
///
/// Spec: D2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lazy_clone_is_the_same_on_15_from_a_backup() -> anyhow::Result<()> {
    a_lazy_clone_is_the_same(Version::Fifteen, Recovery::Backup).await
}

/// Spec: D2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lazy_clone_is_the_same_on_17_after_a_crash() -> anyhow::Result<()> {
    a_lazy_clone_is_the_same(Version::Seventeen, Recovery::Crash).await
}

/// Spec: D2, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lazy_clone_is_the_same_on_16_after_a_crash() -> anyhow::Result<()> {
    a_lazy_clone_is_the_same(Version::Sixteen, Recovery::Crash).await
}

/// Spec: D2, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lazy_clone_is_the_same_on_18_after_a_crash() -> anyhow::Result<()> {
    a_lazy_clone_is_the_same(Version::Eighteen, Recovery::Crash).await
}

/// Spec: D2, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lazy_clone_is_the_same_on_17_from_a_backup() -> anyhow::Result<()> {
    a_lazy_clone_is_the_same(Version::Seventeen, Recovery::Backup).await
}

/// Spec: D2, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lazy_clone_is_the_same_on_16_from_a_backup() -> anyhow::Result<()> {
    a_lazy_clone_is_the_same(Version::Sixteen, Recovery::Backup).await
}

/// Spec: D2, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lazy_clone_is_the_same_on_18_from_a_backup() -> anyhow::Result<()> {
    a_lazy_clone_is_the_same(Version::Eighteen, Recovery::Backup).await
}

/// Spec: D2, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_clones_at_once_are_the_same() -> anyhow::Result<()> {
    let harness = Harness::start(Version::Fifteen).await?;
    let load = Load::start(&harness.source).await?;
    load.go_on(LoadReport { updates: 50, schema_rounds: 1 }).await?;
    let mut plans = Vec::new();
    for name in ["clone-1", "clone-2", "clone-3"] {
        let mut plan = harness.plan(&harness.source, None, name);
        plan.fill.limit_bytes_per_second = Some(SLOW_BYTES_PER_SECOND);
        plans.push(plan);
    }
    let clones = harness.clone_lazily(&harness.source, plans).await?;
    fill_under_load_and_prove(&harness, load, &clones).await
}

/// Two freezes of one source: the second clone is begun while the first one is filled.
///
/// Spec: D2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_that_is_begun_while_another_is_filled_is_the_same() -> anyhow::Result<()> {
    let harness = Harness::start(Version::Fifteen).await?;
    let load = Load::start(&harness.source).await?;
    let mut clones = Vec::new();
    for name in ["clone-1", "clone-2"] {
        load.go_on(LoadReport { updates: 20, schema_rounds: 1 }).await?;
        let mut plan = harness.plan(&harness.source, None, name);
        plan.fill.limit_bytes_per_second = Some(SLOW_BYTES_PER_SECOND);
        clones.extend(harness.clone_lazily(&harness.source, vec![plan]).await?);
    }
    fill_under_load_and_prove(&harness, load, &clones).await
}

/// A standby is a source like any other: its files are written by replay.
///
/// Spec: D2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_of_a_clone_is_the_same() -> anyhow::Result<()> {
    let harness = Harness::start(Version::Fifteen).await?;
    let load = Load::start(&harness.source).await?;
    load.go_on(LoadReport { updates: 20, schema_rounds: 1 }).await?;
    let plan = harness.plan(&harness.source, None, "clone-1");
    let first = harness.clone_lazily(&harness.source, vec![plan]).await?.remove(0);
    first.wait_whole().await?;
    let mut plan = harness.plan(&first.clone, Some(&harness.source), "clone-2");
    plan.fill.limit_bytes_per_second = Some(SLOW_BYTES_PER_SECOND);
    let second = harness.clone_lazily(&first.clone, vec![plan]).await?.remove(0);
    load.go_on(MEANWHILE).await?;
    second.ensure_filling().await?;
    second.set_limit(None).await?;
    second.wait_whole().await?;
    load.stop().await?;
    quiet(&harness.source).await?;
    ensure_same(&harness.source, &first.clone).await?;
    prove(&first.clone, &second.clone).await
}
