//! How a server's memory is given back, and what is left of its speed: the experiments of the paper on the memory of
//! database servers in virtual machines, scaled to this machine.
//!
//! 1. A host takes half of the memory away while clients need half as much, and gives it back.
//! 2. Analytical queries after the pool has shrunk, against servers that were started with so much.
//! 3. How long it takes to give half of the pool back, and what that time is made of; MariaDB's own method next to it.
//!
//! The methods of one round follow each other; a ratio is always formed within one round.

mod analysis;
mod group;
mod mariadb;
mod report;
mod shrink;
mod site;
mod squeeze;
mod tables;

use std::path::{Path, PathBuf};

use anyhow::bail;

use crate::load::Work;
use report::Report;
use site::Site;
use squeeze::Method;

const MIB: u64 = 1 << 20;

/// Options of `onecopy-bench memory`.
#[derive(Debug, Clone, clap::Args)]
pub struct MemoryOptions {
    /// A short form of a few minutes; writes files only with --output
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Rounds of the first and the second experiment [default: 3, quick: 1]; the third has two more
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Seconds of each of the three parts of the first experiment [default: 90, quick: 8]
    #[arg(long, value_parser = clap::value_parser!(u32).range(4..=3600))]
    seconds: Option<u32>,
    /// The methods of the first experiment: each takes three parts and about a minute more a round, and `born` is what
    /// the others are compared with
    #[arg(long, alias = "ways", value_enum, value_delimiter = ',')]
    #[arg(default_values_t = [Method::None, Method::Request, Method::Born])]
    methods: Vec<Method>,
    /// Reads, and as many writes, a second that the disk does in the first experiment
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u32).range(100..=1_000_000))]
    disk_per_second: u32,
    /// Only the first (squeeze), second (analysis) or third (giving) experiment
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=3))]
    only: Option<u8>,
    /// Directory for memory.md and memory.png [default: docs/results, quick: none]
    #[arg(long)]
    output: Option<PathBuf>,
}

impl MemoryOptions {
    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 3 })
    }

    fn seconds(&self) -> u32 {
        self.seconds.unwrap_or(if self.quick { 8 } else { 90 })
    }

    /// In one order, each once.
    fn methods(&self) -> impl Iterator<Item = Method> {
        Method::ALL.into_iter().filter(|method| self.methods.contains(method))
    }

    fn output(&self) -> Option<&Path> {
        self.output.as_deref().or((!self.quick).then_some(Path::new("docs/results")))
    }

    fn includes(&self, experiment: u8) -> bool {
        self.only.is_none_or(|only| only == experiment)
    }

    /// The command that makes the same figures.
    fn command(&self) -> String {
        let only = self.only.map_or(String::new(), |only| format!(" --only {only}"));
        let methods: Vec<String> = self.methods().map(Method::option).collect();
        format!(
            "cargo run --release -p onecopy-bench -- memory --rounds {} --seconds {} --methods {} --disk-per-second \
             {}{only}",
            self.rounds(),
            self.seconds(),
            methods.join(","),
            self.disk_per_second
        )
    }
}

/// Runs the experiments.
///
/// # Errors
/// What cannot be set up: root, XFS, control groups of version 1 and the extension are needed. A run that fails is part
/// of the report.
pub async fn run(options: MemoryOptions) -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("this experiment mounts a disk, limits memory and swaps: run it as root");
    }
    let mut report = Report::new(&options);
    if options.includes(1) {
        squeeze(&options, &mut report).await?;
    }
    if options.includes(2) {
        analyse(&options, &mut report).await?;
    }
    if options.includes(3) {
        give(&options, &mut report).await?;
    }
    report.head.end();
    report.print(options.json)?;
    if let Some(directory) = options.output() {
        report.write(directory)?;
    }
    if report.is_empty() { bail!("nothing was measured: {:?}", report.head.failures) } else { Ok(()) }
}

async fn squeeze(options: &MemoryOptions, report: &mut Report) -> anyhow::Result<()> {
    let site = filled(squeeze::SCALE, report).await?;
    for round in 1..=options.rounds() {
        for method in options.methods() {
            let run = squeeze::measure(&site, method, round, options.seconds(), options.disk_per_second).await;
            if let Some(run) = report.head.keep(&format!("round {round} {}", method.name()), run) {
                let rates: Vec<u64> = run.parts.iter().map(|part| part.per_second as u64).collect();
                say(format_args!("round {round} {}: {rates:?} tps", method.name()));
                report.squeezes.push(run);
            }
        }
    }
    Ok(())
}

async fn analyse(options: &MemoryOptions, report: &mut Report) -> anyhow::Result<()> {
    let site = Site::make().await?;
    tables::fill(&site).await?;
    for round in 1..=options.rounds() {
        for size in analysis::SIZES_BYTES {
            let both = analysis::measure(&site, size, round).await;
            if let Some(both) = report.head.keep(&format!("round {round} queries at {} MB", size / MIB), both) {
                say(format_args!("round {round} queries at {} MB: done", size / MIB));
                report.analyses.extend(both);
            }
        }
    }
    Ok(())
}

async fn give(options: &MemoryOptions, report: &mut Report) -> anyhow::Result<()> {
    let site = filled(shrink::SCALE, report).await?;
    for round in 1..=options.rounds() + if options.quick { 0 } else { 2 } {
        let huge = (Work::Idle, true);
        for (work, huge_pages) in shrink::WORKS.map(|work| (work, false)).into_iter().chain([huge]) {
            let shrink = shrink::measure(&site, work, huge_pages, round).await;
            if let Some(shrink) = report.head.keep(&format!("round {round} {}", work.name()), shrink) {
                say(format_args!("round {round} {}: half of the pool in {:.2} s", shrink.work, shrink.seconds));
                report.shrinks.push(shrink);
            }
        }
        let taking = shrink::take(&site, round).await;
        let taking = report.head.keep(&format!("round {round} taking"), taking);
        report.takings.extend(taking);
        let shrink = mariadb::measure(round).await;
        if let Some(shrink) = report.head.keep(&format!("round {round} MariaDB"), shrink) {
            say(format_args!("round {round} MariaDB: half of the pool in {:.2} s", shrink.seconds));
            report.mariadb.push(shrink);
        }
    }
    Ok(())
}

async fn filled(scale: u32, report: &mut Report) -> anyhow::Result<Site> {
    say(format_args!("filling pgbench's tables, scale {scale}"));
    let site = Site::make().await?;
    report.head.versions = vec![format!("PostgreSQL {}", site.server.options().binaries.version())];
    site.start(site::Start::plain(512 * MIB)).await?;
    site.fill(scale).await?;
    Ok(site)
}

/// Progress goes to standard error: standard output is the report's.
fn say(message: std::fmt::Arguments<'_>) {
    eprintln!("onecopy-bench: {message}");
}
