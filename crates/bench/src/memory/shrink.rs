//! How long it takes to give half of the pool back, what that time is made of, and what clients feel.

use anyhow::Context;
use onecopy_memory::own::Own;
use onecopy_memory::published::Published;
use serde::Serialize;

use super::MIB;
use super::site::{HugePages, Site, Start};
use crate::load::{self, Work};

/// The pool, and what is left of it.
pub const POOL_BYTES: u64 = 2048 * MIB;
/// Half.
pub const HALF_BYTES: u64 = POOL_BYTES / 2;
/// pgbench's scale: its tables are larger than the pool.
pub const SCALE: u32 = 160;
const ACCOUNTS: u64 = SCALE as u64 * 100_000;
/// Clients work so long before, and after.
const BEFORE_SECONDS: f64 = 5.0;
const AFTER_SECONDS: f64 = 2.0;
/// A reserve that was taken is filled again within this.
const RESERVE_DEADLINE_SECONDS: f64 = 60.0;

/// What clients do meanwhile.
pub const WORKS: [Work; 3] = [Work::Idle, Work::Reads(ACCOUNTS), Work::Updates];

/// One shrink on request, and the growth after it.
#[derive(Debug, Clone, Serialize)]
pub struct PoolShrink {
    /// In which round, from 1.
    pub round: u32,
    /// What clients did.
    pub work: &'static str,
    /// Until the memory was back at the host.
    pub seconds: f64,
    /// Its parts, in milliseconds, as the server counted them.
    pub parts: Parts,
    /// How long the worker ran meanwhile, and waited for a processor.
    pub processor: Processor,
    /// Pages of each kind.
    pub moved_pages: i64,
    /// Written because they were dirty.
    pub written_pages: i64,
    /// That left the pool.
    pub evicted_pages: i64,
    /// Until the pool was as large as before.
    pub growth_seconds: f64,
    /// What 99 of 100 transactions took before.
    pub before_p99_ms: Option<f64>,
    /// And meanwhile.
    pub during_p99_ms: Option<f64>,
    /// Transactions a second before.
    pub before_per_second: f64,
    /// And meanwhile.
    pub during_per_second: f64,
}

/// Where the time went.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Parts {
    /// Dirty pages written.
    pub write_ms: f64,
    /// Buffers captured.
    pub capture_ms: f64,
    /// Hot pages moved.
    pub move_ms: f64,
    /// Memory returned.
    pub return_ms: f64,
}

/// A process's time, in milliseconds, as the kernel counts it.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Processor {
    /// On a processor.
    pub ran_ms: f64,
    /// Ready to run, while others ran.
    pub waited_ms: f64,
}

impl Processor {
    /// Of the process that resizes the pool, since it started: `/proc/PID/schedstat`, in nanoseconds.
    async fn of_worker(client: &tokio_postgres::Client) -> anyhow::Result<Processor> {
        let query = "SELECT worker_pid FROM onecopy_memory_status";
        let pid: i32 = client.query_one(query, &[]).await.context("the worker is not there")?.get(0);
        let line = std::fs::read_to_string(format!("/proc/{pid}/schedstat"))?;
        let mut milliseconds = line.split_whitespace().map(|word| word.parse::<u64>().map(|time| time as f64 / 1e6));
        let mut next = || milliseconds.next().context("schedstat is short")?.context("schedstat has no number");
        Ok(Processor { ran_ms: next()?, waited_ms: next()? })
    }

    fn since(self, before: Processor) -> Processor {
        Processor { ran_ms: self.ran_ms - before.ran_ms, waited_ms: self.waited_ms - before.waited_ms }
    }
}

/// Half of the pool by a level at which the server is not asked.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Taking {
    /// In which round, from 1.
    pub round: u32,
    /// Until so much published memory was taken.
    pub publish_seconds: f64,
    /// Until so much was dropped of a server without the extension.
    pub own_seconds: f64,
}

