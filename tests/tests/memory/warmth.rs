//! What is in a pool after it was made smaller, and what is known of what a larger one would save.

use anyhow::{Context, ensure};
use onecopy_postgres::StopMode;
use onecopy_testing::{WAIT_MAX, try_until_async};
use onecopy_tests::client::Session;
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::pages::{self, PAGE_BYTES};
use onecopy_tests::memory::pgbench::{Pgbench, Script, Until};
use onecopy_tests::servers::TestServer;

const CEILING_BYTES: u64 = 256 * MIB;
const SMALL_BYTES: u64 = 80 * MIB;
const ROWS: u64 = 200 * MIB / PAGE_BYTES;
/// In parts of all accesses.
const RATIO_DIFFERENCE_MAX: f64 = 0.02;
/// Enough to touch every page that is hot.
const WARM_UP: Until = Until::Transactions(40_000);
/// Chance alone makes a difference of a quarter of a hundredth then.
const MEASURED: Until = Until::Transactions(25_000);
const CLIENTS: u32 = 2;
/// Of all reads that a pool twice as large would save, at least.
const SHARE_MIN: f64 = 0.5;
/// Reads a second that a pool twice as large would save, at least.
const SAVED_MIN: f64 = 100.0;

/// Pages of the table found in the pool, of those wanted, while a run goes on.
async fn hit_ratio(server: &TestServer, until: Until) -> anyhow::Result<f64> {
    let count = async || -> anyhow::Result<(f64, f64)> {
        let session = server.connect("statistics").await?;
        let answer = session
            .run("SELECT heap_blks_hit, heap_blks_read FROM pg_statio_user_tables WHERE relname = 'pages'")
            .await?;
        let number = |column: usize| answer.rows[0][column].as_deref().context("a count")?.parse().context("a number");
        Ok((number(0)?, number(1)?))
    };
    let before = count().await?;
    let done = Pgbench::run(server, &Script::gaussian_pages(ROWS), CLIENTS, until).await?;
    let more = async || count().await.map(|after| (after.0 - before.0, after.1 - before.1));
    // A back end counts what it did when it ends, which may be after its client has.
    let what = format!("hits and reads of {done} transactions are counted");
    let (hits, reads) = try_until_async(&what, more, |(hits, reads)| hits + reads >= done as f64).await?;
    Ok(hits / (hits + reads))
}

async fn a_pool_that_was_shrunk_is_as_warm_as_one_born_small(version: Version) -> anyhow::Result<()> {
    let born_small = {
        let harness = Harness::start(Plan::new(version, SMALL_BYTES).without_extension()).await?;
        pages::make(harness.leader(), ROWS).await?;
        hit_ratio(harness.leader(), WARM_UP).await?;
        hit_ratio(harness.leader(), MEASURED).await?
    };
    let harness = Harness::start(Plan::new(version, CEILING_BYTES)).await?;
    let leader = harness.leader();
    pages::make(leader, ROWS).await?;
    hit_ratio(leader, WARM_UP).await?;
    let large = hit_ratio(leader, MEASURED).await?;
    harness.pool().await?.resize(SMALL_BYTES).await?;
    let at_once = hit_ratio(leader, MEASURED).await?;
    let later = hit_ratio(leader, MEASURED).await?;
    println!("born small {born_small:.4}, large {large:.4}, shrunk {at_once:.4}, later {later:.4}");
    // Otherwise nothing would be proven.
    ensure!(large - born_small >= 0.05 && large >= 0.98, "{large} in the large pool, {born_small} in the small one");
    for shrunk in [at_once, later] {
        ensure!(shrunk >= born_small - RATIO_DIFFERENCE_MAX, "{shrunk} after shrinking, {born_small} born small");
    }
    Ok(())
}

/// A pool that was shrunk finds what one born at that size finds, within two hundredths.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m12_a_pool_that_was_shrunk_is_as_warm_as_one_born_small_on_15() -> anyhow::Result<()> {
    a_pool_that_was_shrunk_is_as_warm_as_one_born_small(Version::Fifteen).await
}

/// Spec: A6, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m12_a_pool_that_was_shrunk_is_as_warm_as_one_born_small_on_17() -> anyhow::Result<()> {
    a_pool_that_was_shrunk_is_as_warm_as_one_born_small(Version::Seventeen).await
}

/// The largest number of reads a second that a pool of any larger size would have saved, and its share of all reads.
async fn ghosts(session: &Session) -> anyhow::Result<(f64, f64)> {
    let question = "SELECT coalesce(max(hits_per_second), 0), coalesce(max(share), 0) FROM onecopy_memory_ghost_hits()";
    let answer = session.run(question).await?;
    let number = |column: usize| answer.rows[0][column].as_deref().context("a number")?.parse().context("a number");
    Ok((number(0)?, number(1)?))
}

/// Ghost hits tell what a larger pool would save, and nothing when all has room; the working set is what is used again
/// and again.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m13_ghost_hits_tell_what_a_larger_pool_would_save() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES)).await?;
    let leader = harness.leader();
    pages::make(leader, ROWS).await?;
    let session = leader.connect("ghosts").await?;
    // All that is read has room.
    let script = Script::uniform_pages(160 * MIB / PAGE_BYTES);
    Pgbench::run(leader, &script, CLIENTS, Until::Seconds(12)).await?;
    let (saved, _) = ghosts(&session).await?;
    ensure!(saved < 1.0, "{saved} reads a second would be saved by more room than there is need for");
    // Only half has room: twice as much would save nearly all reads.
    harness.pool().await?.resize(SMALL_BYTES).await?;
    // Longer than the window of 60 s that the means are of: before, they tell of what was done before, too.
    let run = Pgbench::start(leader, &script, CLIENTS, Until::Seconds(2 * WAIT_MAX.as_secs()))?;
    let is_enough = |(saved, share): &(f64, f64)| *saved >= SAVED_MIN && *share >= SHARE_MIN;
    let (saved, share) =
        try_until_async("a larger pool would save so much", async || ghosts(&session).await, is_enough).await?;
    println!("{saved} reads a second would be saved, {share} of all");
    run.stop().await
}

/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m13_the_working_set_is_what_is_used_again_and_again() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES)).await?;
    let leader = harness.leader();
    pages::make(leader, ROWS).await?;
    // Nothing is in the pool that was used to make the table.
    leader.server.restart(StopMode::Fast).await?;
    pages::read_all(leader).await?;
    let rows = 64 * MIB / PAGE_BYTES;
    Pgbench::run(leader, &Script::uniform_pages(rows), CLIENTS, Until::Transactions(40_000)).await?;
    let session = leader.connect("working set").await?;
    let used = session.run("SELECT onecopy_memory_working_set(3)").await?.number()?;
    let (least, most) = (i64::try_from(56 * MIB)?, i64::try_from(96 * MIB)?);
    ensure!((least..=most).contains(&used), "{used} bytes are used again and again, of 64 MB");
    // All that is in the pool; that it was used once is forgotten after ten seconds.
    let all = session.run("SELECT onecopy_memory_working_set(0)").await?.number()?;
    ensure!(all >= i64::try_from(180 * MIB)?, "{all} bytes are in the pool at all");
    Ok(())
}
