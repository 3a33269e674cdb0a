//! The machine between its two hosts, and one migration of each kind.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::ValueEnum;
use onecopy_disk_server::DiskClient;
use onecopy_machine::migration::MigrationResult;
use serde::Serialize;
use serde_json::Value;
use tempfile::TempDir;

use super::qemu;
use crate::guests::Guests;
use crate::two_hosts::{self, Host, Serving};

const NAME: &str = "shop";
/// How long the machine may stand.
const DOWNTIME: Duration = Duration::from_millis(300);
/// After that it stands as long as it takes.
const TIMEOUT: Duration = Duration::from_secs(120);
/// For how long transactions are counted before a migration.
const BEFORE: Duration = Duration::from_secs(10);
/// How often it is looked whether a disk is whole.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// What all of a disk may need.
const DISK_TIMEOUT: Duration = Duration::from_secs(600);
/// Memory that is written to.
const SPAN_BYTES: u32 = 64 << 20;
const CLIENTS: u32 = 2;
/// Of the machine's memory: the server's pool, and pgbench's tables and indexes, which fit into it.
const POOL_PERCENT: u64 = 50;
const DATA_PERCENT: u64 = 40;
/// They take so much for each of its scale.
const SCALE_MIB: u64 = 15;
/// Where the guest's programs say what they saw, and are told to end.
const REPORT: &str = "/dev/shm/exercise";
const OVER: &str = "/run/exercise-over";

/// What the machine does meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// Nothing.
    Idle,
    /// pgbench reads.
    Read,
    /// 5 MB of its memory are written a second.
    Write5,
    /// 20 MB.
    Write20,
}

impl Load {
    /// In the order in which they run.
    pub const ALL: [Load; 4] = [Load::Idle, Load::Read, Load::Write5, Load::Write20];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Load::Idle => "idle",
            Load::Read => "reads",
            Load::Write5 => "5 MB/s written",
            Load::Write20 => "20 MB/s written",
        }
    }

    /// As an option of the command has it.
    pub fn option(self) -> &'static str {
        match self {
            Load::Idle => "idle",
            Load::Read => "read",
            Load::Write5 => "write5",
            Load::Write20 => "write20",
        }
    }

    fn written_mb(self) -> Option<u32> {
        match self {
            Load::Idle | Load::Read => None,
            Load::Write5 => Some(5),
            Load::Write20 => Some(20),
        }
    }
}

/// How the machine goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Ours, to a host that has this one's storage.
    Shared,
    /// Ours, to one that has not: its disk follows.
    Copied,
    /// QEMU's, as it is.
    Qemu,
    /// QEMU's over several connections, compressed.
    Multifd,
}

impl Method {
    /// In the order in which they run.
    pub const ALL: [Method; 4] = [Method::Shared, Method::Qemu, Method::Copied, Method::Multifd];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Method::Shared => "onecopy, storage shared",
            Method::Copied => "onecopy, storage not shared",
            Method::Qemu => "QEMU",
            Method::Multifd => "QEMU, multifd and zstd",
        }
    }

    /// As an option of the command has it.
    pub fn option(self) -> &'static str {
        match self {
            Method::Shared => "shared",
            Method::Copied => "copied",
            Method::Qemu => "qemu",
            Method::Multifd => "multifd",
        }
    }
}

/// A migration.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Sent {
    /// The round.
    pub round: u32,
    /// What the machine did meanwhile.
    pub load: Load,
    /// How it went.
    pub method: Method,
    /// From the command, or QEMU's begin, until the machine ran there, or could have.
    pub total_s: f64,
    /// Megabytes of memory that went over the link.
    pub mb: f64,
    /// How long the machine stood.
    pub pause_ms: f64,
    /// The server's transactions a second before.
    pub before_per_second: f64,
    /// And from the begin until the machine was asked for them again.
    pub meanwhile_per_second: f64,
}

/// The machine and its hosts.
pub struct Site {
    hosts: [Host; 2],
    /// Which of them it runs on.
    at: usize,
    /// While the one needs the other.
    serving: Option<[Serving; 2]>,
    bytes_per_second: u64,
    _keys: TempDir,
}

