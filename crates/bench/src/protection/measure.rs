//! The machine between its two hosts, under a load, and its death.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use onecopy_machine::keeper::{ProtectionState, ProtectionStatus};
use onecopy_testing::process;
use serde::Serialize;
use tempfile::TempDir;
use tokio::process::Command;

use super::link::{Link, LinkShape, Relay};
use super::mirror::{self, Peer};
use crate::guests::Guests;
use crate::pgbench::parse;
use crate::two_hosts::{self, Host, Serving};

const NAME: &str = "shop";
/// Where it is reached.
const ADDRESS: &str = "192.0.2.10";
/// How often its status is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
const CLIENTS: u32 = 4;
/// pgbench's tables: some 75 MB.
const SCALE: u32 = 5;
/// The file that is written, in records. No page of it is as any other one was, and none compresses to less.
const FILE_BYTES: u32 = 128 << 20;
const RECORD_BYTES: u32 = 32 << 10;
const FILE: &str = "/root/file";
/// Epochs that are waited for when a load is over: the last one has all that it wrote.
const EPOCHS_AFTER: u64 = 2;
/// What they may take.
const AFTER: Duration = Duration::from_secs(60);

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
    /// What it sends waits, and what has changed travels as data, wherever the other side has it.
    Data,
    /// Its disk is mirrored by QEMU, each write before it is done; its memory is not sent.
    Mirror,
}

impl Way {
    /// In the order in which they run.
    pub const ALL: [Way; 5] = [Way::Alone, Way::Output, Way::Periodic, Way::Data, Way::Mirror];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Way::Alone => "not protected",
            Way::Output => "output held",
            Way::Periodic => "periodic",
            Way::Data => "output held, all as data",
            Way::Mirror => "disk mirrored, memory not sent",
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

    /// What it does is counted in these.
    pub fn one(self) -> &'static str {
        match self {
            Load::Transactions | Load::Reads => "transaction",
            Load::File => "MB",
        }
    }
}

/// A load under one way.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Measured {
    /// The round.
    pub round: u32,
    /// Between the hosts.
    pub link: LinkShape,
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
    /// Kilobytes that went over the link for each transaction, or megabyte that was written.
    pub sent_kb: Option<f64>,
    /// Of these, for blocks of the disk, as the machine's keeper counts them.
    pub disk_kb: Option<f64>,
    /// Of blocks that had changed, those whose content the other side had in memory.
    pub known_blocks_percent: Option<f64>,
}

/// A death of the machine while it was protected.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Death {
    /// The round.
    pub round: u32,
    /// Between the hosts.
    pub link: LinkShape,
    /// From the kill until a question over a connection of before was answered.
    pub old_s: f64,
    /// Until a new one had an answer.
    pub new_s: f64,
}

/// The machine and its hosts.
pub struct Site {
    // First: nobody looks after machines that are being removed.
    serving: [Serving; 2],
    hosts: [Host; 2],
    link: Arc<Link>,
    /// To each host.
    relays: [Relay; 2],
    /// Where the disk is mirrored to, and the way there.
    mirror: (Peer, Relay),
    /// Which of them it runs on.
    at: usize,
    period_ms: u64,
    _keys: TempDir,
}

impl Site {
    /// Makes it, with pgbench's tables.
    pub async fn begin(place: &Path, memory_mib: u64, period_ms: u64) -> anyhow::Result<Site> {
        let (hosts, keys) = two_hosts::make(place)?;
        let serve = |host: &Host| host.serve(["--bridge".into(), "br0".into()]);
        let serving = [serve(&hosts[0])?, serve(&hosts[1])?];
        let guests = &hosts[0].guests;
        let network = format!("--network=bridge=br0,address={ADDRESS}/24,gateway=192.0.2.1");
        guests.create(NAME, memory_mib, &["--postgresql", "--checkpoints", &network]).await?;
        let client = guests.client(NAME)?;
        guests.guest(NAME, &format!("{client}pgbench -i -q -s {SCALE}")).await?;
        let link = Arc::new(Link::default());
        let relays = [Relay::begin(&link, &serving[0].address).await?, Relay::begin(&link, &serving[1].address).await?];
        let disk_bytes = guests.machine(NAME)?.home().configuration()?.disk_bytes;
        let peer = Peer::begin(keys.path(), disk_bytes).await?;
        let mirror = Relay::begin(&link, &peer.address).await?;
        Ok(Site { hosts, serving, link, relays, mirror: (peer, mirror), at: 0, period_ms, _keys: keys })
    }

    fn guests(&self) -> &Guests {
        &self.hosts[self.at].guests
    }

    /// Protects it, or not, as this way is.
    pub async fn begin_way(&self, way: Way) -> anyhow::Result<()> {
        let durability = match way {
            Way::Alone => return Ok(()),
            Way::Mirror => return mirror::begin(self.guests(), NAME, &self.mirror.1.address).await,
            Way::Output | Way::Data => "--durability=output",
            Way::Periodic => "--durability=periodic",
        };
        let (here, there) = (&self.hosts[self.at], &self.relays[1 - self.at]);
        let (keys, period) = (here.keys()?, format!("--period-ms={}", self.period_ms));
        let origin = &*self.serving[self.at].address;
        let mut ways = vec!["vm", "protect", NAME, "--keys", keys, "--to", &there.address, "--origin", origin];
        ways.extend([durability, &*period]);
        ways.extend((way == Way::Data).then_some("--send-all"));
        here.guests.run(&ways)?;
        Ok(())
    }

