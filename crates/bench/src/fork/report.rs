//! The experiment as tables, as JSON and as a page with a plot.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use super::MEMORY_MIB;
use super::measure::{Booted, Forked};
use crate::head::{Head, cell};
use crate::plot::{Panel, draw};
use crate::statistics::Spread;

/// Everything that the experiment gave.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Its head.
    #[serde(flatten)]
    pub head: Head,
    /// For how long a fork reads before its memory is looked at again.
    pub seconds: u32,
    /// Forks.
    pub forks: Vec<Forked>,
    /// Machines that boot.
    pub boots: Vec<Booted>,
}

impl Report {
    /// Without any figure as yet.
    pub fn new(head: Head, seconds: u32) -> Report {
        Report { head, seconds, forks: Vec::new(), boots: Vec::new() }
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
                "machines of {MEMORY_MIB} MiB and one processor; pgbench's tables, 150 MB, are in the parent's memory"
            ),
            "medians of the rounds, with the smallest and the largest; ratios are formed within one round".to_owned(),
        ];
        let title = ("Forks of machines: measured", &notes[..], &*self.tables());
        self.head.write(directory, title, |path| draw(path, &self.panels()))
    }

    fn fork(&self, value: impl Fn(&Forked) -> f64) -> Option<Spread> {
        Spread::of(&self.forks.iter().map(value).collect::<Vec<_>>())
    }

    fn boot(&self, value: impl Fn(&Booted) -> f64) -> Option<Spread> {
        Spread::of(&self.boots.iter().map(value).collect::<Vec<_>>())
    }

    /// A machine that boots, to a fork of the same round.
    fn ratio(&self, boot: impl Fn(&Booted) -> f64, fork: impl Fn(&Forked) -> f64) -> Option<Spread> {
        let of = |one: &Forked| Some(boot(self.boots.iter().find(|other| other.round == one.round)?) / fork(one));
        Spread::of(&self.forks.iter().filter_map(of).collect::<Vec<_>>())
    }

    fn boot_rate_share(&self) -> Option<Spread> {
        let of = |one: &Forked| {
            let boot = self.boots.iter().find(|other| other.round == one.round)?;
            Some(boot.per_second / one.parent_per_second * 100.0)
        };
        Spread::of(&self.forks.iter().filter_map(of).collect::<Vec<_>>())
    }

    fn tables(&self) -> String {
        let share = |mib: f64| mib / MEMORY_MIB as f64 * 100.0;
        let rows = [
            (
                "until its agent answers, s",
                cell(self.fork(|one| one.agent_s), 2),
                cell(self.boot(|one| one.agent_s), 2),
                cell(self.ratio(|boot| boot.agent_s, |fork| fork.agent_s), 1),
                "<= 1",
            ),
            (
                "until its server answers, s",
                cell(self.fork(|one| one.server_s), 2),
                cell(self.boot(|one| one.server_s), 2),
                cell(self.ratio(|boot| boot.server_s, |fork| fork.server_s), 1),
                "",
            ),
            (
                "until a hot question is answered, s",
                cell(self.fork(|one| one.hot_s), 2),
                cell(self.boot(|one| one.hot_s), 2),
                cell(self.ratio(|boot| boot.hot_s, |fork| fork.hot_s), 1),
                "<= 2.5",
            ),
            (
                "reads in its first 5 s, % of its warm parent's",
                cell(self.fork(|one| one.per_second / one.parent_per_second * 100.0), 0),
                cell(self.boot_rate_share(), 0),
                String::new(),
                ">= 95",
            ),
            (
                "of the guest's memory its own at once, %",
                cell(self.fork(|one| share(one.private_mib)), 1),
                cell(self.boot(|one| share(one.private_mib)), 1),
                String::new(),
                "<= 5",
            ),
            (
                "of the guest's memory its own after reads, %",
                cell(self.fork(|one| share(one.private_later_mib)), 1),
                String::new(),
                String::new(),
                "<= 10",
            ),
            ("its parent stands, ms", cell(self.fork(|one| one.pause_ms), 1), String::new(), String::new(), "<= 20"),
        ];
        let mut text = "| | fork | boot and base backup | ratio | bar |\n|---|---|---|---|---|\n".to_owned();
        for (what, fork, boot, ratio, bar) in rows {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "| {what} | {fork} | {boot} | {ratio} | {bar} |");
        }
        let _ = writeln!(
            text,
            "\nA fork reads for {} s in all. Before a machine's base backup its own empty server is made (in its time) \
             and removed (not in it).\n\nThe paper on machines that share the origin of memory and disk (Xen, MySQL, \
             17 GB): a replica answers after 60 s instead of 18 min (18x), is as fast as its source after 4 min, not \
             30, has 67 % of that at once, and needs 0.16 of the memory.",
            self.seconds
        );
        text
    }

    fn panels(&self) -> Vec<Panel> {
        let series = vec![("fork".to_owned(), 2), ("boot and base backup".to_owned(), 1)];
        let group = |name: &str, fork, boot| (name.to_owned(), vec![fork, boot]);
        let times = vec![
            group("agent", self.fork(|one| one.agent_s), self.boot(|one| one.agent_s)),
            group("server", self.fork(|one| one.server_s), self.boot(|one| one.server_s)),
            group("hot question", self.fork(|one| one.hot_s), self.boot(|one| one.hot_s)),
        ];
        let rates = vec![group(
            "first 5 s",
            self.fork(|one| one.per_second / one.parent_per_second * 100.0),
            self.boot_rate_share(),
        )];
        let panel = |title: &str, groups| Panel { title: title.to_owned(), series: series.clone(), groups };
        vec![
            panel("seconds until an answer", times),
            panel("reads a second, % of the warm parent's", rates),
            panel(
                "memory of its own, MiB",
                vec![
                    group("at once", self.fork(|one| one.private_mib), self.boot(|one| one.private_mib)),
                    group("after reads", self.fork(|one| one.private_later_mib), None),
                ],
            ),
        ]
    }
}
