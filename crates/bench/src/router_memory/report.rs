//! The experiment as a table, as JSON and as a page with a plot.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use super::CONNECTIONS;
use super::measure::{Figure, LONG_MIB, Load, Measured};
use crate::head::{Head, cell};
use crate::plot::{Bar, Panel, draw};
use crate::statistics::Spread;

/// The proxies, in the order of the columns.
const PROXIES: [&str; 2] = ["pgbouncer", "onecopy"];

/// Everything that the experiment gave.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Its head.
    #[serde(flatten)]
    pub head: Head,
    /// Length of a load by COPY.
    pub copy_mib: u32,
    /// What was measured.
    pub measured: Vec<Measured>,
}

impl Report {
    /// Without any figure as yet.
    pub fn new(head: Head, copy_mib: u32) -> Report {
        Report { head, copy_mib, measured: Vec::new() }
    }

    /// Prints it: a table, or one JSON object.
    pub fn print(&self, as_json: bool) -> anyhow::Result<()> {
        if as_json {
            println!("{}", serde_json::to_string(self)?);
        } else {
            print!("{}", self.table());
        }
        Ok(())
    }

    /// Writes the page.
    pub fn write(&self, directory: &Path) -> anyhow::Result<()> {
        let notes = [
            "medians of the rounds, with the smallest and the largest".to_owned(),
            "*grows by*: the most resident memory of the proxy while the load lasts, less what it had before; 10 s of \
             rest lie between two loads, and 40 s before the last look"
                .to_owned(),
        ];
        let title = ("Router: memory", &notes[..], &*self.table());
        self.head.write(directory, title, |path| draw(path, &[self.panel()]))
    }

    fn of(&self, proxy: &str, load: Load, value: impl Fn(&Figure) -> f64) -> Option<Spread> {
        let runs = self.measured.iter().filter(|run| run.proxy == proxy);
        let figures = runs.flat_map(|run| &run.figures).filter(|figure| figure.load == load);
        Spread::of(&figures.map(value).collect::<Vec<_>>())
    }

    fn name(&self, load: Load) -> String {
        match load {
            Load::Connections => format!("{CONNECTIONS} idle connections"),
            Load::CopyIn => format!("COPY FROM STDIN, {} MiB", self.copy_mib),
            Load::CopyOut => format!("COPY TO STDOUT, {} MiB", self.copy_mib),
            Load::Literal => format!("INSERT of a literal of {LONG_MIB} MiB"),
            Load::Parameter => format!("INSERT of a parameter of {LONG_MIB} MiB"),
            Load::Row => format!("a row of {LONG_MIB} MiB"),
            Load::Nothing => "nothing".to_owned(),
        }
    }

    fn table(&self) -> String {
        let mut text = "| MiB | pgbouncer | onecopy |\n|---|---|---|\n".to_owned();
        let mut row = |what: &str, load, value: fn(&Figure) -> f64| {
            let [bouncer, ours] = PROXIES.map(|proxy| cell(self.of(proxy, load, value), 1));
            // Writing to a string cannot fail.
            let _ = writeln!(text, "| {what} | {bouncer} | {ours} |");
        };
        row("at rest, before all", Load::Connections, |figure| figure.before_mib);
        for load in Load::ALL.into_iter().filter(|load| *load != Load::Nothing) {
            row(&format!("grows by: {}", self.name(load)), load, |figure| figure.peak_mib - figure.before_mib);
        }
        row("at rest, after all", Load::Nothing, |figure| figure.before_mib);
        text.push_str(
            "\nBar: memory is bounded by connections, and a long load or a long INSERT takes tens of MiB, which are \
             given back. A literal\nmisses it: where a statement may run is in its text, which is read as a whole. All \
             else passes in parts.\n",
        );
        text
    }

    fn panel(&self) -> Panel {
        let growth = |proxy, load| -> Bar { self.of(proxy, load, |figure| figure.peak_mib - figure.before_mib) };
        let group = |load| (self.name(load), PROXIES.map(|proxy| growth(proxy, load)).to_vec());
        Panel {
            title: "resident memory of the proxy grows by, MiB".to_owned(),
            series: PROXIES.iter().zip(1..).map(|(proxy, colour)| ((*proxy).to_owned(), colour)).collect(),
            groups: Load::ALL.into_iter().filter(|load| *load != Load::Nothing).map(group).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_load_takes_is_told_of_each_proxy() {
        let mut report = Report::new(Head::new("router-memory", String::new(), Vec::new()), 64);
        for (proxy, more) in [("pgbouncer", 1.0), ("onecopy", 20.0), ("onecopy", 30.0)] {
            let figure = |load| Figure { load, before_mib: 10.0, peak_mib: 10.0 + more };
            report.measured.push(Measured { proxy, round: 1, figures: Load::ALL.map(figure).to_vec() });
        }
        let table = report.table();
        for line in [
            "| at rest, before all | 10.0 | 10.0 |",
            "| grows by: COPY FROM STDIN, 64 MiB | 1.0 | 25.0 (20.0 to 30.0) |",
            "| at rest, after all | 10.0 | 10.0 |",
        ] {
            assert!(table.contains(line), "{line} is missing in {table}");
        }
        assert!(!table.contains("grows by: nothing"), "{table}");
    }
}