/// Makes pgbench's tables, with text in place of blanks: what compresses to nothing is no measure.
async fn fill(guests: &Guests, memory_mib: u64) -> anyhow::Result<()> {
    let (client, scale) = (guests.client(NAME)?, memory_mib * DATA_PERCENT / 100 / SCALE_MIB);
    let pool = memory_mib * POOL_PERCENT / 100;
    let text = "md5(i::text) || md5((-i)::text) || substr(md5((i * 7)::text), 1, 20)";
    let statements = [
        format!("ALTER SYSTEM SET shared_buffers = '{pool}MB'"),
        "CREATE EXTENSION pg_prewarm".to_owned(),
        format!("INSERT INTO pgbench_branches SELECT i, 0, NULL FROM generate_series(1, {scale}) i"),
        format!("INSERT INTO pgbench_tellers SELECT i, 1, 0, NULL FROM generate_series(1, {scale}0) i"),
        format!("INSERT INTO pgbench_accounts SELECT i, 1, 0, {text} FROM generate_series(1, {scale}00000) i"),
    ];
    let options: String = statements.iter().map(|statement| format!(" -c \"{statement}\"")).collect();
    for command in [
        &*format!("{client}pgbench -i -q -Idt"),
        &format!("{client}psql -Xq{options}"),
        &format!("{client}pgbench -i -q -Ivp"),
    ] {
        guests.guest(NAME, command).await?;
    }
    Ok(())
}

impl Site {
    /// Makes it, with a cache that is full.
    pub async fn begin(place: &Path, memory_mib: u64, link_mbit: u64) -> anyhow::Result<Site> {
        let (hosts, keys) = two_hosts::make(place)?;
        let guests = &hosts[0].guests;
        guests.create(NAME, memory_mib, &["--postgresql", "--checkpoints"]).await?;
        guests.install(NAME).await?;
        fill(guests, memory_mib).await?;
        guests.run(&["vm", "stop", NAME])?;
        guests.run(&["vm", "start", NAME])?;
        let site = Site { hosts, at: 0, serving: None, bytes_per_second: link_mbit * 1_000_000 / 8, _keys: keys };
        site.wait_scanned().await?;
        Ok(site)
    }

    fn guests(&self) -> &Guests {
        &self.hosts[self.at].guests
    }

    /// Whether the machine answers where it should be.
    pub async fn is_well(&self) -> bool {
        self.guests().guest(NAME, "true").await.is_ok()
    }

    /// Sends the machine by `method`, or as QEMU would, while it does `load`.
    pub async fn migrate(&mut self, round: u32, load: Load, method: Method) -> anyhow::Result<Sent> {
        self.warm().await?;
        self.begin_load(load).await?;
        let sent = self.migrate_under(round, load, method).await;
        // Also where it has failed: the next one has a load of its own.
        let ended = self.end_load(load).await;
        let sent = sent?;
        ended?;
        self.wait_whole().await?;
        Ok(sent)
    }

    async fn migrate_under(&mut self, round: u32, load: Load, method: Method) -> anyhow::Result<Sent> {
        let (counted, begun) = (self.transactions().await?, Instant::now());
        tokio::time::sleep(BEFORE).await;
        let before_per_second = self.rate_since(counted, begun).await?;
        let (counted, begun) = (self.transactions().await?, Instant::now());
        let (total_s, bytes, pause_ms) = match method {
            Method::Shared | Method::Copied => {
                let (result, took) = self.send(method == Method::Shared).await?;
                (took.as_secs_f64(), result.bytes, result.pause_us as f64 / 1e3)
            }
            Method::Qemu | Method::Multifd => {
                let way = if method == Method::Qemu { qemu::Way::Plain } else { qemu::Way::MultifdZstd };
                let order =
                    qemu::Order { way, bytes_per_second: self.bytes_per_second, downtime: DOWNTIME, timeout: TIMEOUT };
                let sent = qemu::send(self.guests(), NAME, order).await?;
                (sent.total.as_secs_f64(), sent.bytes, sent.pause.as_secs_f64() * 1e3)
            }
        };
        let meanwhile_per_second = self.rate_since(counted, begun).await?;
        Ok(Sent {
            round,
            load,
            method,
            total_s,
            mb: bytes as f64 / 1e6,
            pause_ms,
            before_per_second,
            meanwhile_per_second,
        })
    }

    /// Reads all tables and indexes into the server's pool.
    async fn warm(&self) -> anyhow::Result<()> {
        let relations = "SELECT pg_prewarm(oid) FROM pg_class WHERE relname LIKE 'pgbench_%' AND relkind IN ('r', 'i')";
        let ask = format!("{}psql -Xq -c \"{relations}\" > /dev/null", self.guests().client(NAME)?);
        self.guests().guest(NAME, &ask).await.map(|_| ())
    }

    async fn begin_load(&self, load: Load) -> anyhow::Result<()> {
        let begin = match load.written_mb() {
            Some(rate) => format!(
                "rm -f {OVER} {REPORT}; PATH=$PATH:/usr/lib/onecopy setsid guest-exercise --memory --span {SPAN_BYTES} \
                 --rate {rate}000000 --seconds 3600 --until {OVER} > {REPORT} 2>&1 < /dev/null &"
            ),
            None if load == Load::Read => {
                let client = self.guests().client(NAME)?;
                let variables = client.trim_end_matches(|letter| letter != ' ');
                let program = client.rsplit(' ').next().unwrap_or_default();
                format!("{variables}setsid {program}pgbench -n -S -c{CLIENTS} -T3600 > /dev/null 2>&1 < /dev/null &")
            }
            None => return Ok(()),
        };
        self.guests().guest(NAME, &begin).await.map(|_| ())
    }

