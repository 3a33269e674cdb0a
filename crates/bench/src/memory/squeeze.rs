//! A host that takes half of a server's memory away, and gives it back, while its clients read as many rows as before:
//! throughput over time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use onecopy_memory::own::Own;
use onecopy_memory::published::Published;
use serde::Serialize;

use super::MIB;
use super::group::Group;
use super::shrink::resize;
use super::site::{self, Site, Start, Swap};
use crate::disk::{SlowDisk, drop_caches};
use crate::load::{self, Work};

/// The paper's 10, 5 and 10 GB for the virtual machine, 8, 4 and 8 GB for the pool.
const LIMITS_BYTES: [u64; 3] = [1280 * MIB, 640 * MIB, 1280 * MIB];
const POOLS_BYTES: [u64; 3] = [1024 * MIB, 512 * MIB, 1024 * MIB];
/// pgbench's scale: table and index together fill nine tenths of the pool.
pub const SCALE: u32 = 62;
/// What clients read, in all three parts: with half as many in the second one the kernel swaps those that nobody reads,
/// and a server that does not give way suffers as little as one that does.
const ACCOUNTS: u64 = SCALE as u64 * 100_000;
/// Others on the machine may swap as well.
const SWAP_BYTES: u64 = 2048 * MIB;
/// What a server keeps published at the level publish.
const RESERVE_BYTES: u64 = 32 * MIB;
/// A server that publishes nothing for so long never does.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the agent looks.
const LOOK: Duration = Duration::from_millis(100);

/// How the server gives way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Not at all: the kernel takes what it wants.
    None,
    /// It is asked.
    Request,
    /// The agent takes what is published.
    Publish,
    /// The agent drops clean pages of a stock server.
    Own,
    /// It was started at the size of each part: the ideal.
    Born,
}

impl Method {
    /// All, the two that the others lie between first and last.
    pub const ALL: [Method; 5] = [Method::None, Method::Request, Method::Publish, Method::Own, Method::Born];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Method::None => "none",
            Method::Request => "request",
            Method::Publish => "publish",
            Method::Own => "own",
            Method::Born => "born so",
        }
    }

    /// Its name on the command line.
    pub fn option(self) -> String {
        clap::ValueEnum::to_possible_value(&self).map_or(String::new(), |value| value.get_name().to_owned())
    }

    fn start(self, part: usize) -> Start {
        match self {
            Method::None | Method::Own => Start::plain(POOLS_BYTES[0]),
            Method::Born => Start::plain(POOLS_BYTES[part]),
            Method::Request => Start::with_extension(POOLS_BYTES[0]),
            Method::Publish => {
                Start { reserve_bytes: RESERVE_BYTES, ..Start::with_extension(POOLS_BYTES[0] + RESERVE_BYTES) }
            }
        }
    }
}

/// One third of a run.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Part {
    /// Transactions a second in its second half.
    pub per_second: f64,
    /// Share of pages found in the pool then.
    pub hit_ratio: f64,
    /// What lay in swap at its end.
    pub swap_bytes: u64,
}

/// One server through all three.
#[derive(Debug, Clone, Serialize)]
pub struct Squeeze {
    /// In which round, from 1.
    pub round: u32,
    /// How it gave way.
    pub method: Method,
    /// The three parts.
    pub parts: Vec<Part>,
    /// Transactions in each second of all three.
    pub seconds: Vec<f64>,
    /// Processes that were killed for want of memory.
    pub kills: u64,
}

/// Takes a server through all three parts.
pub async fn measure(
    site: &Site,
    method: Method,
    round: u32,
    part_seconds: u32,
    disk_per_second: u32,
) -> anyhow::Result<Squeeze> {
    let _swap = Swap::begin(site, SWAP_BYTES)?;
    let mut run = Squeeze { round, method, parts: Vec::new(), seconds: Vec::new(), kills: 0 };
    let group = begin(site, method, 0).await?;
    let slow = SlowDisk::reads_and_writes(site.disk().device()?, disk_per_second)?;
    let mut group = Some(group);
    for part in 0..3 {
        if part > 0 && method == Method::Born {
            run.kills += group.take().map_or(Ok(0), |group| group.kills())?;
            group = Some(begin(site, method, part).await?);
        }
        let Some(group) = &group else { unreachable!("one was made before") };
        measure_part(site, group, &mut run, part, f64::from(part_seconds)).await.with_context(|| {
            let kills = group.kills().map_or("unknown".to_owned(), |kills| kills.to_string());
            format!("part {}; processes killed for want of memory: {kills}", part + 1)
        })?;
    }
    drop(slow);
    run.kills += group.take().map_or(Ok(0), |group| group.kills())?;
    site.stop().await?;
    Ok(run)
}