    /// Ends that.
    pub async fn end_way(&self, way: Way) -> anyhow::Result<()> {
        match way {
            Way::Alone => Ok(()),
            Way::Mirror => mirror::end(self.guests(), NAME).await,
            Way::Output | Way::Periodic | Way::Data => self.guests().run(&["vm", "unprotect", NAME]).map(|_| ()),
        }
    }

    async fn status(&self) -> anyhow::Result<Option<ProtectionStatus>> {
        let status = self.guests().machine(NAME)?.status().await?.protection;
        let is_well = status.as_ref().is_none_or(|status| status.state == ProtectionState::Protected);
        ensure!(is_well, "it is not protected any more: {status:?}");
        Ok(status)
    }

    /// Runs a load over a link of this shape.
    pub async fn measure(
        &self,
        (round, link): (u32, LinkShape),
        way: Way,
        load: Load,
        seconds: u32,
    ) -> anyhow::Result<Measured> {
        self.link.set(link);
        let measured = self.measured((round, link), way, load, seconds).await;
        self.link.set(LinkShape::UNBOUNDED);
        measured
    }

    async fn measured(
        &self,
        (round, link): (u32, LinkShape),
        way: Way,
        load: Load,
        seconds: u32,
    ) -> anyhow::Result<Measured> {
        self.wait_sent().await?;
        let (before, sent_before) = (self.status().await?, self.link.bytes());
        let mut seen: Vec<ProtectionStatus> = Vec::new();
        let looking = async {
            loop {
                tokio::time::sleep(LOOK_INTERVAL).await;
                let known = self.status().await?;
                seen.extend(known.filter(|now| seen.last().is_none_or(|last| last.epochs < now.epochs)));
            }
        };
        let begun = Instant::now();
        let (rate, latency_ms) = tokio::select! {
            ran = self.run(load, seconds) => ran?,
            failed = looking => { let never: anyhow::Result<std::convert::Infallible> = failed; match never? {} }
        };
        let done = rate * begun.elapsed().as_secs_f64();
        self.wait_sent().await?;
        let change = before.zip(self.status().await?);
        let kb = |bytes: u64| bytes as f64 / 1e3 / done;
        let median = |of: fn(&ProtectionStatus) -> f64| {
            let values: Vec<f64> = seen.iter().map(of).collect();
            crate::statistics::Spread::of(&values).map(|spread| spread.median)
        };
        Ok(Measured {
            round,
            link,
            way,
            load,
            rate,
            latency_ms,
            pause_ms: median(|status| status.pause_us as f64 / 1e3),
            period_ms: median(|status| status.period_ms as f64),
            held_ms: median(|status| status.held_us as f64 / 1e3).filter(|_| matches!(way, Way::Output | Way::Data)),
            sent_kb: (way != Way::Alone).then(|| kb(self.link.bytes() - sent_before)),
            disk_kb: change.as_ref().map(|(then, now)| kb(now.disk_bytes - then.disk_bytes)),
            known_blocks_percent: change.and_then(|(then, now)| {
                let known = (now.known_blocks - then.known_blocks) as f64;
                let all = known + (now.data_blocks - then.data_blocks) as f64;
                (all > 0.0).then_some(100.0 * known / all)
            }),
        })
    }

    /// Waits until all that the guest has written so far is with the other host.
    async fn wait_sent(&self) -> anyhow::Result<()> {
        self.guests().guest(NAME, "sync").await?;
        let sent = async {
            let Some(then) = self.status().await? else { return Ok(()) };
            while self.status().await?.is_some_and(|now| now.epochs < then.epochs + EPOCHS_AFTER) {
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(AFTER, sent).await.context("what it has written is not sent")?
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
        // Noise, of which each record has another part, and is another one by a number in each of its words.
        let write = format!(
            "perl -MTime::HiRes=time -e '\
             open $r, \"<\", \"/dev/urandom\"; read $r, $noise, 1 << 20; \
             open $f, \"+>\", \"{FILE}\" or die; $begun = time; $n = int($begun * 1000) << 16; $done = 0; \
             while (($took = time - $begun) < {seconds}) {{ \
             sysseek $f, $done % {FILE_BYTES}, 0; ++$n; \
             $record = substr($noise, ($n % 31) * {RECORD_BYTES}, {RECORD_BYTES}) \
             ^ (pack(\"Q\", $n) x ({RECORD_BYTES} / 8)); \
             $done += syswrite($f, $record) or die }} \
             print $done / 1e6 / $took'"
        );
        Ok(self.guests().guest(NAME, &write).await?.trim().parse()?)
    }

    /// Kills it while it is protected; it goes on at the other host.
    pub async fn die(&mut self, (round, link): (u32, LinkShape)) -> anyhow::Result<Death> {
        self.begin_way(Way::Output).await?;
        self.link.set(link);
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
        self.link.set(LinkShape::UNBOUNDED);
        Ok(Death { round, link, old_s: old_s?.as_secs_f64(), new_s: new_s?.as_secs_f64() })
    }
}
