//! Back ends, the worker and the agent die at random while pools are resized: nothing is lost, and all goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::ensure;
use onecopy_tests::clones::programs;
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::agent::{self, AgentProcess};
use onecopy_tests::memory::deaths::{Kind, kill_one, wait_noticed};
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::integrity::ensure_nothing_lost;
use onecopy_tests::memory::pool::Pool;
use onecopy_tests::memory::resizes::load_seconds;
use onecopy_tests::memory::transfers::{Shared, client, crash_or_error};
use onecopy_tests::memory::{MIB, schema_changes};
use onecopy_tests::servers::{DATABASE, TestServer};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;
use tokio::time::Instant;

const CEILING_BYTES: u64 = 256 * MIB;
const PGBENCH_SCALE: u32 = 8;
const SECONDS: u64 = 20;
/// Until then everything has happened often enough to be a test, on a busy machine, too.
const ENOUGH_DEADLINE: Duration = Duration::from_secs(240);
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
const KILL_PAUSES_MS: std::ops::Range<u64> = 1000..3000;
const AGENT_PAUSES_MS: std::ops::Range<u64> = 30..400;
const SLOW_AGENT_PAUSES_MS: std::ops::Range<u64> = 30..4000;
/// So many have something to show where they are quick.
const AGENTS_FEW: u64 = 30;
const RESIZE_PAUSES_MS: std::ops::Range<u64> = 20..400;
const WRITERS: u64 = 3;

/// What has happened so far.
#[derive(Debug, Default)]
struct Progress {
    /// Sizes that a server has granted: the leader, the standby.
    granted: [AtomicU64; 2],
    /// Processes of theirs that were killed.
    kills: [AtomicU64; 2],
    agents: [Agents; 2],
    /// Statements that change the schema and were answered.
    changes: AtomicU64,
    /// Databases that were made.
    databases: AtomicU64,
}

/// What agents did that were killed.
#[derive(Debug, Default)]
struct Agents {
    killed: AtomicU64,
    taken: AtomicU64,
    killed_in_the_middle: AtomicU64,
}

impl Agents {
    fn are_enough(&self) -> bool {
        self.taken.load(Ordering::Relaxed) > 0 && self.killed_in_the_middle.load(Ordering::Relaxed) > 0
    }
}

impl Progress {
    /// Whether it is a test already.
    fn is_enough(&self, transactions: u64) -> bool {
        let least = |count: &AtomicU64, least: u64| count.load(Ordering::Relaxed) >= least;
        let [leader, standby] = &self.granted;
        least(leader, 10)
            && least(standby, 5)
            && self.kills.iter().all(|kills| least(kills, 3))
            && self.agents.iter().all(Agents::are_enough)
            && least(&self.changes, 10)
            && transactions >= 1000
    }
}

/// Asks for sizes at random, through every crash, and counts what was granted.
async fn ask_at_random(
    server: &TestServer,
    mut random: StdRng,
    stopping: &AtomicBool,
    granted: &AtomicU64,
) -> anyhow::Result<()> {
    while !stopping.load(Ordering::Relaxed) {
        let Some(pool) = crash_or_error(Pool::of(server).await)? else {
            pause(&mut random, RESIZE_PAUSES_MS).await;
            continue;
        };
        while !stopping.load(Ordering::Relaxed) {
            let wanted = random.random_range(64 * MIB..=CEILING_BYTES);
            let asked = pool.want(&format!("{} kB", wanted >> 10), false).await;
            if crash_or_error(asked.map_err(Into::into))?.is_none() {
                break;
            }
            granted.fetch_add(1, Ordering::Relaxed);
            pause(&mut random, RESIZE_PAUSES_MS).await;
        }
    }
    Ok(())
}

