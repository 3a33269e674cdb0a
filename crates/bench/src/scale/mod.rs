//! A cluster in machines that grows while clients are at work: how soon its followers answer, what clients have of
//! that, and how much memory all machines take together; by forks, and by machines that boot and make a base backup.
//!
//! One round has each method with each load, in a cluster of its own; neighbours in time are what is compared. The
//! machines that boot are made as their users would have them: with QEMU's own memory, of which the guest gives back
//! what it does not use.

mod measure;
mod report;

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::guests::Guests;
use crate::head::Head;
use report::Report;

/// Memory of a machine.
pub const MEMORY_MIB: u64 = 512;

/// How followers are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Forks of one that runs.
    Fork,
    /// Machines that boot, and a base backup in each.
    Boot,
}

impl Method {
    /// Both.
    pub const ALL: [Method; 2] = [Method::Fork, Method::Boot];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Method::Fork => "fork",
            Method::Boot => "boot and base backup",
        }
    }
}

/// Options of `onecopy-bench scale`.
#[derive(Debug, Clone, clap::Args)]
pub struct ScaleOptions {
    /// A short form of five minutes: one follower, then two; writes files only with --output
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Rounds [default: 3, quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Seconds for which clients work between two changes [default: 6, quick: 5]
    #[arg(long, value_parser = clap::value_parser!(u32).range(3..=600))]
    seconds: Option<u32>,
    /// Where the machines are made: its file system must have 20 GB of room
    #[arg(long, default_value = "/tmp")]
    place: PathBuf,
    /// Directory for scale.md and its plots [default: docs/results, quick: none]
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Runs the experiment.
///
/// # Errors
/// Nothing could be measured.
pub async fn run(options: &ScaleOptions) -> anyhow::Result<()> {
    let rounds = options.rounds.unwrap_or(if options.quick { 1 } else { 3 });
    let seconds = options.seconds.unwrap_or(if options.quick { 5 } else { 6 });
    let command = format!("cargo run --release -p onecopy-bench -- scale --rounds {rounds} --seconds {seconds}");
    let mut report = Report::new(Head::new("scale", command, Guests::versions()?));
    let (at_work, at_rest): (&[u64], &[u64]) = if options.quick { (&[1, 2], &[]) } else { (&[1, 4], &[8]) };
    for round in 1..=rounds {
        for load in measure::LOADS {
            for method in Method::ALL {
                let run = format!("round {round}, {}, {}", method.name(), load.name());
                // To be at rest is the same for both.
                let at_rest = if load == measure::LOADS[0] { at_rest } else { &[] };
                let grown = measure::grow(&options.place, method, load, (at_work, at_rest), seconds).await;
                if let Some(grown) = report.head.keep(&run, grown) {
                    let steps: Vec<String> =
                        grown.steps.iter().map(|step| format!("{} in {:.1} s", step.followers, step.seconds)).collect();
                    eprintln!("{run}: {}", steps.join(", "));
                    report.runs.push(report::Run { round, grown });
                }
            }
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
