//! The clone experiment as tables, as JSON and as a page with a plot.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use super::cold::VARIANTS;
use super::full::{BusyCreation, FullLoad};
use super::method::BenchMethod;
use super::{Answer, Creation, WarmUp};
use crate::head::Head;
use crate::plot::{Panel, draw};
use crate::statistics::Spread;

/// What the paper on virtual machines that share their memory's and disk's origin reports, and what is measured like it
/// here. Its data: 17 GB of MySQL in virtual machines; a replica is made by a complete copy, or cloned.
const PAPER: [(&str, &str); 3] = [
    ("creation", "18x: 18 min to 60 s"),
    ("until it is as fast as its source", "7.5x: 30 min to 4 min"),
    ("creation while the source is written to", "12x: 28 min to 136 s"),
];

/// Everything that one experiment gave.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Its head.
    #[serde(flatten)]
    pub head: Head,
    /// The source's size without its log.
    pub data_bytes: u64,
    /// Update transactions a second that the source was asked for.
    pub rate: u32,
    /// Reads a second of the slow disk.
    pub slow_reads_per_second: u32,
    /// Clones under load.
    pub creations: Vec<Creation>,
    /// Lazy clones of a busy source.
    pub busy_creations: Vec<BusyCreation>,
    /// Clones from a cold disk.
    pub warm_ups: Vec<WarmUp>,
    /// Clones of a small and a large source.
    pub answers: Vec<Answer>,
}

impl Report {
    /// Prints it: tables, or one JSON object.
    pub fn print(&self, as_json: bool) -> anyhow::Result<()> {
        if as_json {
            println!("{}", serde_json::to_string(self)?);
        } else {
            print!("{}", self.tables());
        }
        Ok(())
    }

    /// Whether at least one clone was made.
    pub fn has_clones(&self) -> bool {
        let others = self.busy_creations.len() + self.warm_ups.len() + self.answers.len();
        self.creations.len() + others > 0
    }

    /// Writes the page.
    pub fn write(&self, directory: &Path) -> anyhow::Result<()> {
        let notes = [
            format!(
                "source: {:.0} MB of data, on an XFS in a file of its own; {} update transactions a second while it is \
                 cloned",
                self.data_bytes as f64 / 1e6,
                self.rate
            ),
            format!(
                "slow disk: {} reads a second; of the source only what its clients read is in memory, of a copy that \
                 was written nothing (the data is taken for larger than the memory); 4 clients read, 95 of 100 reads \
                 go to a tenth of the rows",
                self.slow_reads_per_second
            ),
            "medians, with the smallest and the largest; ratios are formed within one round".to_owned(),
        ];
        let title = ("Clones: measured", &notes[..], &*self.tables());
        self.head.write(directory, title, |path| draw(path, &self.panels()))
    }

    fn tables(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_tables(&mut text);
        text
    }