    /// Ends it; what was written to memory is as it was written.
    async fn end_load(&self, load: Load) -> anyhow::Result<()> {
        let end = |name: &str| format!("while pgrep -x {name} > /dev/null; do sleep 0.1; done");
        if load.written_mb().is_some() {
            let ended = end("guest-exercise");
            let told = self.guests().guest(NAME, &format!("touch {OVER}; {ended}; cat {REPORT}")).await?;
            ensure!(told.contains("\"errors\":0"), "the guest's memory is not as it was written: {told}");
        } else if load == Load::Read {
            self.guests().guest(NAME, &format!("pkill -x pgbench; {}", end("pgbench"))).await?;
        }
        Ok(())
    }

    /// Transactions that its server has committed.
    async fn transactions(&self) -> anyhow::Result<f64> {
        let client = self.guests().client(NAME)?;
        let ask = format!("{client}psql -XAtc 'SELECT sum(xact_commit) FROM pg_stat_database'");
        Ok(self.guests().guest(NAME, &ask).await?.parse()?)
    }

    async fn rate_since(&self, transactions: f64, since: Instant) -> anyhow::Result<f64> {
        Ok((self.transactions().await? - transactions) / since.elapsed().as_secs_f64())
    }

    /// `onecopy host` of one of them; `shares` is a directory that it has in common with the other.
    fn serve(&self, host: usize, shares: Option<&Path>) -> anyhow::Result<Serving> {
        let shares = shares.into_iter().flat_map(|shares| ["--shared-storage".into(), shares.into()]);
        self.hosts[host].serve(shares)
    }

    /// Sends the machine to the other host by ours, and waits until it does not need this one any more.
    async fn send(&mut self, shares: bool) -> anyhow::Result<(MigrationResult, Duration)> {
        let (from, to) = (self.at, 1 - self.at);
        let shared = self.hosts[from].guests.root().parent();
        let here = self.serve(from, None)?;
        let there = self.serve(to, shared.filter(|_| shares))?;
        let guests = &self.hosts[from].guests;
        let keys = self.hosts[from].keys()?;
        let bandwidth = format!("--bandwidth={}kB", self.bytes_per_second / 1000);
        let timeout = format!("--timeout-s={}", TIMEOUT.as_secs());
        let downtime = format!("--downtime-ms={}", DOWNTIME.as_millis());
        let ways = ["--keys", keys, "--to", &there.address, "--origin", &here.address];
        let begun = Instant::now();
        let told = guests.run(
            &[&["vm", "migrate", NAME, "--json", "--on-timeout=go", &timeout, &bandwidth, &downtime], &ways[..]]
                .concat(),
        )?;
        let took = begun.elapsed();
        let last: Value = serde_json::from_str(told.lines().last().context("it says what came of it")?)?;
        let result: MigrationResult = serde_json::from_value(last["result"].clone())?;
        ensure!(result.shares_disk == shares, "the disk is shared: {}", result.shares_disk);
        self.at = to;
        self.serving = Some([here, there]);
        Ok((result, took))
    }

    /// Until the host that it came from is not needed any more.
    async fn wait_whole(&mut self) -> anyhow::Result<()> {
        let Some(serving) = self.serving.take() else { return Ok(()) };
        let begun = Instant::now();
        loop {
            let known: Value = serde_json::from_str(&self.guests().run(&["vm", "migrate", NAME, "--status"])?)?;
            if known["arrival"]["is_whole"] == true {
                break;
            }
            ensure!(begun.elapsed() < DISK_TIMEOUT, "its disk does not come: {known}");
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        drop(serving);
        self.wait_scanned().await
    }

    /// Until the page map of its disk knows all of it: what came with the machine has not passed through it.
    async fn wait_scanned(&self) -> anyhow::Result<()> {
        let machine = self.guests().machine(NAME)?;
        let (disk, disk_bytes) = (machine.home().disk(), machine.home().configuration()?.disk_bytes);
        let begun = Instant::now();
        loop {
            let asked = disk.clone();
            // It blocks, with a runtime of its own.
            let served = tokio::task::spawn_blocking(move || DiskClient::connect(&asked)?.info()).await??;
            let scanned = served.page_map.context("the disk has a page map")?.scanned_bytes;
            if scanned >= disk_bytes {
                return Ok(());
            }
            ensure!(begun.elapsed() < DISK_TIMEOUT, "its disk is scanned up to {scanned} only");
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }
}
