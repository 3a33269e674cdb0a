//! Clients that move from a source with warm memory to a clone on a slow disk.
//!
//! The disk does few reads a second, as a volume in a cloud does (control groups, version 1,
//! `blkio.throttle.read_iops_device`). The data is taken for larger than the memory: of the source only what its
//! clients read is in memory (it is started anew, the page cache is dropped, its clients read), and of a copy that was
//! just written nothing is.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use onecopy_clone::plan::{FillOptions, Warm};
use onecopy_postgres::{ConnectionParameters, StopMode};
use rand::RngExt;
use tokio::task::JoinSet;

use super::WarmUp;
use super::method::{BenchMethod, Clone, UNBOUNDED};
use super::site::Site;
use crate::cluster::DATABASE;
use crate::disk::{SlowDisk, drop_caches};

/// What is compared: the methods, and lazy without any care for hot pages.
pub const VARIANTS: [(BenchMethod, bool); 4] =
    [(BenchMethod::Lazy, true), (BenchMethod::Lazy, false), (BenchMethod::Reflink, false), (BenchMethod::Copy, false)];

/// Connections that read.
const CLIENTS: usize = 4;
/// Of a hundred reads, this many go to the hot tenth of the accounts.
const HOT_PERCENT: u32 = 95;
/// How long the source is read from before, to warm it up and to see what it does.
const SOURCE_TIME: Duration = Duration::from_secs(6);
/// The rate is formed over this.
const WINDOW: Duration = Duration::from_secs(1);
/// How often it is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// As fast as the source: this part of its rate.
const AS_FAST: f64 = 0.9;
/// A clone that is not as fast by then is reported so.
const DEADLINE: Duration = Duration::from_secs(600);

/// Clients that read without pause until this is dropped.
struct Readers {
    _tasks: JoinSet<anyhow::Result<()>>,
    done: Arc<AtomicU64>,
    stopped: Arc<AtomicBool>,
}

impl Readers {
    async fn start(server: &ConnectionParameters) -> anyhow::Result<Readers> {
        let (mut tasks, done, stopped) =
            (JoinSet::new(), Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        for _ in 0..CLIENTS {
            let client = server.with_database(DATABASE).connect_as_client().await?;
            let (done, stopped) = (done.clone(), stopped.clone());
            tasks.spawn(async move {
                let accounts: i32 = client.query_one("SELECT max(aid) FROM pgbench_accounts", &[]).await?.get(0);
                let read = client.prepare("SELECT abalance FROM pgbench_accounts WHERE aid = $1").await?;
                while !stopped.load(Ordering::Relaxed) {
                    let last = if rand::rng().random_range(0..100) < HOT_PERCENT { accounts / 10 } else { accounts };
                    let account = rand::rng().random_range(1..=last);
                    client.query_one(&read, &[&account]).await?;
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            });
        }
        Ok(Readers { _tasks: tasks, done, stopped })
    }

    fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

/// Moves clients from the source to a new clone on a cold disk.
pub async fn measure(
    site: &Site,
    method: BenchMethod,
    is_warmed: bool,
    round: u32,
    reads_per_second: u32,
) -> anyhow::Result<WarmUp> {
    site.source.restart(StopMode::Fast).await?;
    drop_caches()?;
    let source_per_second = source_rate(site).await?;
    let slow = SlowDisk::reads(site.device()?, reads_per_second)?;
    let warm = if is_warmed { Warm::Full } else { Warm::Off };
    let clone = Clone::make(site, method, FillOptions { warm, ..UNBOUNDED }).await?;
    if method == BenchMethod::Copy {
        forget(clone.server.data_directory())?;
    }
    let as_fast = wait_as_fast(&clone, source_per_second * AS_FAST).await;
    let first_answer_seconds = clone.first_answer.as_secs_f64();
    drop(slow);
    clone.remove(site).await?;
    let as_fast_seconds = as_fast?.map(|time| time.as_secs_f64());
    Ok(WarmUp { method, is_warmed, round, source_per_second, as_fast_seconds, first_answer_seconds })
}

/// What the source does when its memory is warm, in queries a second.
async fn source_rate(site: &Site) -> anyhow::Result<f64> {
    let readers = Readers::start(&site.source.connection()).await?;
    tokio::time::sleep(SOURCE_TIME).await;
    let (begin, before) = (Instant::now(), readers.done());
    tokio::time::sleep(SOURCE_TIME / 2).await;
    Ok((readers.done() - before) as f64 / begin.elapsed().as_secs_f64())
}

/// When the clone answers so many queries a second, counted from its beginning.
async fn wait_as_fast(clone: &Clone, per_second: f64) -> anyhow::Result<Option<Duration>> {
    let readers = Readers::start(&clone.server.connection()).await?;
    let mut seen = std::collections::VecDeque::from([(Instant::now(), 0)]);
    while clone.begin.elapsed() < DEADLINE {
        tokio::time::sleep(LOOK_INTERVAL).await;
        let now = (Instant::now(), readers.done());
        seen.push_back(now);
        while seen.len() > 2 && now.0 - seen[1].0 >= WINDOW {
            seen.pop_front();
        }
        let (begin, before) = seen[0];
        let time = now.0 - begin;
        if time >= WINDOW && (now.1 - before) as f64 / time.as_secs_f64() >= per_second {
            // The rate was reached somewhere in the window; its end is the careful answer.
            return Ok(Some(clone.begin.elapsed()));
        }
    }
    Ok(None)
}

/// Takes a directory's files out of the page cache.
fn forget(directory: &Path) -> anyhow::Result<()> {
    rustix::fs::sync();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        // A temporary file may be gone by now.
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            forget(&entry.path())?;
        } else if let Ok(file) = std::fs::File::open(entry.path()) {
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        }
    }
    Ok(())
}
