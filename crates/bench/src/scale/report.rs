//! The experiment as tables, as JSON and as a page with plots.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use super::measure::{Grown, LOADS, Step};
use super::{MEMORY_MIB, Method};
use crate::head::{Head, cell};
use crate::load::Work;
use crate::plot::{Lines, Panel, draw, draw_lines};
use crate::statistics::Spread;

/// Everything that the experiment gave.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Its head.
    #[serde(flatten)]
    pub head: Head,
    /// Clusters.
    pub runs: Vec<Run>,
}

/// One cluster.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    /// The round.
    pub round: u32,
    /// What it gave.
    #[serde(flatten)]
    pub grown: Grown,
}

impl Report {
    /// Without any figure as yet.
    pub fn new(head: Head) -> Report {
        Report { head, runs: Vec::new() }
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
                "a cluster in machines of {MEMORY_MIB} MiB and one processor, behind the router; pgbench's tables, 150 \
                 MB; four clients of pgbench"
            ),
            "medians of the rounds, with the smallest and the largest; ratios are formed within one round".to_owned(),
        ];
        let mut text = self.tables();
        for load in LOADS {
            let name = format!("scale-{}.png", load.name());
            // Writing to a string cannot fail.
            let _ = writeln!(text, "\n![transactions a second, {}]({name})", load.name());
            draw_lines(&directory.join(name), &self.over_time(load))?;
        }
        let title = ("Clusters of machines that grow: measured", &notes[..], &*text);
        self.head.write(directory, title, |path| draw(path, &self.panels()))
    }

    /// A figure of all rounds after the change to so many followers.
    fn figure(
        &self,
        (method, load): (Method, Work),
        followers: u64,
        value: impl Fn(&Step) -> Option<f64>,
    ) -> Option<Spread> {
        let runs = self.runs.iter().filter(|run| (run.grown.method, run.grown.load) == (method, load));
        let steps = runs.flat_map(|run| &run.grown.steps).filter(|step| step.followers == followers);
        Spread::of(&steps.filter_map(value).collect::<Vec<f64>>())
    }

    /// Of the machines that boot, to that of forks in the same round.
    fn ratio(&self, load: Work, followers: u64, value: impl Fn(&Step) -> f64) -> Option<Spread> {
        let of = |round: u32, method| {
            let mut runs = self.runs.iter().filter(|run| run.round == round && run.grown.load == load);
            let run = runs.find(|run| run.grown.method == method)?;
            run.grown.steps.iter().find(|step| step.followers == followers).map(&value)
        };
        let forks = self.runs.iter().filter(|run| run.grown.load == load && run.grown.method == Method::Fork);
        let ratios = forks.filter_map(|run| Some(of(run.round, Method::Boot)? / of(run.round, Method::Fork)?));
        Spread::of(&ratios.collect::<Vec<f64>>())
    }

    fn followers(&self, load: Work) -> Vec<u64> {
        let runs = self.runs.iter().filter(|run| run.grown.load == load);
        let mut all: Vec<u64> = runs.flat_map(|run| &run.grown.steps).map(|step| step.followers).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    fn tables(&self) -> String {
        let mut text = String::new();
        for load in LOADS {
            let _ = writeln!(
                text,
                "\n## {}\n\n| followers | forks answer after, s | booted ones, s | ratio | transactions/s, forks | \
                 booted | memory of all, forks, MiB | booted, MiB | ratio |\n|---|---|---|---|---|---|---|---|---|",
                load.name()
            );
            for followers in self.followers(load) {
                let [forks, boots] = Method::ALL.map(|method| (method, load));
                let seconds = |of| self.figure(of, followers, |step| (followers > 0).then_some(step.seconds));
                let rate = |of| self.figure(of, followers, |step| step.per_second);
                let memory = |of| self.figure(of, followers, |step| Some(step.memory_mib));
                let quicker = self.ratio(load, followers, |step| step.seconds).filter(|_| followers > 0);
                let smaller = self.ratio(load, followers, |step| step.memory_mib);
                let row = [
                    cell(seconds(forks), 1),
                    cell(seconds(boots), 1),
                    cell(quicker, 1),
                    cell(rate(forks), 0),
                    cell(rate(boots), 0),
                    cell(memory(forks), 0),
                    cell(memory(boots), 0),
                    cell(smaller, 2),
                ];
                let _ = writeln!(text, "| {followers} | {} |", row.join(" | "));
            }
        }
        text.push_str(
            "\nThe followers of a row are added to those of the row above, with the clients at work; the eight without \
             them. Each row's rate and memory are those of the seconds after.\n",
        );
        text
    }

    fn panels(&self) -> Vec<Panel> {
        let series: Vec<(String, usize)> =
            Method::ALL.iter().zip([2, 1]).map(|(method, colour)| (method.name().to_owned(), colour)).collect();
        let groups = |value: &dyn Fn(&Step) -> Option<f64>| {
            let mut groups = Vec::new();
            for load in LOADS {
                for followers in self.followers(load) {
                    let bars: Vec<Option<Spread>> =
                        Method::ALL.map(|method| self.figure((method, load), followers, value)).to_vec();
                    if bars.iter().any(Option::is_some) {
                        groups.push((format!("{}, {followers}", load.name()), bars));
                    }
                }
            }
            groups
        };
        let panel = |title: &str, groups| Panel { title: title.to_owned(), series: series.clone(), groups };
        vec![
            panel("seconds until the new followers answer", groups(&|one| (one.followers > 0).then_some(one.seconds))),
            panel("transactions a second then", groups(&|one| one.per_second)),
            panel("memory of all machines, MiB", groups(&|one| Some(one.memory_mib))),
        ]
    }

    /// Transactions a second of the first round.
    fn over_time(&self, load: Work) -> Lines {
        let runs = self.runs.iter().filter(|run| run.grown.load == load);
        let first = runs.clone().map(|run| run.round).min();
        let series = runs.filter(|run| Some(run.round) == first).map(|run| {
            let points = (0u32..).zip(&run.grown.per_second).map(|(at, count)| (f64::from(at), f64::from(*count)));
            (run.grown.method.name().to_owned(), points.collect())
        });
        Lines {
            title: format!("{}: transactions a second while the cluster grows, first round", load.name()),
            along: "time, s".to_owned(),
            series: series.collect(),
            marks: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_one_round_and_rows_in_the_order_of_followers() {
        let mut report = Report::new(Head::new("scale", String::new(), Vec::new()));
        let step = |followers, seconds| Step { followers, seconds, per_second: Some(5.0), memory_mib: seconds };
        for (round, method, seconds) in
            [(1, Method::Fork, 2.0), (1, Method::Boot, 20.0), (2, Method::Fork, 4.0), (2, Method::Boot, 20.0)]
        {
            let grown =
                Grown { method, load: LOADS[0], steps: vec![step(4, seconds), step(0, 0.0)], per_second: vec![1, 2] };
            report.runs.push(Run { round, grown });
        }
        let ratio = report.ratio(LOADS[0], 4, |step| step.seconds);
        assert_eq!(ratio, Some(Spread { median: 7.5, min: 5.0, max: 10.0 }));
        assert_eq!((report.followers(LOADS[0]), report.followers(LOADS[1])), (vec![0, 4], Vec::new()));
        assert_eq!(report.ratio(LOADS[1], 4, |step| step.seconds), None);
        let text = report.tables();
        assert!(text.contains("| 4 | 3.0 (2.0 to 4.0) | 20.0 | 7.5 (5.0 to 10.0) | 5 | 5 |"), "{text}");
        assert!(text.contains("| 0 | - | - | - | 5 | 5 |"), "{text}");
        assert_eq!(report.over_time(LOADS[0]).series.len(), 2);
    }
}
