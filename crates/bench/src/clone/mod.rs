//! How soon a clone answers, is up to date, is whole and is as fast as its source, by each method; and what that costs
//! the source.
//!
//! The experiments are on one XFS in a file, so that every method has the same disk. Under load: a primary at a fixed
//! rate of updates is cloned. At full load: one that its clients keep busy is cloned lazily. Cold: the page cache is
//! empty and the disk is slow, and clients read from the clone what they read from the source. One round makes a clone
//! by every method, neighbours in time next to each other; a ratio is always formed within one round.

mod cold;
mod full;
mod method;
mod report;
mod site;
mod sizes;
mod updates;

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::ValueEnum;
use serde::Serialize;

use crate::head::Head;
use method::{BenchMethod, UNBOUNDED};
use report::Report;
use site::Site;

/// Options of `onecopy-bench clone`.
#[derive(Debug, Clone, clap::Args)]
pub struct CloneOptions {
    /// A short form of a few minutes; writes files only with --output
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Rounds [default: 5, quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// pgbench's scale: about 15 MB each [default: 100, quick: 10]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=2000))]
    scale: Option<u32>,
    /// Update transactions a second on the source while it is cloned
    #[arg(long, default_value_t = 150, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rate: u32,
    /// Reads a second that the slow disk does
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    slow_reads_per_second: u32,
    /// Gigabytes of the source that is compared with a small one, in whole segments of a relation [quick: none]
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=1000))]
    large_gb: u32,
    /// One part of it; writes files only with --output
    #[arg(long)]
    only: Option<Part>,
    /// Directory for clone.md and clone.png [default: docs/results, quick: none]
    #[arg(long)]
    output: Option<PathBuf>,
    /// The program that makes and fills clones [default: the one beside this program]
    #[arg(long, value_name = "PATH")]
    onecopy: Option<PathBuf>,
}

/// A part of the experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// A fixed rate of updates
    UnderLoad,
    /// Clients without a pause
    FullLoad,
    /// Until a clone on a slow disk is as fast as its source
    SlowDisk,
    /// A small and a large source at rest
    Sizes,
}

impl CloneOptions {
    fn runs(&self, part: Part) -> bool {
        self.only.is_none_or(|only| only == part)
    }

    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 5 })
    }

    fn scale(&self) -> u32 {
        self.scale.unwrap_or(if self.quick { 10 } else { 100 })
    }

    fn output(&self) -> Option<&Path> {
        self.output.as_deref().or((!self.quick && self.only.is_none()).then_some(Path::new("docs/results")))
    }

    /// The command that makes the same figures.
    fn command(&self) -> String {
        let only = self.only.and_then(|part| part.to_possible_value());
        let only = only.map_or(String::new(), |part| format!(" --only {}", part.get_name()));
        format!(
            "cargo run --release -p onecopy-bench -- clone --rounds {} --scale {} --rate {} --slow-reads-per-second {} \
             --large-gb {}{only}",
            self.rounds(),
            self.scale(),
            self.rate,
            self.slow_reads_per_second,
            self.large_gb
        )
    }
}

/// One clone of a primary under load.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Creation {
    /// By which method.
    pub method: BenchMethod,
    /// In which round, from 1.
    pub round: u32,
    /// Until the first query was answered.
    pub first_answer_seconds: f64,
    /// Until it had replayed all that the source had committed by then.
    pub caught_up_seconds: f64,
    /// Until nothing was missing.
    pub whole_seconds: f64,
    /// How long the source's accesses to its files had to wait; none where they do not.
    pub pause_ms: Option<f64>,
    /// The source just before.
    pub before: updates::Service,
    /// The source until the clone was whole.
    pub during: updates::Service,
    /// The source then, with a standby more that follows it.
    pub after: updates::Service,
}

/// One clone on a slow disk, and clients that read from it.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct WarmUp {
    /// By which method.
    pub method: BenchMethod,
    /// Whether hot pages came first and were read into shared buffers.
    pub is_warmed: bool,
    /// In which round, from 1.
    pub round: u32,
    /// What the source does with warm memory, in queries a second.
    pub source_per_second: f64,
    /// Until the clone did 90 % of that; none: not before the deadline.
    pub as_fast_seconds: Option<f64>,
    /// Until its first answer.
    pub first_answer_seconds: f64,
}

