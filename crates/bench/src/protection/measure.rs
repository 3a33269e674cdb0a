//! The machine between its two hosts, under a load, and its death.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use onecopy_machine::keeper::{ProtectionState, ProtectionStatus};
use onecopy_testing::process;
use serde::Serialize;
use tempfile::TempDir;
use tokio::process::Command;

use crate::guests::Guests;
use crate::pgbench::parse;

const NAME: &str = "shop";
/// Where it is reached.
const ADDRESS: &str = "192.0.2.10";
/// How often its status is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
const CLIENTS: u32 = 4;
/// pgbench's tables: some 75 MB.
const SCALE: u32 = 5;
/// The file that is written, and what it is written of: nothing that compresses to little.
const FILE_MIB: u32 = 128;
const SOURCE: &str = "/dev/shm/source";
const FILE: &str = "/root/file";
const RECORD: &str = "32k";

/// How the machine is protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Not at all.
    Alone,
    /// What it sends waits.
    Output,
    /// Nothing waits.
    Periodic,
}

impl Way {
    /// In the order in which they run.
    pub const ALL: [Way; 3] = [Way::Alone, Way::Output, Way::Periodic];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Way::Alone => "not protected",
            Way::Output => "output held",
            Way::Periodic => "periodic",
        }
    }
}

/// What it does meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// pgbench's transactions, of clients on the bridge.
    Transactions,
    /// pgbench's reads, of the same.
    Reads,
    /// A file of 128 MB is written in records of 32 KB, again and again, and not flushed.
    File,
}

impl Load {
    /// In the order in which they run.
    pub const ALL: [Load; 3] = [Load::Reads, Load::Transactions, Load::File];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Load::Transactions => "tpcb-like",
            Load::Reads => "select-only",
            Load::File => "a file written",
        }
    }

    /// Of its rate.
    pub fn unit(self) -> &'static str {
        match self {
            Load::Transactions | Load::Reads => "transactions/s",
            Load::File => "MB/s",
        }
    }
}

/// A load under one way.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Measured {
    /// The round.
    pub round: u32,
    /// How it was protected.
    pub way: Way,
    /// What it did.
    pub load: Load,
    /// Transactions, or megabytes, a second.
    pub rate: f64,
    /// Mean time of a transaction as its client sees it.
    pub latency_ms: Option<f64>,
    /// How long the machine stood for a checkpoint: the median of those that were seen.
    pub pause_ms: Option<f64>,
    /// From one to the next, of the same.
    pub period_ms: Option<f64>,
    /// How long what it sent was held from then on, of the same.
    pub held_ms: Option<f64>,
    /// Megabytes a second that were sent.
    pub sent_mb_per_second: Option<f64>,
    /// Of pages and blocks that had changed, those whose content the other side had.
    pub known_percent: Option<f64>,
}

/// A death of the machine while it was protected.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Death {
    /// The round.
    pub round: u32,
    /// From the kill until a question over a connection of before was answered.
    pub old_s: f64,
    /// Until a new one had an answer.
    pub new_s: f64,
}

struct Host {
    guests: Guests,
    keys: PathBuf,
    address: String,
    serving: Child,
}

impl Drop for Host {
    fn drop(&mut self) {
        process::kill(self.serving.id());
        let _ = self.serving.wait();
    }
}

/// The machine and its hosts.
pub struct Site {
    hosts: [Host; 2],
    /// Which of them it runs on.
    at: usize,
    period_ms: u64,
    _keys: TempDir,
}

impl Site {
    /// Makes it, with pgbench's tables.
    pub async fn begin(place: &Path, memory_mib: u64, period_ms: u64) -> anyhow::Result<Site> {
        let keys = TempDir::new_in(place)?;
        let authority = keys.path().join("ca");
        let host = |name: &str| {
            let guests = Guests::new(place)?;
            let ca = authority.to_str().context("UTF-8")?;
            guests.run(&["host", "keys", "--ca", ca, "--name", name, "--address", "127.0.0.1"])?;
            let keys = authority.join(name);
            let mut arguments = vec!["host".into(), "--listen".into(), "127.0.0.1:0".into(), "--keys".into()];
            arguments.extend([keys.clone().into(), "--machines".into(), guests.root().into()]);
            arguments.extend(["--bridge".into(), "br0".into()]);
            let (serving, address) = guests.serve(&arguments)?;
            anyhow::Ok(Host { guests, keys, address, serving })
        };
        let hosts = [host("one")?, host("two")?];
        let guests = &hosts[0].guests;
        let network = format!("--network=bridge=br0,address={ADDRESS}/24,gateway=192.0.2.1");
        guests.create(NAME, memory_mib, &["--postgresql", "--checkpoints", &network]).await?;
        let client = guests.client(NAME)?;
        guests.guest(NAME, &format!("{client}pgbench -i -q -s {SCALE}")).await?;
        let source = format!("dd if=/dev/urandom of={SOURCE} bs=1M count={FILE_MIB} 2> /dev/null");
        guests.guest(NAME, &source).await?;
        Ok(Site { hosts, at: 0, period_ms, _keys: keys })
    }

    fn guests(&self) -> &Guests {
        &self.hosts[self.at].guests
    }