    fn write_tables(&self, text: &mut String) -> std::fmt::Result {
        writeln!(text, "## Under load\n")?;
        writeln!(
            text,
            "| method | first answer, s | caught up, s | whole, s | source waits, ms | source, tps: before | during | \
             p99, ms: before | during |\n|---|---|---|---|---|---|---|---|---|"
        )?;
        for method in BenchMethod::ALL {
            let cell = |value: &dyn Fn(&Creation) -> Option<f64>| cell(self.creation(method, value));
            writeln!(
                text,
                "| {method} | {} | {} | {} | {} | {} | {} | {} | {} |",
                cell(&|one| Some(one.first_answer_seconds)),
                cell(&|one| Some(one.caught_up_seconds)),
                cell(&|one| Some(one.whole_seconds)),
                cell(&|one| one.pause_ms),
                cell(&|one| Some(one.before.per_second)),
                cell(&|one| Some(one.during.per_second)),
                cell(&|one| Some(one.before.p99_ms)),
                cell(&|one| Some(one.during.p99_ms)),
            )?;
        }
        self.write_busy(text)?;
        writeln!(text, "\n## On a slow disk\n")?;
        writeln!(
            text,
            "| method | first answer, s | from there to 90 % of the source's rate, s | not before the deadline |\n\
             |---|---|---|---|"
        )?;
        for variant in VARIANTS {
            let first = self.warm_up(variant, |one| Some(one.first_answer_seconds));
            let as_fast = self.warm_up(variant, |one| one.warm_up_seconds());
            let never = self.of_variant(variant).filter(|one| one.as_fast_seconds.is_none()).count();
            writeln!(text, "| {} | {} | {} | {never} |", name(variant), cell(first), cell(as_fast))?;
        }
        self.write_sizes(text)?;
        writeln!(text, "\n## Next to the paper\n\n| what | paper | lazy to copy here |\n|---|---|---|")?;
        for ((what, paper), ratio) in PAPER.iter().zip(self.ratios()) {
            writeln!(
                text,
                "| {what} | {paper} | {} |",
                ratio.map_or("-".to_owned(), |ratio| format!("{}x", cell(Some(ratio))))
            )?;
        }
        writeln!(
            text,
            "\nAll clones here are made while the source is written to: \
             the first and the last line are the same figure."
        )?;
        Ok(())
    }

    fn write_busy(&self, text: &mut String) -> std::fmt::Result {
        writeln!(
            text,
            "\n## At full load\n\nNine reads to one update, without a pause; lazy clones, filled by the defaults (hot \
             pages first, 64 MB/s). *Meanwhile*: until the clone is whole; *afterwards*: with the whole clone \
             following; *longest*: of one transaction. A client waits for its transaction before it begins the next, \
             so that a pause shows there and in the rate, and hardly in the p99. Bar: first answer within 1.5 s, 0.9 \
             of the rate, twice the p99.\n\n\
             | clients | first answer, s | whole, s | source waits, ms | tps before | meanwhile | rate kept | \
             afterwards | p99 before, ms | meanwhile | times | longest before, ms | meanwhile |\n\
             |---|---|---|---|---|---|---|---|---|---|---|---|---|"
        )?;
        for load in FullLoad::ALL {
            let cell = |value: &dyn Fn(&BusyCreation) -> Option<f64>| {
                let values = self.busy_creations.iter().filter(|one| one.load == load).filter_map(value);
                cell(Spread::of(&values.collect::<Vec<f64>>()))
            };
            writeln!(
                text,
                "| {load} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                cell(&|one| Some(one.creation.first_answer_seconds)),
                cell(&|one| Some(one.creation.whole_seconds)),
                cell(&|one| one.creation.pause_ms),
                cell(&|one| Some(one.creation.before.per_second)),
                cell(&|one| Some(one.creation.during.per_second)),
                cell(&|one| Some(one.rate_kept())),
                cell(&|one| Some(one.rate_after())),
                cell(&|one| Some(one.creation.before.p99_ms)),
                cell(&|one| Some(one.creation.during.p99_ms)),
                cell(&|one| Some(one.p99_grown())),
                cell(&|one| Some(one.creation.before.max_ms)),
                cell(&|one| Some(one.creation.during.max_ms)),
            )?;
        }
        Ok(())
    }

    fn write_sizes(&self, text: &mut String) -> std::fmt::Result {
        if self.answers.is_empty() {
            return Ok(());
        }
        let mut sizes: Vec<String> = self.answers.iter().map(Answer::gigabytes).collect();
        sizes.sort();
        sizes.dedup();
        writeln!(text, "\n## By size, at rest\n\n| source, GB | first answer, s | source waits, ms |\n|---|---|---|")?;
        for size in sizes {
            let of_size = |value: &dyn Fn(&Answer) -> f64| {
                let values = self.answers.iter().filter(|one| one.gigabytes() == size).map(value);
                cell(Spread::of(&values.collect::<Vec<f64>>()))
            };
            writeln!(
                text,
                "| {size} | {} | {} |",
                of_size(&|one| one.first_answer_seconds),
                of_size(&|one| one.pause_ms)
            )?;
        }
        Ok(())
    }