async fn pause(random: &mut StdRng, milliseconds: std::ops::Range<u64>) {
    let milliseconds = random.random_range(milliseconds);
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

/// Kills processes of a server by turns. It comes back between two deaths: a machine may be so busy that it never would
/// otherwise. One that ends instead (`may_end`) is started again.
async fn kill_at_random(
    server: &TestServer,
    mut random: StdRng,
    stopping: &AtomicBool,
    kills: &AtomicU64,
    granted: &AtomicU64,
    may_end: bool,
) -> anyhow::Result<()> {
    while !stopping.load(Ordering::Relaxed) {
        pause(&mut random, KILL_PAUSES_MS).await;
        if may_end {
            start_again(server).await?;
        }
        let kind = if random.random_range(0..2) == 0 { Kind::Worker } else { Kind::BackEnd };
        let Some(process) = kill_one(server, kind, random.random_range(0..100)) else { continue };
        wait_noticed(process).await;
        kills.fetch_add(1, Ordering::Relaxed);
        let granted_then = granted.load(Ordering::Relaxed);
        while granted.load(Ordering::Relaxed) == granted_then && !stopping.load(Ordering::Relaxed) {
            tokio::time::sleep(LOOK_INTERVAL).await;
            if may_end {
                start_again(server).await?;
            }
        }
    }
    Ok(())
}

/// Starts a server again that has ended as it was told to.
async fn start_again(server: &TestServer) -> anyhow::Result<()> {
    if server.server.is_running() {
        return Ok(());
    }
    let log = String::from_utf8_lossy(&std::fs::read(server.server.log_file())?).into_owned();
    ensure!(log.contains("because \"restart_after_crash\" is off"), "{} has ended: {log}", server.name);
    server.server.start().await?;
    println!("{} was started again", server.name);
    Ok(())
}

/// Lets an agent take and kills it, again and again.
async fn kill_agents(
    server: &TestServer,
    mut random: StdRng,
    stopping: &AtomicBool,
    agents: &Agents,
) -> anyhow::Result<()> {
    while !stopping.load(Ordering::Relaxed) {
        let agent = AgentProcess::start("deaths::agent_that_is_killed", server.server.data_directory())?;
        // On a busy machine it may take longer than that until it does anything.
        let is_slow = agents.killed.load(Ordering::Relaxed) >= AGENTS_FEW && !agents.are_enough();
        pause(&mut random, if is_slow { SLOW_AGENT_PAUSES_MS } else { AGENT_PAUSES_MS }).await;
        let life = agent.kill()?;
        agents.killed.fetch_add(1, Ordering::Relaxed);
        agents.taken.fetch_add(life.taken, Ordering::Relaxed);
        agents.killed_in_the_middle.fetch_add(life.died_in_the_middle.into(), Ordering::Relaxed);
    }
    Ok(())
}

/// Changes the schema, one statement after the other through every crash, and makes databases.
async fn change_schema(
    server: &TestServer,
    mut random: StdRng,
    stopping: &AtomicBool,
    progress: &Progress,
) -> anyhow::Result<()> {
    for round in 0.. {
        for sql in schema_changes::statements(round) {
            if stopping.load(Ordering::Relaxed) {
                return Ok(());
            }
            progress.changes.fetch_add(change(server, &mut random, &sql).await?.into(), Ordering::Relaxed);
        }
        let made = crash_or_error(schema_changes::databases(server, round).await)?;
        progress.databases.fetch_add(made.is_some().into(), Ordering::Relaxed);
    }
    Ok(())
}

/// Runs a statement unless the server crashes just then; whether it was answered.
async fn change(server: &TestServer, random: &mut StdRng, sql: &str) -> anyhow::Result<bool> {
    let Some(session) = crash_or_error(server.connect("schema").await)? else {
        pause(random, RESIZE_PAUSES_MS).await;
        return Ok(false);
    };
    match session.run(sql).await {
        // One before it was not answered, or was committed without an answer.
        Err(error) if ["42P01", "42P07"].contains(&error.code.as_str()) => Ok(false),
        outcome => Ok(crash_or_error(outcome.map_err(Into::into))?.is_some()),
    }
}

async fn deaths_lose_nothing(version: Version) -> anyhow::Result<()> {
    let plan = Plan::new(version, CEILING_BYTES).with_standby().set("onecopy.memory_reserve", "32MB");
    let harness = Harness::start(plan).await?;
    let (leader, standby) = (harness.leader(), harness.standby()?);
    programs::pgbench_initialize(leader, PGBENCH_SCALE)?;
    harness.wait_replayed().await?;
    // A standby that has crashed serves what it had written to disk at least, which may be older than what it had
    // shown: from here on never older than this.
    for server in harness.all() {
        server.connect("checkpoint").await?.run("CHECKPOINT").await?;
        harness.wait_replayed().await?;
    }
    let may_end = version == Version::Eighteen;
    if may_end {
        // A standby of it that comes back by itself is not consistent at first: docs/compatibility.md.
        let settings = standby.connect("settings").await?;
        settings.run("ALTER SYSTEM SET restart_after_crash = off").await?;
        settings.run("SELECT pg_reload_conf()").await?;
    }
    let (shared, stopping, seconds) = (Arc::new(Shared::default()), AtomicBool::new(false), load_seconds(SECONDS)?);
    let mut clients = JoinSet::new();
    for number in 0..WRITERS {
        clients.spawn(client(leader.config(DATABASE), PGBENCH_SCALE.into(), false, number, shared.clone()));
    }
    for server in harness.all() {
        clients.spawn(client(server.config(DATABASE), PGBENCH_SCALE.into(), true, 99, shared.clone()));
    }
    let (progress, seed) = (Progress::default(), onecopy_testing::seed());
    let random = |stream| StdRng::seed_from_u64(seed.wrapping_add(stream));
    let clock = async {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let deadline = Instant::now() + ENOUGH_DEADLINE;
        while !progress.is_enough(shared.done.load(Ordering::Relaxed)) && Instant::now() < deadline {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        stopping.store(true, Ordering::Relaxed);
        anyhow::Ok(())
    };
    tokio::try_join!(
        ask_at_random(leader, random(0), &stopping, &progress.granted[0]),
        ask_at_random(standby, random(1), &stopping, &progress.granted[1]),
        kill_at_random(leader, random(2), &stopping, &progress.kills[0], &progress.granted[0], false),
        kill_at_random(standby, random(3), &stopping, &progress.kills[1], &progress.granted[1], may_end),
        kill_agents(leader, random(4), &stopping, &progress.agents[0]),
        kill_agents(standby, random(5), &stopping, &progress.agents[1]),
        change_schema(leader, random(6), &stopping, &progress),
        clock
    )?;
    shared.stopping.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    let (done, broken) = (shared.done.load(Ordering::Relaxed), shared.broken.load(Ordering::Relaxed));
    println!("{progress:?}, {done} transactions, {broken} connections broken");
    ensure!(progress.is_enough(done), "it was no test: {progress:?}, {done} transactions");
    for server in harness.all() {
        // After the last kill it may still be on its way.
        server.server.start().await?;
        // What the last agents left is cleared away: nothing is lost of the pool either.
        let pool = Pool::of(server).await?;
        pool.resize(CEILING_BYTES).await?;
    }
    ensure_nothing_lost(&harness).await
}

/// The same while back ends, the worker and the agent (in the middle of taking) are killed at random.
///
/// Spec: D3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m4_deaths_at_random_lose_nothing_on_15() -> anyhow::Result<()> {
    deaths_lose_nothing(Version::Fifteen).await
}

/// Spec: D3, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m4_deaths_at_random_lose_nothing_on_17() -> anyhow::Result<()> {
    deaths_lose_nothing(Version::Seventeen).await
}

/// Spec: D3, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m4_deaths_at_random_lose_nothing_on_16() -> anyhow::Result<()> {
    deaths_lose_nothing(Version::Sixteen).await
}

/// Spec: D3, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m4_deaths_at_random_lose_nothing_on_18() -> anyhow::Result<()> {
    deaths_lose_nothing(Version::Eighteen).await
}

/// No test: what the agent's process runs.
#[test]
#[ignore = "run by other tests in a process of its own"]
fn agent_that_is_killed() -> anyhow::Result<()> {
    agent::take_forever()
}