/// Shrinks on request with clients at work.
pub async fn measure(site: &Site, work: Work, huge_pages: bool, round: u32) -> anyhow::Result<PoolShrink> {
    let _reserved = if huge_pages { Some(HugePages::reserve(POOL_BYTES / (2 * MIB) + 64)?) } else { None };
    site.start(Start { huge_pages, ..Start::with_extension(POOL_BYTES) }).await?;
    site.warm(&["pgbench_accounts_pkey", "pgbench_accounts"]).await?;
    let client = site.client().await?;
    let clients = site.load(work).await?;
    load::pause(BEFORE_SECONDS).await;
    let ran_before = Processor::of_worker(&client).await?;
    let began = load::now();
    resize(&client, HALF_BYTES).await?;
    let ended = load::now();
    let processor = Processor::of_worker(&client).await?.since(ran_before);
    load::pause(AFTER_SECONDS).await;
    let row = client
        .query_one(
            "SELECT write_ms, capture_ms, move_ms, return_ms, moved_pages, written_pages, evicted_pages \
             FROM onecopy_memory_history WHERE event = 'shrink' ORDER BY at DESC LIMIT 1",
            &[],
        )
        .await
        .context("the shrink is not in the history")?;
    let growing = load::now();
    resize(&client, POOL_BYTES).await?;
    let growth_seconds = load::now() - growing;
    load::pause(AFTER_SECONDS).await;
    let done = clients.stop().await?;
    // What reads would note of it in its pages, so that the next round's would write them.
    if matches!(work, Work::Updates) {
        client.batch_execute("VACUUM pgbench_accounts").await?;
        client.batch_execute("CHECKPOINT").await?;
    }
    let before = began - BEFORE_SECONDS * 0.6;
    Ok(PoolShrink {
        round,
        work: if huge_pages { "idle, huge pages" } else { work.name() },
        seconds: ended - began,
        parts: Parts { write_ms: row.get(0), capture_ms: row.get(1), move_ms: row.get(2), return_ms: row.get(3) },
        processor,
        moved_pages: row.get(4),
        written_pages: row.get(5),
        evicted_pages: row.get(6),
        growth_seconds,
        before_p99_ms: load::p99_ms(&done, before, began),
        during_p99_ms: load::p99_ms(&done, began, ended),
        before_per_second: load::per_second(&done, before, began),
        during_per_second: load::per_second(&done, began, ended),
    })
}

/// Takes half of an idle server's pool without asking.
pub async fn take(site: &Site, round: u32) -> anyhow::Result<Taking> {
    site.start(Start { reserve_bytes: HALF_BYTES, ..Start::with_extension(POOL_BYTES) }).await?;
    // What is captured before it was ever used has no memory to give: the pool is filled first, then published.
    let client = site.client().await?;
    client.batch_execute("ALTER SYSTEM SET onecopy.memory_reserve = 0").await?;
    client.batch_execute("SELECT pg_reload_conf()").await?;
    load::pause(AFTER_SECONDS).await;
    site.warm(&["pgbench_accounts_pkey", "pgbench_accounts"]).await?;
    client.batch_execute("ALTER SYSTEM RESET onecopy.memory_reserve").await?;
    client.batch_execute("SELECT pg_reload_conf()").await?;
    let published = Published::open(site.server.data_directory())?;
    let deadline = load::now() + RESERVE_DEADLINE_SECONDS;
    while published.available_bytes()? < HALF_BYTES {
        anyhow::ensure!(load::now() < deadline, "the reserve is not published");
        load::pause(0.1).await;
    }
    let taken = published.take(HALF_BYTES)?;
    anyhow::ensure!(taken.bytes >= HALF_BYTES / 100 * 95, "taken: {taken:?}");
    drop(published);
    site.start(Start::plain(POOL_BYTES)).await?;
    site.warm(&["pgbench_accounts_pkey", "pgbench_accounts"]).await?;
    site.client().await?.batch_execute("CHECKPOINT").await?;
    let dropped = Own::open(site.server.data_directory())?.shrink_to(HALF_BYTES)?;
    anyhow::ensure!(dropped.resident_bytes <= HALF_BYTES, "dropped: {dropped:?}");
    Ok(Taking {
        round,
        publish_seconds: taken.microseconds as f64 / 1e6,
        own_seconds: dropped.microseconds as f64 / 1e6,
    })
}

/// Asks for a size and waits until it holds.
pub async fn resize(client: &tokio_postgres::Client, bytes: u64) -> anyhow::Result<()> {
    client.query_one("SELECT onecopy_memory_target($1)", &[&format!("{}MB", bytes / MIB)]).await?;
    Ok(())
}
