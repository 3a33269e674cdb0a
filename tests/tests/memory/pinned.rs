//! A page that somebody holds cannot be taken: it is waited for and named, and whoever waits can give up.

use std::ops::Range;

use anyhow::ensure;
use onecopy_testing::try_until_async;
use onecopy_tests::client::Session;
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::pages::{self, PAGE_BYTES};
use onecopy_tests::memory::pool::{Pool, Status};
use onecopy_tests::memory::segment::Segment;
use onecopy_tests::servers::TestServer;

const CEILING_BYTES: u64 = 192 * MIB;
const ROWS: u64 = 180 * MIB / PAGE_BYTES;
const TARGET_BYTES: u64 = 64 * MIB;
/// One page of the machine at either end of what goes.
const EDGES_BYTES: u64 = 2 * 4096;
/// Chunks that cannot be given back whole because of one page.
const HELD_BYTES_MAX: u64 = 4 * MIB;

/// A session that holds the first page of the table from this place of the pool on, and the page's row.
async fn hold(server: &TestServer, from_bytes: u64) -> anyhow::Result<(Session, i64)> {
    let holder = server.connect("holder").await?;
    let question = format!(
        "SELECT relblocknumber + 1 FROM pg_buffercache WHERE bufferid > {} AND relforknumber = 0
        AND relfilenode = pg_relation_filenode('pages') ORDER BY bufferid LIMIT 1",
        from_bytes / PAGE_BYTES
    );
    let row = holder.run(&question).await?.number()?;
    holder
        .run(&format!("BEGIN; DECLARE held CURSOR FOR SELECT body FROM pages WHERE id = {row}; FETCH 1 FROM held"))
        .await?;
    Ok((holder, row))
}

/// A page that somebody holds is waited for and named; whoever waits can give up, and all else is given back meanwhile.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m14_a_page_that_is_held_is_waited_for_and_named() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES)).await?;
    let (leader, pool) = (harness.leader(), harness.pool().await?);
    pages::make(leader, ROWS).await?;
    pages::read_all(leader).await?;
    let segment = Segment::of(leader)?;
    // In the middle of what shall go.
    let (holder, row) = hold(leader, (TARGET_BYTES + CEILING_BYTES) / 2).await?;

    let waiter = leader.connect("waiter").await?;
    waiter.run("SET statement_timeout = '8s'").await?;
    let refusal =
        waiter.run(&format!("SELECT onecopy_memory_target('{TARGET_BYTES} B')")).await.expect_err("it is held");
    assert_eq!(refusal.code, "57014", "{refusal}");
    // All others may still be on their way, on a busy machine.
    let look = async || {
        let status = pool.status().await?;
        let why = pool.session().run("SELECT pinned_buffers, blocked_by FROM onecopy_memory_status").await?;
        Ok((status, why.rows, segment.present_bytes()?))
    };
    let what = "one page is named, and all but its surroundings is given back";
    let (status, ..) = try_until_async(what, look, |(status, why, present)| {
        let is_named = why[0][0].as_deref() == Some("1") && why[0][1].is_some();
        status.state == "blocked" && is_named && *present <= TARGET_BYTES + 24 * MIB + HELD_BYTES_MAX
    })
    .await?;
    assert_eq!(status.target_bytes, TARGET_BYTES, "the target stays: {status:?}");

    // What is held is what it was.
    holder.run("COMMIT").await?;
    let status = pool.steady().await?;
    assert_eq!(status.pool_bytes, TARGET_BYTES);
    let answer = holder.run(&format!("SELECT length(body) FROM pages WHERE id = {row}")).await?;
    assert_eq!(answer.number()?, 7000);
    Ok(())
}

/// The place in the pool of a table's first page, in bytes.
async fn place_of(session: &Session, table: &str) -> anyhow::Result<u64> {
    let question = format!(
        "SELECT min(bufferid) FROM pg_buffercache WHERE relforknumber = 0 AND relblocknumber = 0
        AND relfilenode = pg_relation_filenode('{table}')"
    );
    Ok(u64::try_from(session.run(&question).await?.number()?)? * PAGE_BYTES)
}

