//! The experiment as tables, as JSON and as a page with a plot.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

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
                "a machine of {} MiB and one processor, copied every {} ms at most; four clients on its bridge",
                self.memory_mib, self.period_ms
            ),
            "both hosts, clients and the machine's emulation share two processors; the link is the loopback interface"
                .to_owned(),
            "medians of the rounds, with the smallest and the largest; ratios are formed within one round".to_owned(),
        ];
        let title = ("Protection: measured", &notes[..], &*self.tables());
        self.head.write(directory, title, |path| draw(path, &self.panels()))
    }

    fn of(&self, load: Load, way: Way) -> impl Iterator<Item = &Measured> {
        self.runs.iter().filter(move |run| run.load == load && run.way == way)
    }

    fn spread(&self, load: Load, way: Way, value: impl Fn(&Measured) -> Option<f64>) -> Option<Spread> {
        Spread::of(&self.of(load, way).filter_map(value).collect::<Vec<_>>())
    }

    /// Its rate to that without protection, in the same round.
    fn share(&self, load: Load, way: Way) -> Option<Spread> {
        let share = |one: &Measured| {
            let alone = self.of(load, Way::Alone).find(|other| other.round == one.round)?;
            Some(one.rate / alone.rate)
        };
        self.spread(load, way, share)
    }

    fn tables(&self) -> String {
        let mut text =
            "## What it costs\n\n| load | protected | a second | to not protected | latency, ms | it stands, \
                        ms | from one to the next, ms | held then, ms | MB/s sent | known there, % \
                        |\n|---|---|---|---|---|---|---|---|---|---|\n"
                .to_owned();
        for (load, way) in Load::ALL.into_iter().flat_map(|load| Way::ALL.map(|way| (load, way))) {
            let of = |value: fn(&Measured) -> Option<f64>, digits| cell(self.spread(load, way, value), digits);
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "| {}, {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                load.name(),
                load.unit(),
                way.name(),
                of(|run| Some(run.rate), 1),
                cell(self.share(load, way), 2),
                of(|run| run.latency_ms, 1),
                of(|run| run.pause_ms, 1),
                of(|run| run.period_ms, 0),
                of(|run| run.held_ms, 1),
                of(|run| run.sent_mb_per_second, 2),
                of(|run| run.known_percent, 0),
            );
        }
        let death = |value: fn(&Death) -> f64| cell(Spread::of(&self.deaths.iter().map(value).collect::<Vec<_>>()), 2);
        let _ = write!(
            text,
            "\n## Its death\n\nQEMU is killed (SIGKILL). Until a question over a connection of before is answered: {} \
             s; over a new one: {} s. Bar here: 3 s for a new one, without hardware help.\n",
            death(|one| one.old_s),
            death(|one| one.new_s)
        );
        text
    }

    fn panels(&self) -> Vec<Panel> {
        let series: Vec<_> = Way::ALL.iter().enumerate().map(|(at, way)| (way.name().to_owned(), at + 1)).collect();
        let panel = |title: &str, value: fn(&Measured) -> Option<f64>| Panel {
            title: title.to_owned(),
            series: series.clone(),
            groups: Load::ALL
                .into_iter()
                .map(|load| (load.name().to_owned(), Way::ALL.map(|way| self.spread(load, way, value)).to_vec()))
                .collect(),
        };
        vec![
            Panel {
                groups: Load::ALL
                    .into_iter()
                    .map(|load| (load.name().to_owned(), Way::ALL.map(|way| self.share(load, way)).to_vec()))
                    .collect(),
                ..panel("rate to that without protection", |_| None)
            },
            panel("milliseconds that the machine stands", |run| run.pause_ms),
            panel("megabytes a second that are sent", |run| run.sent_mb_per_second),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_that_of_the_same_round_and_what_was_not_measured_is_left_out() {
        let mut report = Report::new(Head::new("protection", String::new(), Vec::new()), 512, 100);
        let mut add = |round, way, rate, pause_ms| {
            let (load, latency_ms, none) = (Load::Reads, Some(2.0), None);
            report.runs.push(Measured {
                round,
                way,
                load,
                rate,
                latency_ms,
                pause_ms,
                period_ms: none,
                held_ms: none,
                sent_mb_per_second: none,
                known_percent: none,
            });
        };
        add(1, Way::Alone, 100.0, None);
        add(1, Way::Output, 50.0, Some(7.0));
        add(2, Way::Alone, 200.0, None);
        add(2, Way::Output, 150.0, Some(9.0));
        add(3, Way::Output, 1.0, None);
        let share = report.share(Load::Reads, Way::Output).unwrap();
        assert_eq!((share.min, share.max), (0.5, 0.75));
        let row = "| select-only, transactions/s | output held | 50.0 (1.0 to 150.0) | 0.62 (0.50 to 0.75) | 2.0 | 8.0 \
                   (7.0 to 9.0) | - | - | - | - |";
        assert!(report.tables().contains(row), "{}", report.tables());
    }
}
