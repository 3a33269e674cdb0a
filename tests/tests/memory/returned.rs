//! Memory that is given back is really the machine's again, and comes back when it is wanted.

use anyhow::{Context, ensure};
use onecopy_testing::{ControlGroup, try_until_async};
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::huge_pages::HugePages;
use onecopy_tests::memory::pages::{self, PAGE_BYTES};
use onecopy_tests::memory::segment::{Segment, machine_shared_bytes};

const CEILING_BYTES: u64 = 256 * MIB;
/// The table fills nearly all of the pool.
const ROWS: u64 = 240 * MIB / PAGE_BYTES;
/// PostgreSQL 15's blocks do not begin at a page of the machine: one page at either end stays.
const EDGES_BYTES: u64 = 2 * 4096;
/// Descriptors, hash tables and the like that come into being meanwhile.
const BESIDE_BYTES_MAX: u64 = 4 * MIB;
/// The machine's shared memory is used by other programs, too, which come and go: the middle of so many rounds is
/// looked at, and may be off by what such a program takes. What the server itself gives back is known to the byte, and
/// tested above.
const ROUNDS: usize = 9;
const OTHERS_BYTES_MAX: u64 = 32 * MIB;
/// Memory comes and goes in these units.
const HUGE_PAGE_BYTES: u64 = 2 * MIB;

/// What is given back, and what of it lies free in the machine's pool of huge pages.
const RETURNED: &str = "SELECT returned_bytes, returned_huge_bytes FROM onecopy_memory_status";

async fn memory_is_returned(version: Version) -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(version, CEILING_BYTES)).await?;
    let (leader, group) = (harness.leader(), ControlGroup::make()?);
    // Other tests have swap for the whole machine.
    group.set_swapped(false)?;
    group.take(&leader.server)?;
    pages::make(leader, ROWS).await?;
    pages::read_all(leader).await?;
    let (pool, segment) = (harness.pool().await?, Segment::of(leader)?);
    let (full, full_group) = (segment.present_bytes()?, group.usage()?.shared_bytes);
    ensure!(full >= ROWS * PAGE_BYTES, "only {full} bytes are there of a full pool");
    for target in [192 * MIB, 130 * MIB, 64 * MIB] {
        assert_eq!(pool.resize(target).await?, target);
        let status = pool.steady().await?;
        assert_eq!((status.pool_bytes, status.ceiling_bytes), (target, CEILING_BYTES), "{status:?}");
        // In one piece from the top, to the byte.
        let hole = segment.longest_hole()?;
        ensure!(hole.end - hole.start + EDGES_BYTES >= CEILING_BYTES - target, "the hole is {hole:?} at {target}");
        let present = segment.present_bytes()?;
        ensure!(
            present <= target + full - ROWS * PAGE_BYTES + BESIDE_BYTES_MAX,
            "{present} bytes are there at {target}"
        );
        ensure!(present >= target, "{present} bytes are there at {target}: more was given back than was captured");
        // The kernel sums a group's figures up from time to time.
        let what = format!(
            "a group of {full_group} bytes loses what its segment has lost, which had {full} and has {present}"
        );
        let usage = try_until_async(
            &what,
            async || group.usage(),
            |usage| full_group.saturating_sub(usage.shared_bytes) + BESIDE_BYTES_MAX >= full - present,
        )
        .await?;
        ensure!(usage.swap_bytes == 0, "{usage:?}");
    }
    assert_eq!(pool.resize(CEILING_BYTES).await?, CEILING_BYTES);
    // Taken from the machine whether a back end needs it or not.
    pool.steady().await?;
    ensure!(segment.present_bytes()? >= CEILING_BYTES, "{} bytes are there after growing", segment.present_bytes()?);
    pages::read_all(leader).await?;
    assert_eq!(pages::cached(leader).await?, ROWS);
    Ok(())
}

/// A pool that is made smaller gives its memory back, in one piece from the top and to the byte: its segment, its
/// control group and the machine have it; one that grows has its memory soon; a server that starts small never
/// was large.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m1_memory_is_returned_on_15() -> anyhow::Result<()> {
    memory_is_returned(Version::Fifteen).await
}

/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m1_memory_is_returned_on_17() -> anyhow::Result<()> {
    memory_is_returned(Version::Seventeen).await
}

/// Spec: A6, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m1_memory_is_returned_on_16() -> anyhow::Result<()> {
    memory_is_returned(Version::Sixteen).await
}

/// Spec: A6, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m1_memory_is_returned_on_18() -> anyhow::Result<()> {
    memory_is_returned(Version::Eighteen).await
}