    /// Protects it, or not, as this way is.
    pub async fn begin_way(&self, way: Way) -> anyhow::Result<()> {
        let durability = match way {
            Way::Alone => return Ok(()),
            Way::Output => "--durability=output",
            Way::Periodic => "--durability=periodic",
        };
        let (here, there) = (&self.hosts[self.at], &self.hosts[1 - self.at]);
        let (keys, period) = (here.keys.to_str().context("UTF-8")?, format!("--period-ms={}", self.period_ms));
        let ways = ["--keys", keys, "--to", &there.address, "--origin", &here.address, durability, &period];
        here.guests.run(&[&["vm", "protect", NAME], &ways[..]].concat())?;
        Ok(())
    }

    /// Ends that.
    pub fn end_way(&self, way: Way) -> anyhow::Result<()> {
        match way {
            Way::Alone => Ok(()),
            Way::Output | Way::Periodic => self.guests().run(&["vm", "unprotect", NAME]).map(|_| ()),
        }
    }

    async fn status(&self) -> anyhow::Result<Option<ProtectionStatus>> {
        let status = self.guests().machine(NAME)?.status().await?.protection;
        let is_well = status.as_ref().is_none_or(|status| status.state == ProtectionState::Protected);
        ensure!(is_well, "it is not protected any more: {status:?}");
        Ok(status)
    }

    /// Runs a load.
    pub async fn measure(&self, round: u32, way: Way, load: Load, seconds: u32) -> anyhow::Result<Measured> {
        let (before, begun) = (self.status().await?, Instant::now());
        let mut seen: Vec<ProtectionStatus> = Vec::new();
        let looking = async {
            loop {
                tokio::time::sleep(LOOK_INTERVAL).await;
                let known = self.status().await?;
                seen.extend(known.filter(|now| seen.last().is_none_or(|last| last.epochs < now.epochs)));
            }
        };
        let (rate, latency_ms) = tokio::select! {
            ran = self.run(load, seconds) => ran?,
            failed = looking => { let never: anyhow::Result<std::convert::Infallible> = failed; match never? {} }
        };
        let took = begun.elapsed().as_secs_f64();
        let change = before.zip(seen.last().cloned());
        let median = |of: fn(&ProtectionStatus) -> f64| {
            let values: Vec<f64> = seen.iter().map(of).collect();
            crate::statistics::Spread::of(&values).map(|spread| spread.median)
        };
        Ok(Measured {
            round,
            way,
            load,
            rate,
            latency_ms,
            pause_ms: median(|status| status.pause_us as f64 / 1e3),
            period_ms: median(|status| status.period_ms as f64),
            held_ms: median(|status| status.held_us as f64 / 1e3).filter(|_| way == Way::Output),
            sent_mb_per_second: change.as_ref().map(|(then, now)| (now.bytes - then.bytes) as f64 / 1e6 / took),
            known_percent: change.map(|(then, now)| {
                let known = (now.known_pieces - then.known_pieces) as f64;
                100.0 * known / (known + (now.data_pieces - then.data_pieces) as f64).max(1.0)
            }),
        })
    }

    async fn run(&self, load: Load, seconds: u32) -> anyhow::Result<(f64, Option<f64>)> {
        let builtin = match load {
            Load::Transactions => "tpcb-like",
            Load::Reads => "select-only",
            Load::File => return Ok((self.write_file(seconds).await?, None)),
        };
        let access = self.guests().access(NAME)?;
        let pgbench = onecopy_postgres::Binaries::find(None)?.program("pgbench");
        let time = seconds.to_string();
        let mut command = Command::new(pgbench);
        command.args(["-n", "-h", ADDRESS, "-U", "postgres", "-b", builtin, "-j1", "-c"]);
        command.arg(CLIENTS.to_string()).args(["-T", &time, "postgres"]);
        command.env("PGPASSWORD", access.password.unwrap_or_default()).env("LC_ALL", "C").kill_on_drop(true);
        let output = command.output().await?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "pgbench: {}", complaint.trim());
        let counts = parse(&String::from_utf8_lossy(&output.stdout))?;
        Ok((counts.transactions_per_second, Some(counts.latency_ms)))
    }

    /// Megabytes a second.
    async fn write_file(&self, seconds: u32) -> anyhow::Result<f64> {
        let write = format!(
            "b=$(date +%s%N); n=0; while [ $(($(date +%s%N) - b)) -lt {seconds}000000000 ]; do \
             dd if={SOURCE} of={FILE} bs={RECORD} conv=notrunc 2> /dev/null; n=$((n + 1)); done; \
             echo $((n * {FILE_MIB})) $((($(date +%s%N) - b) / 1000000))"
        );
        let said = self.guests().guest(NAME, &write).await?;
        let (written, took_ms) = said.split_once(' ').context("two numbers")?;
        Ok(written.parse::<f64>()? * 1048.576 / took_ms.parse::<f64>()?)
    }

    /// Kills it while it is protected; it goes on at the other host.
    pub async fn die(&mut self, round: u32) -> anyhow::Result<Death> {
        self.begin_way(Way::Output).await?;
        let guests = self.guests();
        let old = guests.access(NAME)?.connect_as_client().await?;
        old.batch_execute("SELECT 1").await?;
        let qemu = guests.machine(NAME)?.process_id().context("it runs")?;
        let killed = Instant::now();
        process::kill(qemu);
        let (old_s, new_s) = tokio::join!(
            async { old.batch_execute("SELECT 1").await.map(|()| killed.elapsed()) },
            guests.answers(NAME, "SELECT 1")
        );
        self.at = 1 - self.at;
        self.guests().machine(NAME)?.wait_answering(Duration::from_secs(120)).await?;
        Ok(Death { round, old_s: old_s?.as_secs_f64(), new_s: new_s?.as_secs_f64() })
    }
}