/// A page that cannot be written is tried again and named; what lies above it and was held is given back meanwhile.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m32_a_page_that_cannot_be_written_keeps_its_own_chunk_only() -> anyhow::Result<()> {
    /// What is tried at once: a chunk.
    const CHUNK_BYTES: u64 = 2 * MIB;
    // Nobody else writes it meanwhile, or opens its file.
    let plan = Plan::new(Version::Fifteen, CEILING_BYTES).set("bgwriter_lru_maxpages", 0);
    let harness = Harness::start(plan).await?;
    let (leader, pool) = (harness.leader(), harness.pool().await?);
    let rows = 100 * MIB / PAGE_BYTES;
    pages::make(leader, rows).await?;
    let session = leader.connect("stuck").await?;
    session.run_all(&["CREATE TABLE stuck (number int)", "INSERT INTO stuck VALUES (1)", "CHECKPOINT"]).await?;
    let more = 60 * MIB / PAGE_BYTES;
    let more = format!("INSERT INTO pages SELECT id + {rows}, 0, body FROM pages WHERE id <= {more} ORDER BY id");
    session.run_all(&[&more, "CHECKPOINT"]).await?;
    let (holder, _) = hold(leader, 140 * MIB).await?;
    let place = place_of(&session, "stuck").await?;
    ensure!(place > TARGET_BYTES + CHUNK_BYTES && place < 140 * MIB, "it was no test: it lies at {place}");
    session.run("UPDATE stuck SET number = 2").await?;
    let file = session.run("SELECT pg_relation_filepath('stuck')").await?.text()?.to_owned();
    let file = leader.server.data_directory().join(file);
    let mode = std::fs::metadata(&file)?.permissions();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o000))?;

    pool.want("64MB", false).await?;
    let look = async || {
        let why = pool.session().run("SELECT blocked_by FROM onecopy_memory_status").await?;
        Ok((why.rows, pool.status().await?))
    };
    try_until_async("one page is named, and its chunk and the held page are left", look, |(why, status)| {
        let is_named = why[0][0].as_deref().is_some_and(|why| why.contains("could not open file"));
        is_named && status.pool_bytes == TARGET_BYTES + CHUNK_BYTES + PAGE_BYTES
    })
    .await?;
    holder.run("COMMIT").await?;
    let is_given_back = |status: &Status| status.pool_bytes <= TARGET_BYTES + CHUNK_BYTES;
    try_until_async("what was held is given back", async || pool.status().await, is_given_back).await?;
    std::fs::set_permissions(&file, mode)?;
    assert_eq!(pool.steady().await?.pool_bytes, TARGET_BYTES);
    assert_eq!(session.run("SELECT number FROM stuck").await?.number()?, 2);
    Ok(())
}

/// How many bytes are in ranges of both, each in their order.
fn bytes_in_both(one: &[Range<u64>], other: &[Range<u64>]) -> u64 {
    let common = |a: &Range<u64>, b: &Range<u64>| a.end.min(b.end).saturating_sub(a.start.max(b.start));
    one.iter().map(|range| other.iter().map(|others| common(range, others)).sum::<u64>()).sum()
}

/// Waits until the pool has this size, all else of it is given back or published, and all of that is counted.
async fn wait_given_back(pool: &Pool, pool_bytes: u64) -> anyhow::Result<Status> {
    let what = format!("all but {pool_bytes} bytes of the pool is given back");
    try_until_async(
        &what,
        async || pool.status().await,
        |status| {
            status.pool_bytes == pool_bytes && status.returned_bytes + status.published_bytes == status.parked_bytes
        },
    )
    .await
}

