//! The experiment as tables, as JSON and as a page with a plot.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use super::link::LinkShape;
use super::measure::{Death, Load, Measured, Way};
use crate::head::{Head, cell};
use crate::plot::{Panel, draw};
use crate::statistics::Spread;

/// Everything that the experiment gave.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Its head.
    #[serde(flatten)]
    pub head: Head,
    /// The machine's memory, MiB.
    pub memory_mib: u64,
    /// From one checkpoint to the next at the least, milliseconds.
    pub period_ms: u64,
    /// Loads.
    pub runs: Vec<Measured>,
    /// Deaths.
    pub deaths: Vec<Death>,
}

impl Report {
    /// Without any figure as yet.
    pub fn new(head: Head, memory_mib: u64, period_ms: u64) -> Report {
        Report { head, memory_mib, period_ms, runs: Vec::new(), deaths: Vec::new() }
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
        let notes = [
            format!(
                "a machine of {} MiB and one processor, copied every {} ms, sooner where its output waits, later where \
                 it would stand too long or the copy before is still under way; four clients on its bridge",
                self.memory_mib, self.period_ms
            ),
            "both hosts, clients and the machine's emulation share two processors; the link is a relay of TCP"
                .to_owned(),
            "medians of the rounds, with the smallest and the largest; ratios are formed within one round".to_owned(),
            "mirrored: QEMU's `blockdev-mirror` in its mode `write-blocking`, as DRBD's protocol C works; the memory \
             is not sent then, for which the rates of the mirror are better than those of what would protect a machine"
                .to_owned(),
            "a file written: 128 MB in records of 32 KB, again and again, in the page cache, nothing twice".to_owned(),
        ];
        let title = ("Protection: measured", &notes[..], &*self.tables());
        self.head.write(directory, title, |path| draw(path, &self.panels()))
    }

    /// Links, in their order.
    fn links(&self) -> Vec<LinkShape> {
        let mut links: Vec<LinkShape> = Vec::new();
        for run in &self.runs {
            if !links.contains(&run.link) {
                links.push(run.link);
            }
        }
        links
    }

    fn of(&self, cell: Cell) -> impl Iterator<Item = &Measured> {
        self.runs.iter().filter(move |run| (run.link, run.load, run.way) == cell)
    }

    fn spread(&self, cell: Cell, value: impl Fn(&Measured) -> Option<f64>) -> Option<Spread> {
        Spread::of(&self.of(cell).filter_map(value).collect::<Vec<_>>())
    }

    /// A value to that of another way in the same round.
    fn ratio(&self, cell: Cell, to: Way, value: fn(&Measured) -> Option<f64>) -> Option<Spread> {
        self.spread(cell, |one| {
            let other = self.of((cell.0, cell.1, to)).find(|other| other.round == one.round)?;
            Some(value(one)? / value(other)?)
        })
    }

    /// What is sent to what a mirror of the disk sends, and the memory beside it as data.
    fn to_mirror(&self, cell: Cell) -> Option<Spread> {
        self.spread(cell, |one| {
            let of = |way| self.of((cell.0, cell.1, way)).find(|other| other.round == one.round);
            let (data, mirror) = (of(Way::Data)?, of(Way::Mirror)?);
            Some(one.sent_kb? / (mirror.sent_kb? + data.sent_kb? - data.disk_kb?))
        })
    }

