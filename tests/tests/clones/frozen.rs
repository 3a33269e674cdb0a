//! The image is as of one moment: whatever the source does while a clone is filled, nothing of it comes into the
//! clone's files. The clone's own server never runs here, so that no replay covers it up. What PostgreSQL had written
//! before the freeze although its log was flushed later is no such thing ([`onecopy_tests::clones::unflushed`]).

use onecopy_clone::plan::Recovery;
use onecopy_clone::service::CloneState;
use onecopy_postgres::StopMode;
use onecopy_tests::clones::cloning::{log, make};
use onecopy_tests::clones::harness::Harness;
use onecopy_tests::clones::load::{Load, LoadReport};
use onecopy_tests::clones::pages::pages_after;
use onecopy_tests::clones::unflushed::LaterLog;
use onecopy_tests::clones::version::Version;

async fn nothing_after_the_freeze_is_in_the_clones_files(version: Version) -> anyhow::Result<()> {
    let harness = Harness::start(version).await?;
    let load = Load::start(&harness.source).await?;
    load.go_on(LoadReport { updates: 20, schema_rounds: 1 }).await?;
    let mut plan = harness.plan(&harness.source, None, "clone-1");
    plan.recovery = Recovery::Crash;
    plan.fill.limit_bytes_per_second = Some(128 << 10);
    let service = harness.service(&harness.source).await?;
    let (ready, _) = make(&service, vec![plan.clone()]).await?;
    load.go_on(LoadReport { updates: 100, schema_rounds: 3 }).await?;
    // All pages that differ, in all tables: they are written out while the clone does not have them.
    let session = harness.source.connect("changes").await?;
    session.run_all(&["UPDATE pgbench_accounts SET filler = 'new'", "CHECKPOINT"]).await?;
    let still = service.list().await?.into_iter().find(|progress| progress.target == plan.target);
    assert!(still.is_some_and(|progress| progress.state == CloneState::Filling), "{}", log(&service));
    service.set_limit(&plan.target, None).await?;
    let mut watching = service.watch(&plan.target);
    let mut last = None;
    while let Some(progress) = watching.next().await? {
        last = Some(progress.state);
    }
    assert_eq!(last, Some(CloneState::Whole), "{}", log(&service));
    load.stop().await?;
    const WAL_BUFFERS: &str = "SELECT setting::bigint * 8192 FROM pg_settings WHERE name = 'wal_buffers'";
    let wal_buffers = session.run(WAL_BUFFERS).await?.number()?.try_into()?;
    let source = &harness.source.server;
    source.stop(StopMode::Fast).await?;

    let frozen_at = ready[0].consistent_at;
    let pg_waldump = version.binaries()?.program("pg_waldump");
    let log = LaterLog::read(&pg_waldump, source.data_directory(), frozen_at, wal_buffers)?;
    let (pages, later) = pages_after(&plan.target, frozen_at)?;
    let unexplained = later.iter().filter(|page| !log.is_written_unflushed(page)).map(|page| log.describe(page));
    let unexplained: Vec<String> = unexplained.collect();
    assert!(
        unexplained.is_empty(),
        "{version:?}: {} of {pages} pages from after {frozen_at} (wal_buffers {wal_buffers}), besides {} that were \
         written before their log was flushed:\n{}",
        unexplained.len(),
        later.len() - unexplained.len(),
        unexplained.join("\n")
    );
    // The control: the source's own files are full of them, most by changes that nothing excuses.
    let (_, later) = pages_after(source.data_directory(), frozen_at)?;
    let later: Vec<_> = later.iter().filter(|page| !log.is_written_unflushed(page)).collect();
    assert!(later.len() > 1000, "{version:?}: only {} pages of the source have changed", later.len());
    Ok(())
}

/// No page of a clone's files is from after its freeze, whatever the source writes meanwhile.
///
/// Spec: D2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_after_the_freeze_is_in_the_clones_files_on_15() -> anyhow::Result<()> {
    nothing_after_the_freeze_is_in_the_clones_files(Version::Fifteen).await
}

/// Spec: D2, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_after_the_freeze_is_in_the_clones_files_on_17() -> anyhow::Result<()> {
    nothing_after_the_freeze_is_in_the_clones_files(Version::Seventeen).await
}
