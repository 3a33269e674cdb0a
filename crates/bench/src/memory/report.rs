//! The memory experiments as tables, as JSON and as a page with a plot.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use super::MIB;
use super::MemoryOptions;
use super::analysis::{Analysis, SIZES_BYTES};
use super::mariadb::Shrink;
use super::shrink::{POOL_BYTES, PoolShrink, Taking};
use super::squeeze::{Method, Squeeze};
use super::tables::QUERIES;
use crate::head::Head;
use crate::plot::{Lines, draw_lines};
use crate::statistics::Spread;

/// Blocks of 8 kB in half of the first experiment's pool.
const HALF_BLOCKS: f64 = 65_536.0;

/// Everything that the experiments gave.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Its head.
    #[serde(flatten)]
    pub head: Head,
    /// Reads and writes a second of the slow disk.
    pub disk_per_second: u32,
    /// Seconds of a part of the first experiment.
    pub part_seconds: u32,
    /// The first experiment.
    pub squeezes: Vec<Squeeze>,
    /// The second.
    pub analyses: Vec<Analysis>,
    /// The third.
    pub shrinks: Vec<PoolShrink>,
    /// Its levels that do not ask.
    pub takings: Vec<Taking>,
    /// MariaDB's own method.
    pub mariadb: Vec<Shrink>,
}

impl Report {
    /// Without any figure as yet.
    pub fn new(options: &MemoryOptions) -> Report {
        Report {
            head: Head::new("memory", options.command(), Vec::new()),
            disk_per_second: options.disk_per_second,
            part_seconds: options.seconds(),
            squeezes: Vec::new(),
            analyses: Vec::new(),
            shrinks: Vec::new(),
            takings: Vec::new(),
            mariadb: Vec::new(),
        }
    }

    /// Whether there is nothing to show.
    pub fn is_empty(&self) -> bool {
        self.squeezes.is_empty() && self.analyses.is_empty() && self.shrinks.is_empty()
    }

    /// Prints it: tables, or one JSON object.
    pub fn print(&self, as_json: bool) -> anyhow::Result<()> {
        if as_json {
            println!("{}", serde_json::to_string(self)?);
        } else {
            print!("{}", self.tables());
        }
        Ok(())
    }

    /// Writes the page.
    pub fn write(&self, directory: &Path) -> anyhow::Result<()> {
        let notes = ["medians, with the smallest and the largest; ratios are formed within one round".to_owned()];
        let title = ("Memory: measured", &notes[..], &*self.tables());
        self.head.write(directory, title, |path| draw_lines(path, &self.lines()))
    }

    fn tables(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_squeezes(&mut text);
        let _ = self.write_analyses(&mut text);
        let _ = self.write_shrinks(&mut text);
        text
    }

