//! Whoever dies while a clone is filled: the source goes on unharmed, and the clone is the same, or gone; it never
//! shows what it does not have.

use std::time::Duration;

use anyhow::Context;
use onecopy_clone::service::{HYDRATOR_COMMAND, KEEPER_COMMAND, Rendezvous, Service};
use onecopy_postgres::StopMode;
use onecopy_testing::{try_until_async, until_async};
use onecopy_tests::clones::cloning::{Cloned, program};
use onecopy_tests::clones::harness::Harness;
use onecopy_tests::clones::load::{Load, LoadReport};
use onecopy_tests::clones::programs;
use onecopy_tests::clones::proof::prove;
use onecopy_tests::clones::traces;
use onecopy_tests::clones::version::Version;
use rustix::process::Signal;

/// Slow enough to die in the middle.
const SLOW_BYTES_PER_SECOND: u64 = 128 << 10;
/// A statement that waits for content which never comes does not answer meanwhile.
const NO_ANSWER_WITHIN: Duration = Duration::from_secs(3);
const SOME: LoadReport = LoadReport { updates: 20, schema_rounds: 1 };
/// Without DROP DATABASE, which removes files that a hydrator alone has open: one that dies just then may cost the
/// clone.
const UPDATES: LoadReport = LoadReport { updates: 100, schema_rounds: 0 };

async fn begin() -> anyhow::Result<(Harness, Load, Cloned)> {
    begin_under(SOME).await
}

/// A clone that is being filled while its source does `work` again and again.
async fn begin_under(work: LoadReport) -> anyhow::Result<(Harness, Load, Cloned)> {
    let harness = Harness::start(Version::Fifteen).await?;
    let load = match work.schema_rounds {
        0 => Load::of_updates(&harness.source).await?,
        _ => Load::start(&harness.source).await?,
    };
    load.go_on(work).await?;
    let mut plan = harness.plan(&harness.source, None, "clone-1");
    plan.fill.limit_bytes_per_second = Some(SLOW_BYTES_PER_SECOND);
    let cloned = harness.clone_lazily(&harness.source, vec![plan]).await?.remove(0);
    cloned.ensure_filling().await?;
    Ok((harness, load, cloned))
}

