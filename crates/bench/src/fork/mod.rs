//! How soon a fork of a machine answers, how fast it is then, and how much memory is its own; against a machine that
//! boots and makes a base backup.
//!
//! The methods of one round follow each other. The parent has read all of its data and is at rest while a fork is
//! measured; so a fork's rate is compared with that of its parent alone, a moment before.

mod measure;
mod report;

use std::path::{Path, PathBuf};

use crate::guests::Guests;
use crate::head::Head;
use measure::Site;
use report::Report;

/// Memory of a machine.
pub const MEMORY_MIB: u64 = 1024;

/// Options of `onecopy-bench fork`.
#[derive(Debug, Clone, clap::Args)]
pub struct ForkOptions {
    /// A short form of two minutes; writes files only with --output
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Rounds [default: 3, quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Seconds for which a fork reads before its memory is looked at again [default: 60, quick: 10]
    #[arg(long, value_parser = clap::value_parser!(u32).range(5..=3600))]
    seconds: Option<u32>,
    /// Where the machines are made: its file system must have 12 GB of room
    #[arg(long, default_value = "/tmp")]
    place: PathBuf,
    /// Directory for fork.md and fork.png [default: docs/results, quick: none]
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Runs the experiment.
///
/// # Errors
/// Nothing could be measured.
pub async fn run(options: &ForkOptions) -> anyhow::Result<()> {
    let rounds = options.rounds.unwrap_or(if options.quick { 1 } else { 3 });
    let seconds = options.seconds.unwrap_or(if options.quick { 10 } else { 60 });
    let command = format!("cargo run --release -p onecopy-bench -- fork --rounds {rounds} --seconds {seconds}");
    let mut report = Report::new(Head::new("fork", command, Guests::versions()?), seconds);
    let site = Site::begin(&options.place).await?;
    for round in 1..=rounds {
        let forked = site.fork(round, seconds).await;
        if let Some(forked) = report.head.keep(&format!("round {round}, fork"), forked) {
            eprintln!("round {round}, fork: agent {:.2} s, hot answer {:.2} s", forked.agent_s, forked.hot_s);
            report.forks.push(forked);
        }
        let booted = site.boot_and_back_up(round).await;
        if let Some(booted) = report.head.keep(&format!("round {round}, boot and base backup"), booted) {
            eprintln!("round {round}, boot and base backup: {:.2} s", booted.server_s);
            report.boots.push(booted);
        }
    }
    report.head.end();
    report.print(options.json)?;
    if let Some(directory) = options.output.as_deref().or((!options.quick).then_some(Path::new("docs/results"))) {
        report.write(directory)?;
    }
    anyhow::ensure!(!report.forks.is_empty(), "nothing was measured: {:?}", report.head.failures);
    Ok(())
}