    fn write_squeezes(&self, text: &mut String) -> std::fmt::Result {
        if self.squeezes.is_empty() {
            return Ok(());
        }
        writeln!(
            text,
            "## A host takes half of the memory away, and gives it back\n\n\
             The server may use 1280, then 640, then 1280 MB (the paper: 10, 5, 10 GB), its pool is of 1024, 512 and \
             1024 MB (8, 4, 8 GB) with all methods but \"none\", and clients read any row of 920 MB (the paper: half \
             as many while memory is half); {} s each, {} reads and as many writes a second of a disk that data and \
             swap share. What clients use is in the pool when a server has started, as far as it fits; no process of \
             a server may be killed for want of memory. Transactions a second and hits in the second half of each \
             part; to \"born so\" of the same \
             round. A part must be longer than the disk needs to read half of the pool, {:.0} s, to show where it \
             ends.\n",
            self.part_seconds,
            self.disk_per_second,
            HALF_BLOCKS / f64::from(self.disk_per_second)
        )?;
        writeln!(
            text,
            "| method | before, tps | squeezed, tps | to born so | hits, % | in swap, MB \
             | after, tps | to born so | killed |\n\
             |---|---|---|---|---|---|---|---|---|"
        )?;
        for method in Method::ALL.into_iter().filter(|method| self.squeezes.iter().any(|run| run.method == *method)) {
            let part = |number: usize, value: &dyn Fn(&super::squeeze::Part) -> f64| {
                self.spread_of(method, &|run| run.parts.get(number).map(value))
            };
            let ratio = |number: usize| {
                self.spread_of(method, &|run| {
                    let born = self.squeezes.iter().find(|one| one.method == Method::Born && one.round == run.round)?;
                    Some(run.parts.get(number)?.per_second / born.parts.get(number)?.per_second)
                })
            };
            writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                method.name(),
                cell(part(0, &|part| part.per_second)),
                cell(part(1, &|part| part.per_second)),
                cell(ratio(1)),
                cell(part(1, &|part| part.hit_ratio * 100.0)),
                cell(part(1, &|part| part.swap_bytes as f64 / MIB as f64)),
                cell(part(2, &|part| part.per_second)),
                cell(ratio(2)),
                self.squeezes.iter().filter(|run| run.method == method).map(|run| run.kills).sum::<u64>(),
            )?;
        }
        writeln!(
            text,
            "\nPaper: without cooperation throughput falls and stays down; with each of its three methods it comes \
             back to the ideal. Bar here: at least 0.95 of born so, hits within 2 points, nobody killed.\n"
        )
    }

    fn spread_of(&self, method: Method, value: &dyn Fn(&Squeeze) -> Option<f64>) -> Option<Spread> {
        Spread::of(&self.squeezes.iter().filter(|run| run.method == method).filter_map(value).collect::<Vec<f64>>())
    }

    fn write_analyses(&self, text: &mut String) -> std::fmt::Result {
        if self.analyses.is_empty() {
            return Ok(());
        }
        writeln!(
            text,
            "## Analytical queries after shrinking\n\nQueries like those of TPC-H on a small model of its tables; the \
             pool was 512 MB before, and the queries had run in it. Time of the server that has shrunk to that of one \
             started so, and hits in points.\n"
        )?;
        let names: Vec<String> = QUERIES.iter().map(|(name, _)| format!("Q{name}")).collect();
        writeln!(
            text,
            "| pool, MB | {} | all | hits: shrunk, % | born, % |\n|{}",
            names.join(" | "),
            "---|".repeat(names.len() + 4)
        )?;
        for size in SIZES_BYTES {
            let ratio = |value: &dyn Fn(&Analysis) -> f64| {
                let pairs = self.pairs(size).map(|(shrunk, born)| value(shrunk) / value(born));
                cell(Spread::of(&pairs.collect::<Vec<f64>>()))
            };
            let mut row = format!("| {} |", size / MIB);
            for number in 0..QUERIES.len() {
                write!(row, " {} |", ratio(&|one| one.seconds[number]))?;
            }
            let hits = |shrunk: bool| {
                let of = self.pairs(size).map(|(one, born)| 100.0 * if shrunk { one } else { born }.hit_ratio);
                cell(Spread::of(&of.collect::<Vec<f64>>()))
            };
            writeln!(text, "{row} {} | {} | {} |", ratio(&|one| one.seconds.iter().sum()), hits(true), hits(false))?;
        }
        writeln!(text, "\nPaper: as fast as in a machine that was born so, but for query 20.\n")
    }

    fn pairs(&self, size: u64) -> impl Iterator<Item = (&Analysis, &Analysis)> {
        let of =
            move |shrunk| self.analyses.iter().filter(move |one| (one.pool_bytes, one.has_shrunk) == (size, shrunk));
        of(true).filter_map(move |shrunk| Some((shrunk, of(false).find(|born| born.round == shrunk.round)?)))
    }

    fn write_shrinks(&self, text: &mut String) -> std::fmt::Result {
        if self.shrinks.is_empty() {
            return Ok(());
        }
        writeln!(
            text,
            "## Giving half of the pool back\n\nFrom {} to {} MB and back, on request; \
             the parts as the server counts them.\n",
            POOL_BYTES / MIB,
            POOL_BYTES / MIB / 2
        )?;
        writeln!(
            text,
            "| clients | seconds | write, ms | move, ms | capture, ms | return, ms | worker: ran, ms \
             | waited, ms | pages: written | moved | evicted | p99, ms: before | meanwhile | tps: before | meanwhile \
             | growing, s |\n|{}",
            "---|".repeat(16)
        )?;
        // A round may lack one that has failed.
        let mut works = Vec::new();
        for work in self.shrinks.iter().map(|shrink| shrink.work) {
            if !works.contains(&work) {
                works.push(work);
            }
        }
        for work in works {
            let of = |value: &dyn Fn(&PoolShrink) -> Option<f64>| {
                let values = self.shrinks.iter().filter(|shrink| shrink.work == work).filter_map(value);
                cell(Spread::of(&values.collect::<Vec<f64>>()))
            };
            writeln!(
                text,
                "| {work} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                of(&|one| Some(one.seconds)),
                of(&|one| Some(one.parts.write_ms)),
                of(&|one| Some(one.parts.move_ms)),
                of(&|one| Some(one.parts.capture_ms)),
                of(&|one| Some(one.parts.return_ms)),
                of(&|one| Some(one.processor.ran_ms)),
                of(&|one| Some(one.processor.waited_ms)),
                of(&|one| Some(one.written_pages as f64)),
                of(&|one| Some(one.moved_pages as f64)),
                of(&|one| Some(one.evicted_pages as f64)),
                of(&|one| one.before_p99_ms),
                of(&|one| one.during_p99_ms),
                of(&|one| Some(one.before_per_second)),
                of(&|one| Some(one.during_per_second)),
                of(&|one| Some(one.growth_seconds)),
            )?;
        }
        let levels =
            |value: &dyn Fn(&Taking) -> f64| cell(Spread::of(&self.takings.iter().map(value).collect::<Vec<f64>>()));
        writeln!(
            text,
            "\nWithout asking, of an idle server: {} s at the level publish (the pages had left the pool before), \
             {} s at the level own.",
            levels(&|one| one.publish_seconds),
            levels(&|one| one.own_seconds)
        )?;
        if let Some(first) = self.mariadb.first() {
            let seconds = cell(Spread::of(&self.mariadb.iter().map(|one| one.seconds).collect::<Vec<f64>>()));
            writeln!(
                text,
                "\nMariaDB {} by its own means, idle: {} MB in {seconds} s, with {} dirty pages of 16 kB.",
                first.version,
                first.bytes / MIB,
                first.dirty_pages
            )?;
        }
        writeln!(
            text,
            "\nPaper: half of the pool in 7 s of the balloon and 245 s of the DBMS on request. Bars here: 1 GB in less \
             than 0.3 s idle and 1 s under load, growing 1 GB in less than 0.1 s, p99 at most twice that of before."
        )
    }

    /// Throughput over time, of the first round.
    fn lines(&self) -> Lines {
        let runs = self.squeezes.iter().filter(|run| run.round == 1);
        let series = runs.map(|run| {
            let points = (0u32..).zip(&run.seconds).map(|(second, rate)| (f64::from(second) + 0.5, *rate));
            (run.method.name().to_owned(), points.collect())
        });
        let part = f64::from(self.part_seconds);
        Lines {
            title: "Half of the memory taken away, and given back: transactions a second".to_owned(),
            along: "seconds".to_owned(),
            series: series.collect(),
            marks: vec![part, 2.0 * part],
        }
    }
}

fn cell(spread: Option<Spread>) -> String {
    let digits = |value: f64| match value {
        value if value.abs() < 10.0 => format!("{value:.2}"),
        value if value.abs() < 100.0 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    };
    spread.map_or("-".to_owned(), |spread| match spread.min == spread.max {
        true => digits(spread.median),
        false => format!("{} ({} to {})", digits(spread.median), digits(spread.min), digits(spread.max)),
    })
}
