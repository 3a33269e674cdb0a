//! A machine that another host protects: what that costs it and its clients, and how soon it goes on when it dies.
//!
//! Two hosts on one machine, on a bridge in a network namespace of the experiment's own; clients are on the bridge.
//! The ways follow each other on each link of each round, and at its end the machine is killed while it is protected:
//! what comes next begins on the other host.

mod link;
mod measure;
mod mirror;
mod report;

use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::thread::UnshareFlags;

use crate::guests::Guests;
use crate::head::Head;
use link::LinkShape;
use measure::{Load, Site, Way};
use report::Report;

/// Options of `onecopy-bench protection`.
#[derive(Debug, Clone, clap::Args)]
pub struct ProtectionOptions {
    /// A short form of some minutes; writes files only with --output
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Rounds [default: 3, quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// How long each load runs, in seconds [default: 20, quick: 5]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: Option<u32>,
    /// The machine's memory, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u64).range(512..=65536))]
    memory: u64,
    /// From one checkpoint to the next, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 100)]
    period: u64,
    /// Links between the hosts, each as MBIT:MILLISECONDS of a round trip
    #[arg(long, value_name = "LINK", value_delimiter = ',', default_value = "1000:0,100:20")]
    links: Vec<LinkShape>,
    /// Where the machines are made: its file system must have 24 GB of room
    #[arg(long, default_value = "/tmp")]
    place: PathBuf,
    /// Directory for protection.md and protection.png [default: docs/results, quick: none]
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Makes the network of the hosts, for this thread and all that it begins.
///
/// # Errors
/// This is not root.
pub fn enter_network() -> anyhow::Result<()> {
    // SAFETY: nothing in this thread uses the network of before.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.context("a network namespace needs root")?;
    for arguments in ["link set lo up", "link add br0 type bridge", "addr add 192.0.2.1/24 dev br0", "link set br0 up"]
    {
        let ran = std::process::Command::new("ip").args(arguments.split(' ')).status().context("ip")?;
        anyhow::ensure!(ran.success(), "ip {arguments}: {ran}");
    }
    Ok(())
}

/// Runs the experiment, in the network that [`enter_network`] has made.
///
/// # Errors
/// Nothing could be measured.
pub async fn run(options: &ProtectionOptions) -> anyhow::Result<()> {
    let rounds = options.rounds.unwrap_or(if options.quick { 1 } else { 3 });
    let seconds = options.seconds.unwrap_or(if options.quick { 5 } else { 20 });
    let command = format!(
        "cargo run --release -p onecopy-bench -- protection --rounds {rounds} --seconds {seconds} --memory {} \
         --period {} --links {}",
        options.memory,
        options.period,
        options.links.iter().map(|link| format!("{}:{}", link.mbit, link.round_trip_ms)).collect::<Vec<_>>().join(",")
    );
    let head = Head::new("protection", command, Guests::versions()?);
    let mut report = Report::new(head, options.memory, options.period);
    let mut site = Site::begin(&options.place, options.memory, options.period).await?;
    'rounds: for (round, link) in (1..=rounds).flat_map(|round| options.links.iter().map(move |link| (round, *link))) {
        let round_of = format!("round {round}, {}", link.name());
        for way in Way::ALL {
            let begun = site.begin_way(way).await;
            let run = format!("{round_of}, {}", way.name());
            if report.head.keep(&run, begun).is_none() {
                continue;
            }
            for load in Load::ALL {
                let run = format!("{round_of}, {}, {}", way.name(), load.name());
                let measured = site.measure((round, link), way, load, seconds).await;
                if let Some(measured) = report.head.keep(&run, measured) {
                    eprintln!("{run}: {:.1} {}", measured.rate, load.unit());
                    report.runs.push(measured);
                }
            }
            if report.head.keep(&run, site.end_way(way).await).is_none() {
                break 'rounds;
            }
        }
        let run = format!("{round_of}, its death");
        match report.head.keep(&run, site.die((round, link)).await) {
            Some(death) => {
                eprintln!("{run}: {:.2} s until its next answer", death.old_s);
                report.deaths.push(death);
            }
            None => break 'rounds,
        }
    }
    report.head.end();
    report.print(options.json)?;
    if let Some(directory) = options.output.as_deref().or((!options.quick).then_some(Path::new("docs/results"))) {
        report.write(directory)?;
    }
    anyhow::ensure!(!report.runs.is_empty(), "nothing was measured: {:?}", report.head.failures);
    Ok(())
}