/// Starts a server in a group, with what its clients will use in memory as far as that goes.
async fn begin(site: &Site, method: Method, part: usize) -> anyhow::Result<Group> {
    site.start(method.start(part)).await?;
    drop_caches()?;
    let group = Group::make()?;
    group.take(&site.server)?;
    group.limit(LIMITS_BYTES[part]).await?;
    site.warm(&["pgbench_accounts_pkey", "pgbench_accounts"]).await?;
    Ok(group)
}

async fn measure_part(site: &Site, group: &Group, run: &mut Squeeze, part: usize, seconds: f64) -> anyhow::Result<()> {
    // While a server thrashes, a new session may take longer than the server lets it.
    let observer = site.client().await?;
    let clients = site.load(Work::Reads(ACCOUNTS)).await?;
    let began = load::now();
    let holder = if part == 0 { None } else { give_way(site, group, run.method, part).await? };
    let half = began + seconds / 2.0;
    load::pause((half - load::now()).max(0.0)).await;
    let (hits, reads) = site::counts(&observer).await?;
    load::pause((began + seconds - load::now()).max(0.0)).await;
    let ended = load::now();
    let (hits, reads) = site::counts(&observer).await.map(|after| (after.0 - hits, after.1 - reads))?;
    let swap_bytes = group.swap_bytes()?;
    // Ended before the last lines that pgbench had not written yet.
    load::pause(1.0).await;
    let done = clients.stop().await?;
    drop(holder);
    run.parts.push(Part {
        per_second: load::per_second(&done, half.min(ended - 1.0), ended),
        hit_ratio: hits as f64 / (hits + reads).max(1) as f64,
        swap_bytes,
    });
    let whole = (ended - began).floor() as u32;
    run.seconds.extend((0..whole).map(|second| {
        let from = began + f64::from(second);
        load::per_second(&done, from, from + 1.0)
    }));
    Ok(())
}

/// Brings the pool and the limit to those of the part; what must go on is in the value.
async fn give_way(site: &Site, group: &Group, method: Method, part: usize) -> anyhow::Result<Option<Holder>> {
    let (pool, limit) = (POOLS_BYTES[part], LIMITS_BYTES[part]);
    let grows = limit > LIMITS_BYTES[part - 1];
    if grows {
        group.limit(limit).await?;
    }
    let mut holder = None;
    match method {
        Method::None | Method::Born => {}
        Method::Request => resize(&site.client().await?, pool).await?,
        Method::Publish if grows => resize(&site.client().await?, pool + RESERVE_BYTES).await?,
        Method::Publish => take_published(site, pool + RESERVE_BYTES).await?,
        Method::Own if grows => {}
        Method::Own => holder = Some(Holder::begin(site, pool).await?),
    }
    if !grows {
        group.limit(limit).await?;
    }
    Ok(holder)
}

/// Takes what is published, again and again, until the server's target has fallen so far.
async fn take_published(site: &Site, target: u64) -> anyhow::Result<()> {
    let client = site.client().await?;
    let published = Published::open(site.server.data_directory())?;
    let deadline = Instant::now() + PUBLISH_TIMEOUT;
    loop {
        ensure!(Instant::now() < deadline, "the server publishes nothing");
        let now: i64 = client.query_one("SELECT onecopy_memory_target()", &[]).await?.get(0);
        let Some(missing) = u64::try_from(now)?.checked_sub(target).filter(|missing| *missing > 0) else {
            return Ok(());
        };
        if tokio::task::block_in_place(|| published.take(missing))?.chunks == 0 {
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Keeps a stock server's pool small: what is read again is dropped again.
struct Holder {
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Holder {
    async fn begin(site: &Site, bytes: u64) -> anyhow::Result<Holder> {
        site.client().await?.batch_execute("CHECKPOINT").await?;
        let own = Own::open(site.server.data_directory())?;
        tokio::task::block_in_place(|| own.shrink_to(bytes))?;
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = stopping.clone();
        let thread = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                if let Err(error) = own.shrink_to(bytes) {
                    eprintln!("onecopy-bench: the pool is not kept small: {error}");
                    return;
                }
                std::thread::sleep(LOOK);
            }
        });
        Ok(Holder { stopping, thread: Some(thread) })
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        // It must not touch the server that is started next.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