    fn tables(&self) -> String {
        let mut text = String::new();
        for link in self.links() {
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                "## {}\n\n| load | protected | a second | to not protected | to mirrored | latency, ms | it stands, ms \
                 | from one to the next, ms | held then, ms |\n|---|---|---|---|---|---|---|---|---|\n",
                link.name()
            );
            for (load, way) in Load::ALL.into_iter().flat_map(|load| Way::ALL.map(|way| (load, way))) {
                let run = (link, load, way);
                let of = |value: fn(&Measured) -> Option<f64>, digits| cell(self.spread(run, value), digits);
                let _ = writeln!(
                    text,
                    "| {}, {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                    load.name(),
                    load.unit(),
                    way.name(),
                    of(|run| Some(run.rate), 1),
                    cell(self.ratio(run, Way::Alone, |run| Some(run.rate)), 2),
                    cell(self.ratio(run, Way::Mirror, |run| Some(run.rate)), 2),
                    of(|run| run.latency_ms, 1),
                    of(|run| run.pause_ms, 1),
                    of(|run| run.period_ms, 0),
                    of(|run| run.held_ms, 1),
                );
            }
            let _ = write!(
                text,
                "\n| load | protected | KB sent | of that for the disk | for the disk, to all as data | to all as data \
                 | to mirrored, and the memory as data | blocks known there, % |\n|---|---|---|---|---|---|---|---|\n"
            );
            for (load, way) in Load::ALL.into_iter().flat_map(|load| Way::ALL.map(|way| (load, way))) {
                let run = (link, load, way);
                if way == Way::Alone {
                    continue;
                }
                let of = |value: fn(&Measured) -> Option<f64>, digits| cell(self.spread(run, value), digits);
                let _ = writeln!(
                    text,
                    "| {}, for each {} | {} | {} | {} | {} | {} | {} | {} |",
                    load.name(),
                    load.one(),
                    way.name(),
                    of(|run| run.sent_kb, 1),
                    of(|run| run.disk_kb, 2),
                    cell(self.ratio(run, Way::Data, |run| run.disk_kb), 3),
                    cell(self.ratio(run, Way::Data, |run| run.sent_kb), 2),
                    cell(self.to_mirror(run), 2),
                    of(|run| run.known_blocks_percent, 0),
                );
            }
            let deaths = self.deaths.iter().filter(|death| death.link == link);
            let death = |value: fn(&Death) -> f64| cell(Spread::of(&deaths.clone().map(value).collect::<Vec<_>>()), 2);
            let _ = write!(
                text,
                "\nQEMU is killed (SIGKILL) while its output is held. Until a question over a connection of before is \
                 answered: {} s; over a new one: {} s. Bar here: 3 s for a new one, without hardware help.\n\n",
                death(|one| one.old_s),
                death(|one| one.new_s)
            );
        }
        text
    }

    fn panels(&self) -> Vec<Panel> {
        let series: Vec<_> = Way::ALL.iter().enumerate().map(|(at, way)| (way.name().to_owned(), at + 1)).collect();
        let panel = |title: &str, value: &dyn Fn(Cell) -> Option<Spread>| Panel {
            title: title.to_owned(),
            series: series.clone(),
            groups: self
                .links()
                .into_iter()
                .flat_map(|link| Load::ALL.map(|load| (link, load)))
                .map(|(link, load)| {
                    (format!("{}, {}", load.name(), link.name()), Way::ALL.map(|way| value((link, load, way))).to_vec())
                })
                .collect(),
        };
        vec![
            panel("rate to that without protection", &|run| self.ratio(run, Way::Alone, |run| Some(run.rate))),
            panel("what is sent to all as data", &|run| self.ratio(run, Way::Data, |run| run.sent_kb)),
        ]
    }
}

/// What is measured once in each round.
type Cell = (LinkShape, Load, Way);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_that_of_the_same_round_and_what_was_not_measured_is_left_out() {
        let mut report = Report::new(Head::new("protection", String::new(), Vec::new()), 512, 100);
        let link = LinkShape { mbit: 100, round_trip_ms: 20 };
        let mut add = |round, way, rate, sent_kb, disk_kb| {
            let (load, latency_ms, none) = (Load::File, None, None);
            report.runs.push(Measured {
                round,
                link,
                way,
                load,
                rate,
                latency_ms,
                pause_ms: none,
                period_ms: none,
                held_ms: none,
                sent_kb,
                disk_kb,
                known_blocks_percent: none,
            });
        };
        add(1, Way::Alone, 100.0, None, None);
        add(1, Way::Output, 50.0, Some(1000.0), Some(4.0));
        add(1, Way::Data, 25.0, Some(2000.0), Some(1000.0));
        add(1, Way::Mirror, 20.0, Some(1000.0), None);
        add(2, Way::Alone, 200.0, None, None);
        add(2, Way::Output, 150.0, None, None);
        add(3, Way::Output, 1.0, None, None);
        let text = report.tables();
        for row in [
            "| a file written, MB/s | output held | 50.0 (1.0 to 150.0) | 0.62 (0.50 to 0.75) | 2.50 | - | - | - | - |",
            "| a file written, for each MB | output held | 1000.0 | 4.00 | 0.004 | 0.50 | 0.50 | - |",
        ] {
            assert!(text.contains(row), "{text}");
        }
    }
}
