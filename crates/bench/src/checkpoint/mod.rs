//! What checkpoints of a machine cost it: how long it stands, and for what, by how much it writes and how often they
//! are taken; what is left of its server's rate; how soon it answers after a restore.
//!
//! The machine has a server and a program that writes to its memory at a rate. Rates and periods of one round follow
//! each other; ratios are formed within one round.

mod measure;
mod report;

use std::path::{Path, PathBuf};

use crate::guests::Guests;
use crate::head::Head;
use measure::{Site, server, takes};
use report::Report;

/// Megabytes of memory written a second.
pub const RATES_MB: [u32; 3] = [0, 10, 50];
/// Milliseconds from one checkpoint to the next.
pub const PERIODS_MS: [u32; 3] = [100, 250, 1000];
/// Memory of the machine.
pub const MEMORY_MIB: u64 = 1024;

/// Options of `onecopy-bench checkpoint`.
#[derive(Debug, Clone, clap::Args)]
pub struct CheckpointOptions {
    /// A short form of three minutes; writes files only with --output
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Rounds [default: 3, quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Seconds of each run [default: 8, quick: 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: Option<u32>,
    /// Where the machine is made: its file system must have 8 GB of room
    #[arg(long, default_value = "/tmp")]
    place: PathBuf,
    /// Directory for checkpoint.md and checkpoint.png [default: docs/results, quick: none]
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Runs the experiment.
///
/// # Errors
/// Nothing could be measured.
pub async fn run(options: &CheckpointOptions) -> anyhow::Result<()> {
    let rounds = options.rounds.unwrap_or(if options.quick { 1 } else { 3 });
    let seconds = options.seconds.unwrap_or(if options.quick { 3 } else { 8 });
    let command = format!("cargo run --release -p onecopy-bench -- checkpoint --rounds {rounds} --seconds {seconds}");
    let mut report = Report::new(Head::new("checkpoint", command, Guests::versions()?), seconds);
    let site = Site::begin(&options.place).await?;
    for round in 1..=rounds {
        for rate in RATES_MB {
            for period in PERIODS_MS {
                let run = format!("round {round}, {rate} MB/s, every {period} ms");
                let measured = takes(&site, rate, period, seconds).await;
                if let Some(measured) = report.head.keep(&run, measured) {
                    let (own, pause) = (measured.own_ms.median, measured.pause_ms.median);
                    eprintln!("{run}: stood {pause:.1} ms, {own:.1} of them ours");
                    report.takes.push(measured);
                }
            }
        }
        for period in [None, Some(1000), Some(250), Some(100)] {
            let measured = server(&site, round, period, seconds).await;
            if let Some(measured) = report.head.keep(&format!("round {round}, server, {period:?}"), measured) {
                eprintln!("round {round}, server, {period:?}: {:.0} transactions/s", measured.per_second);
                report.servers.push(measured);
            }
        }
        let restored = site.restore().await;
        report.restores.extend(report.head.keep(&format!("round {round}, restore"), restored));
    }
    report.head.end();
    report.print(options.json)?;
    if let Some(directory) = options.output.as_deref().or((!options.quick).then_some(Path::new("docs/results"))) {
        report.write(directory)?;
    }
    anyhow::ensure!(!report.takes.is_empty(), "nothing was measured: {:?}", report.head.failures);
    Ok(())
}