    /// How many times sooner lazy is than copy, in the order of [`PAPER`].
    fn ratios(&self) -> [Option<Spread>; 3] {
        let creation =
            |method, round| self.creations.iter().find(move |one| (one.method, one.round) == (method, round));
        let made: Vec<f64> = self
            .creations
            .iter()
            .filter(|one| one.method == BenchMethod::Lazy)
            .filter_map(|lazy| {
                Some(creation(BenchMethod::Copy, lazy.round)?.first_answer_seconds / lazy.first_answer_seconds)
            })
            .collect();
        let warmed: Vec<f64> = self
            .of_variant((BenchMethod::Lazy, true))
            .filter_map(|lazy| {
                let copy = self.of_variant((BenchMethod::Copy, false)).find(|copy| copy.round == lazy.round)?;
                Some(copy.warm_up_seconds()? / lazy.warm_up_seconds()?)
            })
            .collect();
        [Spread::of(&made), Spread::of(&warmed), Spread::of(&made)]
    }

    fn creation(&self, method: BenchMethod, value: &dyn Fn(&Creation) -> Option<f64>) -> Option<Spread> {
        let values: Vec<f64> = self.creations.iter().filter(|one| one.method == method).filter_map(value).collect();
        Spread::of(&values)
    }

    fn of_variant(&self, (method, is_warmed): (BenchMethod, bool)) -> impl Iterator<Item = &WarmUp> {
        self.warm_ups.iter().filter(move |one| (one.method, one.is_warmed) == (method, is_warmed))
    }

    fn warm_up(&self, variant: (BenchMethod, bool), value: impl Fn(&WarmUp) -> Option<f64>) -> Option<Spread> {
        Spread::of(&self.of_variant(variant).filter_map(value).collect::<Vec<f64>>())
    }

    fn panels(&self) -> [Panel; 3] {
        let methods =
            || (0..).zip(BenchMethod::ALL).map(|(colour, method)| (method.name().to_owned(), colour)).collect();
        let bars = |value: &dyn Fn(&Creation) -> Option<f64>| {
            BenchMethod::ALL.map(|method| self.creation(method, value)).to_vec()
        };
        let creation = Panel {
            title: "Under load: seconds until the clone".to_owned(),
            series: methods(),
            groups: vec![
                ("answers".to_owned(), bars(&|one| Some(one.first_answer_seconds))),
                ("has caught up".to_owned(), bars(&|one| Some(one.caught_up_seconds))),
                ("is whole".to_owned(), bars(&|one| Some(one.whole_seconds))),
            ],
        };
        let source = Panel {
            title: "The source meanwhile: 99 of 100 updates within, in ms".to_owned(),
            series: methods(),
            groups: vec![
                ("before".to_owned(), bars(&|one| Some(one.before.p99_ms))),
                ("while it is cloned".to_owned(), bars(&|one| Some(one.during.p99_ms))),
            ],
        };
        let cold = Panel {
            title: "On a slow disk: seconds from the first answer to 90 % of the source's rate".to_owned(),
            series: (0..).zip(VARIANTS).map(|(colour, variant)| (name(variant), colour)).collect(),
            groups: vec![(
                "reads".to_owned(),
                VARIANTS.map(|variant| self.warm_up(variant, |one| one.warm_up_seconds())).to_vec(),
            )],
        };
        [creation, source, cold]
    }
}

fn name((method, is_warmed): (BenchMethod, bool)) -> String {
    if is_warmed { format!("{method}, hot pages first") } else { method.name().to_owned() }
}

fn cell(spread: Option<Spread>) -> String {
    let digits = |value: f64| if value < 10.0 { format!("{value:.2}") } else { format!("{value:.0}") };
    spread.map_or("-".to_owned(), |spread| {
        format!("{} ({} to {})", digits(spread.median), digits(spread.min), digits(spread.max))
    })
}