/// One held page keeps itself, whenever it was taken hold of and however long the others are held already.
///
/// A held page keeps itself and nothing else, however long others are held; what lies around it is counted as given
/// back, room for it is asked for before it comes back, and what is published has all of its memory.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m28_what_lies_around_a_held_page_is_given_back_and_counted() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES)).await?;
    let (leader, pool, segment) = (harness.leader(), harness.pool().await?, Segment::of(harness.leader())?);
    pages::make(leader, ROWS).await?;
    pages::read_all(leader).await?;
    // All of it is there.
    for size in [TARGET_BYTES, CEILING_BYTES] {
        pool.resize(size).await?;
        pool.steady().await?;
    }
    pages::read_all(leader).await?;
    let full = segment.present_bytes()?;
    let all = segment.present_ranges()?;
    let (one, one_row) = hold(leader, 160 * MIB).await?;
    pool.want("128MB", false).await?;
    wait_given_back(&pool, 128 * MIB + PAGE_BYTES).await?;
    let (other, other_row) = hold(leader, 100 * MIB).await?;
    pool.want("64MB", false).await?;
    wait_given_back(&pool, TARGET_BYTES + 2 * PAGE_BYTES).await?;
    // The first page and the last of what goes are in part of the page beside, and so are those around a held one.
    // What was not there before is none of the pool: queues and tables beside it come into being as they are used.
    let present = segment.present_ranges()?;
    let left = bytes_in_both(&all, &present);
    let most = full - (CEILING_BYTES - TARGET_BYTES) + 6 * PAGE_BYTES;
    ensure!(left <= most, "{left} bytes are there of {full} while two pages are held: {present:?}");
    one.run("COMMIT").await?;
    wait_given_back(&pool, TARGET_BYTES + PAGE_BYTES).await?;
    // It grows around the other one.
    assert_eq!(pool.resize(CEILING_BYTES).await?, CEILING_BYTES);
    let status = pool.steady().await?;
    assert_eq!((status.pool_bytes, status.returned_bytes), (CEILING_BYTES, 0));
    ensure!(segment.present_bytes()? >= full, "less is there than before");
    other.run("COMMIT").await?;
    for row in [one_row, other_row] {
        let answer = other.run(&format!("SELECT body = repeat('p', 7000) FROM pages WHERE id = {row}")).await?;
        assert_eq!(answer.rows, [[Some("t".to_owned())]]);
    }
    Ok(())
}

/// What is published has all of its memory, also where a part of it was given back before.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m28_what_is_published_is_there() -> anyhow::Result<()> {
    let harness =
        Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES).set("onecopy.memory_reserve", "32MB")).await?;
    let (leader, pool, segment) = (harness.leader(), harness.pool().await?, Segment::of(harness.leader())?);
    // Of a server that has just started nobody has touched the reserve.
    let status = pool.steady().await?;
    let present = segment.present_bytes()?;
    ensure!(status.published_bytes == 32 * MIB && present >= 32 * MIB, "{present} bytes are there: {status:?}");
    pages::make(leader, ROWS).await?;
    for size in [96 * MIB, CEILING_BYTES] {
        pool.resize(size).await?;
        pool.steady().await?;
    }
    pages::read_all(leader).await?;
    let full = segment.present_bytes()?;
    let (holder, _) = hold(leader, 110 * MIB).await?;
    pool.want("96MB", false).await?;
    let status = wait_given_back(&pool, 64 * MIB + PAGE_BYTES).await?;
    assert_eq!(status.published_bytes, 32 * MIB, "{status:?}");
    // The held page is of the reserve now.
    pool.want("120MB", false).await?;
    holder.run("COMMIT").await?;
    let status = pool.steady().await?;
    assert_eq!((status.pool_bytes, status.published_bytes), (88 * MIB, 32 * MIB), "{status:?}");
    let (present, least) = (segment.present_bytes()?, full - (CEILING_BYTES - 120 * MIB) - EDGES_BYTES);
    ensure!(present >= least, "{present} bytes are there and not {least}");
    Ok(())
}