/// A pool is as large as it was told to be before its memory has come, and gives back what has come by then.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m1_what_has_grown_goes_back_before_it_is_populated() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES)).await?;
    let leader = harness.leader();
    pages::make(leader, ROWS).await?;
    let (pool, segment) = (harness.pool().await?, Segment::of(leader)?);
    pages::read_all(leader).await?;
    pool.resize(64 * MIB).await?;
    pool.steady().await?;
    let small = segment.present_bytes()?;
    let mut left = 0;
    for round in 0..20 {
        assert_eq!(pool.resize(CEILING_BYTES).await?, CEILING_BYTES);
        left += u32::from(segment.present_bytes()? < CEILING_BYTES);
        if round % 2 == 1 {
            pages::read_all(leader).await?;
        }
        pool.resize(64 * MIB).await?;
        let status = pool.steady().await?;
        assert_eq!(status.returned_bytes, CEILING_BYTES - 64 * MIB, "{status:?}");
        let present = segment.present_bytes()?;
        ensure!(present <= small + BESIDE_BYTES_MAX, "{present} bytes are there at 64 MiB, {small} were");
    }
    ensure!(left > 0, "the memory was always there before the size was told");
    pool.resize(CEILING_BYTES).await?;
    let status = pool.steady().await?;
    ensure!(status.returned_bytes == 0 && segment.present_bytes()? >= CEILING_BYTES, "{status:?}");
    Ok(())
}

/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m1_the_machine_has_what_is_returned() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES)).await?;
    let (pool, mut fallen, mut risen) = (harness.pool().await?, Vec::new(), Vec::new());
    // A pool that has grown has all of its memory.
    for size in [64 * MIB, CEILING_BYTES] {
        pool.resize(size).await?;
        pool.steady().await?;
    }
    for _ in 0..ROUNDS {
        let large = machine_shared_bytes()?;
        pool.resize(64 * MIB).await?;
        let small = machine_shared_bytes()?;
        pool.resize(CEILING_BYTES).await?;
        pool.steady().await?;
        fallen.push(large.saturating_sub(small));
        risen.push(machine_shared_bytes()?.saturating_sub(small));
    }
    for (what, mut seen) in [("fell", fallen), ("rose", risen)] {
        seen.sort_unstable();
        let middle = seen[ROUNDS / 2];
        ensure!(
            middle.abs_diff(CEILING_BYTES - 64 * MIB) <= OTHERS_BYTES_MAX,
            "shared memory of the machine {what} by {seen:?}"
        );
    }
    Ok(())
}

async fn huge_pages_are_returned(version: Version) -> anyhow::Result<()> {
    let reserved = HugePages::reserve((CEILING_BYTES + 64 * MIB) / HUGE_PAGE_BYTES)?;
    let plan = Plan::new(version, CEILING_BYTES).set("huge_pages", "on");
    let harness = Harness::start(plan).await?;
    let leader = harness.leader();
    pages::make(leader, ROWS).await?;
    pages::read_all(leader).await?;
    let (pool, segment) = (harness.pool().await?, Segment::of(leader)?);
    assert!(segment.has_huge_pages);
    // A pool that grows takes its memory before any page of it is used: all of it is there then.
    for size in [64 * MIB, CEILING_BYTES] {
        pool.resize(size).await?;
        pool.steady().await?;
    }
    pages::read_all(leader).await?;
    let before = reserved.available()?;
    for target in [128 * MIB, 64 * MIB] {
        assert_eq!(pool.resize(target).await?, target);
        pool.steady().await?;
        let more = reserved.available()?.checked_sub(before).context("fewer huge pages than before")?;
        // One at either end may hold something else, too.
        let expected = (CEILING_BYTES - target) / HUGE_PAGE_BYTES;
        ensure!((expected - 2..=expected).contains(&more), "{more} huge pages at {target}");
        // They are the host's for users of huge pages only, and that is told.
        let told = pool.session().run(RETURNED).await?;
        assert_eq!(
            told.rows,
            [[Some((CEILING_BYTES - target).to_string()), Some((CEILING_BYTES - target).to_string())]]
        );
    }
    assert_eq!(pool.resize(CEILING_BYTES).await?, CEILING_BYTES);
    let after = reserved.available()?;
    ensure!(after.abs_diff(before) <= 2, "{after} huge pages after growing, {before} before shrinking");
    pages::read_all(leader).await?;
    assert_eq!(pages::cached(leader).await?, ROWS);
    Ok(())
}