impl WarmUp {
    /// From the first answer on; none: not before the deadline.
    fn warm_up_seconds(&self) -> Option<f64> {
        self.as_fast_seconds.map(|seconds| seconds - self.first_answer_seconds)
    }
}

/// One clone of a small or a large source at rest.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Answer {
    /// What the source holds.
    pub data_bytes: u64,
    /// In which round, from 1.
    pub round: u32,
    /// Until the first query was answered.
    pub first_answer_seconds: f64,
    /// How long the source's accesses to its files had to wait.
    pub pause_ms: f64,
}

impl Answer {
    fn gigabytes(&self) -> String {
        format!("{:.1}", self.data_bytes as f64 / 1e9)
    }
}

/// Runs the experiment.
///
/// # Errors
/// What cannot be set up: root, XFS and the program are needed. A clone that fails is part of the report.
pub async fn run(options: CloneOptions) -> anyhow::Result<()> {
    let program = program(&options)?;
    let site = Site::make(options.scale(), program).await?;
    let versions = vec![format!("PostgreSQL {}", site.version())];
    let mut report = Report {
        head: Head::new("clone", options.command(), versions),
        data_bytes: site.data_bytes()?,
        rate: options.rate,
        slow_reads_per_second: options.slow_reads_per_second,
        creations: Vec::new(),
        busy_creations: Vec::new(),
        warm_ups: Vec::new(),
        answers: Vec::new(),
    };
    for round in 1..=options.rounds() {
        for method in BenchMethod::ALL.into_iter().filter(|_| options.runs(Part::UnderLoad)) {
            let load = updates::Load::updates(&site, options.rate);
            let measured = updates::measure(&site, (method, UNBOUNDED), round, load).await;
            if let Some(creation) = report.head.keep(&format!("round {round} {method}"), measured) {
                say(format_args!(
                    "round {round} {method}: answers after {:.2} s, whole after {:.2} s",
                    creation.first_answer_seconds, creation.whole_seconds
                ));
                report.creations.push(creation);
            }
        }
        for load in full::FullLoad::ALL.into_iter().filter(|_| options.runs(Part::FullLoad)) {
            let measured = full::measure(&site, load, round).await;
            if let Some(busy) = report.head.keep(&format!("round {round} {load}"), measured) {
                say(format_args!(
                    "round {round} {load}: answers after {:.2} s, {:.2} of the rate, {:.1} times the p99",
                    busy.creation.first_answer_seconds,
                    busy.rate_kept(),
                    busy.p99_grown()
                ));
                report.busy_creations.push(busy);
            }
        }
        for (method, is_warmed) in cold::VARIANTS.into_iter().filter(|_| options.runs(Part::SlowDisk)) {
            let measured = cold::measure(&site, method, is_warmed, round, options.slow_reads_per_second).await;
            if let Some(warm_up) = report.head.keep(&format!("round {round} {method} cold"), measured) {
                say(format_args!("round {round} {method} cold: as fast after {:?} s", warm_up.as_fast_seconds));
                report.warm_ups.push(warm_up);
            }
        }
    }
    if options.large_gb > 0 && !options.quick && options.runs(Part::Sizes) {
        let large = Site::make(options.scale(), site.program.clone()).await?;
        large.grow(options.large_gb).await?;
        for round in 1..=options.rounds() {
            let measured = sizes::measure(&[&site, &large], round).await;
            report.answers.extend(report.head.keep(&format!("round {round} by size"), measured).unwrap_or_default());
        }
        large.stop().await?;
    }
    report.head.end();
    site.stop().await?;
    report.print(options.json)?;
    if let Some(directory) = options.output() {
        report.write(directory)?;
    }
    if report.has_clones() { Ok(()) } else { bail!("not one clone was made: {:?}", report.head.failures) }
}

fn program(options: &CloneOptions) -> anyhow::Result<PathBuf> {
    let program = match &options.onecopy {
        Some(program) => std::path::absolute(program)?,
        None => std::env::current_exe()?.with_file_name("onecopy"),
    };
    if !program.exists() {
        bail!("{} does not exist: run `cargo build --release -p onecopy`, or give --onecopy PATH", program.display());
    }
    Ok(program)
}

/// Progress goes to standard error: standard output is the report's.
fn say(message: std::fmt::Arguments<'_>) {
    eprintln!("onecopy-bench: {message}");
}
