//! The same is asked of each level: memory comes back, no swapping, nothing lost under load.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::ensure;
use onecopy_tests::clones::programs;
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::integrity::ensure_nothing_lost;
use onecopy_tests::memory::levels::{Hand, Level};
use onecopy_tests::memory::pages::{self, PAGE_BYTES};
use onecopy_tests::memory::pgbench::{Pgbench, Script, Until};
use onecopy_tests::memory::resizes::load_seconds;
use onecopy_tests::memory::segment::Segment;
use onecopy_tests::memory::squeeze::{self, Squeezed};
use tokio::time::Instant;

const CEILING_BYTES: u64 = 256 * MIB;
const ROWS: u64 = 240 * MIB / PAGE_BYTES;
/// Descriptors, hash tables and the like at this ceiling; at the level own a buffer shares its pages with its
/// neighbours.
const BESIDE_BYTES_MAX: u64 = 24 * MIB;
const PGBENCH_SCALE: u32 = 10;
const SECONDS: u64 = 10;
const PAUSE: Duration = Duration::from_millis(200);
/// On a busy machine these take longer than the time above.
const ROUNDS_MIN: u64 = 2;
/// Again and again until all is done.
const LOAD: Until = Until::Seconds(5);

async fn memory_comes_back(level: Level, version: Version) -> anyhow::Result<()> {
    let harness = Harness::start(level.plan(Plan::new(version, CEILING_BYTES))).await?;
    let leader = harness.leader();
    pages::make(leader, ROWS).await?;
    pages::read_all(leader).await?;
    let session = leader.connect("contents").await?;
    let question = "SELECT count(*), sum(id), sum(hashtext(body)::bigint) FROM pages";
    let expected = session.run(question).await?;
    let (hand, segment) = (Hand::of(level, leader).await?, Segment::of(leader)?);
    for target in [192 * MIB, 100 * MIB] {
        let before = segment.present_bytes()?;
        hand.shrink(target).await?;
        let present = segment.present_bytes()?;
        ensure!(present < before && present <= target + BESIDE_BYTES_MAX, "{present} of {before} bytes at {target}");
        assert_eq!(session.run(question).await?, expected);
    }
    hand.grow(CEILING_BYTES).await?;
    pages::read_all(leader).await?;
    assert_eq!(session.run(question).await?, expected);
    Ok(())
}

async fn nothing_is_lost_under_load(level: Level, version: Version) -> anyhow::Result<()> {
    let harness = Harness::start(level.plan(Plan::new(version, CEILING_BYTES))).await?;
    let leader = harness.leader();
    programs::pgbench_initialize(leader, PGBENCH_SCALE)?;
    let seconds = load_seconds(SECONDS)?;
    let (hand, deadline) = (Hand::of(level, leader).await?, Instant::now() + Duration::from_secs(seconds));
    let resized = AtomicBool::new(false);
    let load = async |script: Script| {
        while !resized.load(Ordering::Relaxed) {
            Pgbench::run(leader, &script, 2, LOAD).await?;
        }
        anyhow::Ok(())
    };
    let resizes = async {
        let mut rounds = 0;
        while Instant::now() < deadline || rounds < ROUNDS_MIN {
            let target = if rounds % 2 == 0 { 128 * MIB } else { 192 * MIB };
            match level {
                // A page that is dirty or read again meanwhile stays: pressing is all that can be done.
                Level::Own => drop(hand.press(target).await?),
                Level::Request | Level::Publish => hand.shrink(target).await?,
            }
            tokio::time::sleep(PAUSE).await;
            hand.grow(CEILING_BYTES).await?;
            tokio::time::sleep(PAUSE).await;
            rounds += 1;
        }
        resized.store(true, Ordering::Relaxed);
        anyhow::Ok(rounds)
    };
    let (rounds, (), ()) = tokio::try_join!(resizes, load(Script::Tpcb), load(Script::SelectOnly))?;
    println!("{level:?}: {rounds} rounds");
    drop(hand);
    ensure_nothing_lost(&harness).await
}

async fn a_squeeze_does_not_swap(level: Level) -> anyhow::Result<()> {
    let squeezed = Squeezed::full_server(level.plan(Plan::new(Version::Fifteen, squeeze::CEILING_BYTES))).await?;
    let hand = Hand::of(level, squeezed.harness.leader()).await?;
    hand.shrink(squeeze::TARGET_BYTES).await?;
    let hold = hand.hold(squeeze::TARGET_BYTES);
    let usage = squeezed.squeeze().await?;
    hold.end().await?;
    println!("{level:?}: {usage:?}");
    ensure!(usage.oom_kills == 0 && usage.swap_bytes <= squeeze::SWAPPED_BYTES_MAX, "{usage:?}");
    Ok(())
}

macro_rules! at_each_level {
    ($($(#[$documentation:meta])* $name:ident: $run:ident($($argument:expr),*);)*) => {
        $(
            $(#[$documentation])*
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() -> anyhow::Result<()> {
                $run($($argument),*).await
            }
        )*
    };
}

at_each_level! {
    /// Memory comes back at each level, and what is read is the same.
    ///
    /// Spec: A6
    m16_memory_comes_back_by_request_on_15: memory_comes_back(Level::Request, Version::Fifteen);
    /// Spec: A6
    m16_memory_comes_back_when_published_on_15: memory_comes_back(Level::Publish, Version::Fifteen);
    /// Spec: A6, nightly
    m16_memory_comes_back_when_published_on_17: memory_comes_back(Level::Publish, Version::Seventeen);
    /// Spec: A6
    m16_memory_comes_back_when_owned_on_15: memory_comes_back(Level::Own, Version::Fifteen);
    /// Spec: A6, nightly
    m16_memory_comes_back_when_owned_on_17: memory_comes_back(Level::Own, Version::Seventeen);
    /// Nothing is lost at any level while clients update.
    ///
    /// Spec: D3, nightly
    m17_nothing_is_lost_by_request: nothing_is_lost_under_load(Level::Request, Version::Fifteen);
    /// Spec: D3
    m17_nothing_is_lost_when_published: nothing_is_lost_under_load(Level::Publish, Version::Seventeen);
    /// Spec: D3
    m17_nothing_is_lost_when_owned: nothing_is_lost_under_load(Level::Own, Version::Fifteen);
    /// A server that gives way to a squeeze, at any level, is not swapped out, and nobody is killed for want of memory.
    ///
    /// Spec: A6
    m6_a_squeeze_does_not_swap_by_request: a_squeeze_does_not_swap(Level::Request);
    /// Spec: A6
    m6_a_squeeze_does_not_swap_when_published: a_squeeze_does_not_swap(Level::Publish);
    /// Spec: A6
    m6_a_squeeze_does_not_swap_when_owned: a_squeeze_does_not_swap(Level::Own);
}

/// The control: this is what a squeeze does to a server that does not give way.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m6_control_a_pool_that_does_not_give_way_is_swapped_out() -> anyhow::Result<()> {
    let plan = Plan::new(Version::Fifteen, squeeze::CEILING_BYTES).without_extension();
    let usage = Squeezed::full_server(plan).await?.squeeze().await?;
    println!("{usage:?}");
    ensure!(usage.swap_bytes >= squeeze::COLLAPSED_BYTES_MIN, "{usage:?}");
    Ok(())
}