/// The clone becomes whole although something died, and is the same.
async fn ensure_becomes_whole(harness: &Harness, load: Load, cloned: &Cloned) -> anyhow::Result<()> {
    load.go_on(UPDATES).await?;
    cloned.set_limit(None).await?;
    cloned.wait_whole().await?;
    load.stop().await?;
    anyhow::ensure!(
        cloned.clone.server.is_running(),
        "the clone's server is gone: {}",
        cloned.clone.server.log_complaints()
    );
    traces::ensure_none(cloned.rendezvous()?, &cloned.clone).await?;
    prove(&harness.source, &cloned.clone).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hydrator_that_dies_again_and_again_is_replaced() -> anyhow::Result<()> {
    let (harness, load, cloned) = begin_under(UPDATES).await?;
    for death in 0..3 {
        traces::signal(cloned.rendezvous()?, HYDRATOR_COMMAND, Signal::KILL)
            .await
            .with_context(|| format!("death {death}"))?;
        load.go_on(UPDATES).await?;
        cloned.ensure_filling().await?;
    }
    ensure_becomes_whole(&harness, load, &cloned).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hydrator_that_hangs_is_replaced() -> anyhow::Result<()> {
    let (harness, load, cloned) = begin_under(UPDATES).await?;
    traces::signal(cloned.rendezvous()?, HYDRATOR_COMMAND, Signal::STOP).await?;
    load.go_on(UPDATES).await?;
    cloned.ensure_filling().await?;
    ensure_becomes_whole(&harness, load, &cloned).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_keeper_the_clone_becomes_whole() -> anyhow::Result<()> {
    let (harness, load, cloned) = begin().await?;
    traces::signal(cloned.rendezvous()?, KEEPER_COMMAND, Signal::KILL).await?;
    ensure_becomes_whole(&harness, load, &cloned).await
}

/// Spec: A5, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clones_server_that_dies_starts_again_while_it_is_filled() -> anyhow::Result<()> {
    let (harness, load, cloned) = begin().await?;
    cloned.clone.server.crash_stop().await?;
    load.go_on(SOME).await?;
    cloned.clone.server.start().await?;
    cloned.ensure_filling().await?;
    ensure_becomes_whole(&harness, load, &cloned).await
}

/// The source's recovery after a crash writes to files that the clone does not have yet.
///
/// Spec: A5, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_dies_starts_again_while_its_clone_is_filled() -> anyhow::Result<()> {
    let (harness, load, cloned) = begin().await?;
    harness.source.server.crash_stop().await?;
    // Its clients have lost their connections.
    assert!(load.stop().await.is_err());
    harness.source.server.start().await?;
    cloned.ensure_filling().await?;
    let load = Load::of_updates(&harness.source).await?;
    load.go_on(LoadReport { updates: 50, schema_rounds: 0 }).await?;
    cloned.set_limit(None).await?;
    cloned.wait_whole().await?;
    load.stop().await?;
    prove(&harness.source, &cloned.clone).await
}

/// Kills keeper and hydrator so that neither can do anything about the other.
async fn kill_service(rendezvous: &Rendezvous) -> anyhow::Result<()> {
    for signal in [Signal::STOP, Signal::KILL] {
        for command in [KEEPER_COMMAND, HYDRATOR_COMMAND] {
            traces::signal(rendezvous, command, signal).await?;
        }
    }
    // Until the last thread has gone they hold what they have open.
    until_async("the killed service holds its lock no more", async || !rendezvous.is_held()).await;
    Ok(())
}

/// Spec: A3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_service_the_source_goes_on_and_the_clone_shows_nothing_false() -> anyhow::Result<()> {
    let (harness, load, cloned) = begin().await?;
    let reader = cloned.clone.connect("reader").await?;
    kill_service(cloned.rendezvous()?).await?;
    load.go_on(LoadReport { updates: 50, schema_rounds: 2 }).await?;
    // Content that is missing is waited for: zeros would be a smaller count, without any error.
    let count = reader.start("SELECT count(*) FROM pgbench_accounts");
    let answer = tokio::time::timeout(NO_ANSWER_WITHIN, count).await;
    assert!(answer.is_err(), "it has answered without its content: {answer:?}");
    // The next command that has to do with this source clears up.
    let service = harness.service(&harness.source).await?;
    let session = harness.source.connect("slots").await?;
    let left = async || {
        let slots = session.run("SELECT count(*) FROM pg_replication_slots").await?.number()?;
        Ok((slots, cloned.plan.target.exists(), cloned.clone.server.is_running()))
    };
    try_until_async("no slot, no clone and no server is left", left, |left| *left == (0, false, false)).await?;
    load.go_on(SOME).await?;
    // And another one can be made in its place.
    let again = harness.clone_lazily(&harness.source, vec![cloned.plan.clone()]).await?.remove(0);
    drop(service);
    ensure_becomes_whole(&harness, load, &again).await
}

/// All processes die at once, and what lies in `/run` is gone, as after a loss of power; what was written to files
/// stays.
///
/// Spec: C6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_crash_of_the_host_a_clone_that_is_not_whole_does_not_start() -> anyhow::Result<()> {
    let (harness, load, cloned) = begin().await?;
    kill_service(cloned.rendezvous()?).await?;
    cloned.clone.kill();
    harness.source.kill();
    assert!(load.stop().await.is_err());
    for server in [&cloned.clone.server, &harness.source.server] {
        until_async("the killed server has ended", async || !server.is_running()).await;
    }
    std::fs::remove_dir_all(cloned.rendezvous()?.directory())?;

    let said = programs::start_by_hand(&cloned.clone)?;
    assert!(said.contains("is not a database cluster directory"), "{said}");
    harness.source.server.start().await?;
    // Whoever clones next finds what is left, and the directory is free again.
    assert!(Service::find(&program()?, cloned.rendezvous()?.clone()).await?.is_none());
    harness.source.server.restart(StopMode::Fast).await?;
    Ok(())
}
