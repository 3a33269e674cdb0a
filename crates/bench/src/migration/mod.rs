//! A machine that goes to another host: how long that takes, what it sends and how long the machine stands; against
//! QEMU's own migration of the same machine.
//!
//! Two hosts on one machine, each with a directory of its own. The methods of one load follow each other in each round.
//! QEMU's own migration goes to a peer that takes all and computes nothing, and the machine goes on where it was: that
//! is the least that QEMU can need, with storage that both hosts have. Ours goes all the way: a QEMU waits at the other
//! side, and what is sent is checked there, on the same two processors.

mod measure;
mod qemu;
mod report;

use std::path::{Path, PathBuf};

use crate::guests::Guests;
use crate::head::Head;
use measure::{Load, Method, Site};
use report::Report;

/// Options of `onecopy-bench migration`.
#[derive(Debug, Clone, clap::Args)]
pub struct MigrationOptions {
    /// A short form of some minutes; writes files only with --output
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Rounds [default: 3, quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// The machine's memory, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(512..=65536))]
    memory: u64,
    /// What a link carries, in megabits a second
    #[arg(long, value_name = "MBIT", default_value_t = 100,
          value_parser = clap::value_parser!(u64).range(10..=100_000))]
    link: u64,
    /// What the machine does meanwhile [default: all, quick: read]
    #[arg(long, value_enum, value_delimiter = ',')]
    loads: Vec<Load>,
    /// How it goes [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    methods: Vec<Method>,
    /// Where the machines are made: its file system must have 24 GB of room
    #[arg(long, default_value = "/tmp")]
    place: PathBuf,
    /// Directory for migration.md and migration.png [default: docs/results, quick: none]
    #[arg(long)]
    output: Option<PathBuf>,
}

impl MigrationOptions {
    fn loads(&self) -> Vec<Load> {
        match (self.loads.is_empty(), self.quick) {
            (false, _) => self.loads.clone(),
            (true, true) => vec![Load::Read],
            (true, false) => Load::ALL.to_vec(),
        }
    }

    fn methods(&self) -> Vec<Method> {
        if self.methods.is_empty() { Method::ALL.to_vec() } else { self.methods.clone() }
    }

    /// The command that makes the same again.
    fn command(&self, rounds: u32) -> String {
        let mut command = format!("cargo run --release -p onecopy-bench -- migration --rounds {rounds}");
        command += &format!(" --memory {} --link {}", self.memory, self.link);
        let list = |names: Vec<&str>| names.join(",");
        if self.loads() != Load::ALL {
            command += &format!(" --loads {}", list(self.loads().into_iter().map(Load::option).collect()));
        }
        if self.methods() != Method::ALL {
            command += &format!(" --methods {}", list(self.methods().into_iter().map(Method::option).collect()));
        }
        command
    }
}

/// Runs the experiment.
///
/// # Errors
/// Nothing could be measured.
pub async fn run(options: &MigrationOptions) -> anyhow::Result<()> {
    let rounds = options.rounds.unwrap_or(if options.quick { 1 } else { 3 });
    let head = Head::new("migration", options.command(rounds), Guests::versions()?);
    let mut report = Report::new(head, options.memory, options.link);
    let mut site = Site::begin(&options.place, options.memory, options.link).await?;
    'rounds: for round in 1..=rounds {
        for load in options.loads() {
            for method in options.methods() {
                let run = format!("round {round}, {}, {}", load.name(), method.name());
                let sent = site.migrate(round, load, method).await;
                let is_lost = sent.is_err() && !site.is_well().await;
                if let Some(sent) = report.head.keep(&run, sent) {
                    eprintln!("{run}: {:.1} s, {:.1} MB, stood {:.0} ms", sent.total_s, sent.mb, sent.pause_ms);
                    report.sent.push(sent);
                }
                if is_lost {
                    report.head.failures.push("the machine is lost: nothing more was measured".to_owned());
                    break 'rounds;
                }
            }
        }
    }
    report.head.end();
    report.print(options.json)?;
    if let Some(directory) = options.output.as_deref().or((!options.quick).then_some(Path::new("docs/results"))) {
        report.write(directory)?;
    }
    anyhow::ensure!(!report.sent.is_empty(), "nothing was measured: {:?}", report.head.failures);
    Ok(())
}
