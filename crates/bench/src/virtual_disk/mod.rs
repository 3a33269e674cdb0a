//! What a machine's disk costs: our NBD server and vhost-user-blk back end against QEMU's own, without a guest and in
//! one.
//!
//! A driver in this process speaks to each back end as a guest's driver would: requests at a fixed depth on a file of
//! content that the host has in its cache, so that what is measured is the way to it and not a device. The ways of one
//! round follow each other; ratios are formed within one round, and what counts most is the processor time of the back
//! end's own process for a request. Then one guest uses a disk behind each back end, one after the other.

mod back_end;
mod guest;
mod guest_report;
mod load;
mod nbd_client;
mod report;
mod vhost_client;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::head::Head;
use back_end::{BackEnd, Way};
use guest::{Guest, GuestLoad, Needs};
use load::Load;
use report::Report;

pub use back_end::ServeOptions;
pub use back_end::serve;

/// A part of the experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The back ends alone, with a driver without a guest.
    Driver,
    /// The disks of a guest.
    Guest,
}

/// Options of `onecopy-bench disk`.
#[derive(Debug, Clone, clap::Args)]
pub struct DiskOptions {
    /// A short form of two minutes; writes files only with --output
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// One part only [default: both]
    #[arg(long)]
    only: Option<Part>,
    /// Rounds [default: 5, quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Seconds of each load [default: 5, quick: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: Option<u32>,
    /// Where the disks are made: their file system must have 4 GB of room
    #[arg(long, default_value = "/tmp")]
    place: PathBuf,
    /// Directory for disk.md and disk.png [default: docs/results, quick: none]
    #[arg(long)]
    output: Option<PathBuf>,
}

impl DiskOptions {
    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 5 })
    }

    fn seconds(&self) -> u32 {
        self.seconds.unwrap_or(if self.quick { 1 } else { 5 })
    }

    fn output(&self) -> Option<&Path> {
        self.output.as_deref().or((!self.quick).then_some(Path::new("docs/results")))
    }

    fn length(&self) -> Duration {
        Duration::from_secs(self.seconds().into())
    }

    fn has(&self, part: Part) -> bool {
        self.only.is_none_or(|only| only == part)
    }

    /// The command that makes the same figures.
    fn command(&self) -> String {
        let only = match self.only {
            None => "",
            Some(Part::Driver) => " --only driver",
            Some(Part::Guest) => " --only guest",
        };
        let (rounds, seconds) = (self.rounds(), self.seconds());
        format!("cargo run --release -p onecopy-bench -- disk --rounds {rounds} --seconds {seconds}{only}")
    }
}

/// Runs the experiment.
///
/// # Errors
/// Nothing could be measured, or what a guest needs is missing. A way that fails is part of the report.
pub async fn run(options: &DiskOptions) -> anyhow::Result<()> {
    // Asked for first: it would be a pity to learn it after the first part.
    let needs = options.has(Part::Guest).then(Needs::find).transpose()?;
    let mut report = Report::new(Head::new("disk", options.command(), Vec::new()), options.seconds());
    let home = tempfile::tempdir_in(&options.place)?;
    if options.has(Part::Driver) {
        drive(options, home.path(), &mut report);
    }
    if let Some(needs) = needs {
        let done = in_guest(options, &needs, home.path(), &mut report).await;
        report.head.keep("the guest", done);
    }
    report.head.end();
    report.print(options.json)?;
    if let Some(directory) = options.output() {
        report.write(directory)?;
    }
    anyhow::ensure!(!report.is_empty(), "nothing was measured: {:?}", report.head.failures);
    Ok(())
}

fn drive(options: &DiskOptions, home: &Path, report: &mut Report) {
    for round in 1..=options.rounds() {
        for way in Way::ALL {
            let begun = BackEnd::start(way, home);
            let Some(mut back_end) = report.head.keep(&format!("round {round} {}", way.name()), begun) else {
                continue;
            };
            for load in Load::ALL {
                let measured = back_end.measure(load, options.length());
                if let Some(measured) =
                    report.head.keep(&format!("round {round} {} {}", way.name(), load.name()), measured)
                {
                    let (rate, cost) = (measured.per_second as u64, measured.processor_us);
                    say(format_args!("round {round} {}, {}: {rate}/s, {cost:.2} us", way.name(), load.name()));
                    report.add(round, way, load, measured);
                }
            }
        }
    }
}

async fn in_guest(options: &DiskOptions, needs: &Needs, home: &Path, report: &mut Report) -> anyhow::Result<()> {
    let guest = Guest::boot(needs, home, |way, error| {
        let _: Option<()> = report.head.keep(&format!("guest, {}", way.name()), Err(error));
    })
    .await?;
    for round in 1..=options.rounds() {
        // The ways of one load follow each other at once: what the host does meanwhile meets all of them alike.
        for load in GuestLoad::ALL {
            for way in guest.ways() {
                let run = format!("guest, round {round} {}, {}", way.name(), load.name());
                let measured = guest.measure(way, load, options.length()).await;
                if let Some(measured) = report.head.keep(&run, measured) {
                    say(format_args!("{run}: {}/s", measured.per_second as u64));
                    report.add_guest(round, way, load, measured);
                }
            }
        }
    }
    guest.end().await;
    Ok(())
}

/// Says how far the experiment is: on standard error, which the figures are not on.
fn say(line: impl std::fmt::Display) {
    eprintln!("{line}");
}
