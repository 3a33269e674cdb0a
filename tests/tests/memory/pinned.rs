//! A page that somebody holds cannot be taken: it is waited for and named, and whoever waits can give up.

use std::time::Duration;

use anyhow::ensure;
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::pages::{self, PAGE_BYTES};
use onecopy_tests::memory::segment::Segment;
use tokio::time::Instant;

const CEILING_BYTES: u64 = 192 * MIB;
const ROWS: u64 = 180 * MIB / PAGE_BYTES;
const TARGET_BYTES: u64 = 64 * MIB;
/// Chunks that cannot be given back whole because of one page.
const HELD_BYTES_MAX: u64 = 4 * MIB;
const BLOCKED_DEADLINE: Duration = Duration::from_secs(180);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m14_a_page_that_is_held_is_waited_for_and_named() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES)).await?;
    let (leader, pool) = (harness.leader(), harness.pool().await?);
    pages::make(leader, ROWS).await?;
    pages::read_all(leader).await?;
    let segment = Segment::of(leader)?;
    let holder = leader.connect("holder").await?;
    // In the middle of what shall go.
    let buffer = (TARGET_BYTES + CEILING_BYTES) / 2 / PAGE_BYTES;
    let question = format!(
        "SELECT relblocknumber + 1 FROM pg_buffercache WHERE bufferid >= {buffer} AND relforknumber = 0
        AND relfilenode = pg_relation_filenode('pages') ORDER BY bufferid LIMIT 1"
    );
    let row = holder.run(&question).await?.number()?;
    holder
        .run(&format!("BEGIN; DECLARE held CURSOR FOR SELECT body FROM pages WHERE id = {row}; FETCH 1 FROM held"))
        .await?;

    let waiter = leader.connect("waiter").await?;
    waiter.run("SET statement_timeout = '8s'").await?;
    let refusal =
        waiter.run(&format!("SELECT onecopy_memory_target('{TARGET_BYTES} B')")).await.expect_err("it is held");
    assert_eq!(refusal.code, "57014", "{refusal}");
    // All others may still be on their way, on a busy machine.
    let deadline = Instant::now() + BLOCKED_DEADLINE;
    let (status, why) = loop {
        let status = pool.status().await?;
        let why = pool.session().run("SELECT pinned_buffers, blocked_by FROM onecopy_memory_status").await?;
        let is_named = why.rows[0][0].as_deref() == Some("1") && why.rows[0][1].is_some();
        let is_given_back = segment.present_bytes()? <= TARGET_BYTES + 24 * MIB + HELD_BYTES_MAX;
        if (status.state == "blocked" && is_named && is_given_back) || Instant::now() > deadline {
            break (status, why);
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    };
    assert_eq!((status.target_bytes, status.state.as_str()), (TARGET_BYTES, "blocked"), "the target stays: {status:?}");
    ensure!(why.rows[0][0].as_deref() == Some("1") && why.rows[0][1].is_some(), "{why:?}");
    // All but the held page's surroundings is given back already.
    let present = segment.present_bytes()?;
    ensure!(present <= TARGET_BYTES + 24 * MIB + HELD_BYTES_MAX, "{present} bytes are there while one page is held");

    // What is held is what it was.
    holder.run("COMMIT").await?;
    let status = pool.steady().await?;
    assert_eq!(status.pool_bytes, TARGET_BYTES);
    let answer = holder.run(&format!("SELECT length(body) FROM pages WHERE id = {row}")).await?;
    assert_eq!(answer.number()?, 7000);
    Ok(())
}