/// The same with huge pages; what shares one with the pool's end stays.
///
/// Huge pages that are given back are told as free in the host's pool of such pages, and are asked of nobody for the
/// host's sake; those made on demand go back to the host and come again as long as they may be made.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m2_huge_pages_are_returned_on_15() -> anyhow::Result<()> {
    huge_pages_are_returned(Version::Fifteen).await
}

/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m2_huge_pages_are_returned_on_17() -> anyhow::Result<()> {
    huge_pages_are_returned(Version::Seventeen).await
}

/// Pages that the kernel makes when they are wanted go back to the host, and come again as long as they may be made.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m29_huge_pages_made_on_demand_come_and_go() -> anyhow::Result<()> {
    let machine = HugePages::none()?;
    let enough = (CEILING_BYTES + 64 * MIB) / HUGE_PAGE_BYTES;
    machine.allow_on_demand(enough)?;
    let harness = Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES).set("huge_pages", "on")).await?;
    let (leader, pool) = (harness.leader(), harness.pool().await?);
    pages::make(leader, ROWS).await?;
    let full = machine.total()?;
    assert_eq!(pool.resize(64 * MIB).await?, 64 * MIB);
    pool.steady().await?;
    let gone = full.checked_sub(machine.total()?).context("more huge pages than before")?;
    let expected = (CEILING_BYTES - 64 * MIB) / HUGE_PAGE_BYTES;
    ensure!((expected - 2..=expected).contains(&gone), "{gone} of {expected} huge pages went back to the host");
    let told = pool.session().run(RETURNED).await?;
    assert_eq!(told.rows, [[Some((CEILING_BYTES - 64 * MIB).to_string()), Some("0".to_owned())]]);
    // As many as may be made, and no more.
    machine.allow_on_demand(full - gone + 16)?;
    let refusal = pool.want("256MB", true).await.expect_err("so many may not be made");
    assert_eq!(refusal.code, "53200", "{refusal}");
    assert_eq!(pool.resize(96 * MIB).await?, 96 * MIB);
    machine.allow_on_demand(enough)?;
    assert_eq!(pool.resize(CEILING_BYTES).await?, CEILING_BYTES);
    pages::read_all(leader).await?;
    assert_eq!(pages::cached(leader).await?, ROWS);
    Ok(())
}

/// What lies behind the pool in the same huge page is not the pool's.
async fn memory_behind_the_pool_stays(version: Version) -> anyhow::Result<()> {
    let ceiling_bytes = CEILING_BYTES + MIB;
    let _reserved = HugePages::reserve((ceiling_bytes + 64 * MIB) / HUGE_PAGE_BYTES)?;
    let harness = Harness::start(Plan::new(version, ceiling_bytes).set("huge_pages", "on")).await?;
    let (leader, pool) = (harness.leader(), harness.pool().await?);
    pages::make(leader, ROWS).await?;
    let worker = pool.status().await?.worker;
    for target in [64 * MIB, ceiling_bytes, 128 * MIB, 66 * MIB, ceiling_bytes] {
        assert_eq!(pool.resize(target).await?, target);
        pages::read_all(leader).await?;
        leader.connect("later").await?.run("CHECKPOINT").await?;
    }
    // Lock tables, processes and the rest of shared memory lie there: a server that lost them has crashed.
    assert_eq!(pool.steady().await?.worker, worker);
    assert_eq!(pages::cached(leader).await?, ROWS);
    Ok(())
}

/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m2_what_lies_behind_the_pool_stays_on_15() -> anyhow::Result<()> {
    memory_behind_the_pool_stays(Version::Fifteen).await
}

/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m2_what_lies_behind_the_pool_stays_on_17() -> anyhow::Result<()> {
    memory_behind_the_pool_stays(Version::Seventeen).await
}

/// Memory that was never touched is not taken at the start either.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m1_a_server_that_starts_small_never_was_large() -> anyhow::Result<()> {
    let plan = Plan::new(Version::Fifteen, CEILING_BYTES).set("onecopy.memory_target", "64MB");
    let harness = Harness::start(plan).await?;
    let (leader, segment) = (harness.leader(), Segment::of(harness.leader())?);
    pages::make(leader, ROWS).await?;
    pages::read_all(leader).await?;
    let present = segment.present_bytes()?;
    ensure!(present <= 64 * MIB + 24 * MIB, "{present} bytes are there");
    let status = harness.pool().await?.steady().await?;
    assert_eq!(status.pool_bytes, 64 * MIB);
    ensure!(pages::cached(leader).await? <= 64 * MIB / PAGE_BYTES, "more pages than there is room for");
    Ok(())
}
