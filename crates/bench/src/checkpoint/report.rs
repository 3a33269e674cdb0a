//! The experiment as tables, as JSON and as a page with a plot.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use super::measure::{Restored, ServerRate, Takes};
use super::{MEMORY_MIB, PERIODS_MS, RATES_MB};
use crate::head::{Head, cell};
use crate::plot::{Panel, draw};
use crate::statistics::Spread;

/// The parts of a pause, in the order of the figures.
const PARTS: [&str; 6] = ["stop (QEMU)", "devices (QEMU)", "synchronize", "cut disk", "cut memory", "cont (QEMU)"];

/// Everything that the experiment gave.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Its head.
    #[serde(flatten)]
    pub head: Head,
    /// Seconds of a run.
    pub seconds: u32,
    /// Checkpoints, by rate and period.
    pub takes: Vec<Takes>,
    /// The server, with and without.
    pub servers: Vec<ServerRate>,
    /// Restores.
    pub restores: Vec<Restored>,
}

impl Report {
    /// Without any figure as yet.
    pub fn new(head: Head, seconds: u32) -> Report {
        Report { head, seconds, takes: Vec::new(), servers: Vec::new(), restores: Vec::new() }
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
                "one machine of {MEMORY_MIB} MiB and one processor, its memory a file of ours, its disk over NBD; {} s \
                 a run",
                self.seconds
            ),
            "a run's figure is its median; of the rounds the median, with the smallest and the largest; ratios are \
             formed within one round"
                .to_owned(),
            "the guest writes one sector of a page at random in 256 MiB, at the rate; its server is at rest there"
                .to_owned(),
        ];
        let title = ("Checkpoints of machines: measured", &notes[..], &*self.tables());
        self.head.write(directory, title, |path| draw(path, &self.panels()))
    }

    fn of(&self, rate: u32, period: u32, value: impl Fn(&Takes) -> f64) -> Option<Spread> {
        let matching = self.takes.iter().filter(|takes| (takes.rate_mb, takes.period_ms) == (rate, period));
        Spread::of(&matching.map(value).collect::<Vec<_>>())
    }

    fn server_ratio(&self, period: u32) -> Option<Spread> {
        let of = |round: u32, period: Option<u32>| {
            self.servers.iter().find(|one| (one.round, one.period_ms) == (round, period)).map(|one| one.per_second)
        };
        let last = self.servers.iter().map(|one| one.round).max()?;
        let ratios = (1..=last).filter_map(|round| Some(of(round, Some(period))? / of(round, None)?));
        Spread::of(&ratios.collect::<Vec<_>>())
    }

    fn server(&self, period: Option<u32>) -> Option<Spread> {
        let rates = self.servers.iter().filter(|one| one.period_ms == period).map(|one| one.per_second);
        Spread::of(&rates.collect::<Vec<_>>())
    }

    fn tables(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_tables(&mut text);
        text
    }

    fn write_tables(&self, text: &mut String) -> std::fmt::Result {
        writeln!(
            text,
            "## How long it stands\n\n| written, MB/s | every, ms | came every, ms | stood, ms | of that ours, ms | \
             share of time | changed, MB | durable after, ms | processor, ms a MB |\n\
             |---|---|---|---|---|---|---|---|---|"
        )?;
        for rate in RATES_MB {
            for period in PERIODS_MS {
                writeln!(
                    text,
                    "| {rate} | {period} | {} | {} | {} | {} % | {} | {} | {} |",
                    cell(self.of(rate, period, |one| one.came_ms), 0),
                    cell(self.of(rate, period, |one| one.pause_ms.median), 1),
                    cell(self.of(rate, period, |one| one.own_ms.median), 1),
                    cell(self.of(rate, period, |one| one.paused_share * 100.0), 1),
                    cell(self.of(rate, period, |one| one.changed_mb), 1),
                    cell(self.of(rate, period, |one| one.durable_ms), 0),
                    cell(self.of(rate, period, |one| one.processor_ms_per_mb), 1),
                )?;
            }
        }
        writeln!(
            text,
            "\nBars: ours <= 3 ms at 10 MB/s every 100 ms; share of time <= 10 %. A trial of the design (TCG, too) \
             stood for 9 to 13 ms, 5 at best.\n\n## For what\n\n| written, MB/s | every, ms | {} |\n\
             |---|---|---|---|---|---|---|---|",
            PARTS.join(" | ")
        )?;
        for rate in RATES_MB {
            for period in PERIODS_MS {
                let parts = (0..PARTS.len()).map(|part| cell(self.of(rate, period, |one| one.parts_ms[part]), 2));
                writeln!(text, "| {rate} | {period} | {} |", parts.collect::<Vec<_>>().join(" | "))?;
            }
        }
        writeln!(
            text,
            "\n## The server meanwhile\n\npgbench in the guest, tpcb-like, two clients.\n\n\
             | checkpoints | transactions/s | to without |\n|---|---|---|\n| none | {} | 1 |",
            cell(self.server(None), 0)
        )?;
        for period in PERIODS_MS.into_iter().rev() {
            let (rate, ratio) = (cell(self.server(Some(period)), 0), cell(self.server_ratio(period), 2));
            writeln!(text, "| every {period} ms | {rate} | {ratio} |")?;
        }
        let restored =
            |value: fn(&Restored) -> f64| cell(Spread::of(&self.restores.iter().map(value).collect::<Vec<_>>()), 2);
        writeln!(
            text,
            "\n## A restore\n\n| until | seconds | bar |\n|---|---|---|\n| the guest's agent answers | {} | <= 1 |\n\
             | the server answers | {} | <= 3 |",
            restored(|one| one.agent_s),
            restored(|one| one.server_s)
        )
    }

    fn panels(&self) -> Vec<Panel> {
        let series: Vec<(String, usize)> =
            RATES_MB.iter().enumerate().map(|(colour, rate)| (format!("{rate} MB/s"), colour)).collect();
        let panel = |title: &str, value: fn(&Takes) -> f64| Panel {
            title: title.to_owned(),
            series: series.clone(),
            groups: PERIODS_MS
                .iter()
                .map(|&period| {
                    let bars = RATES_MB.iter().map(|&rate| self.of(rate, period, value)).collect();
                    (format!("every {period} ms"), bars)
                })
                .collect(),
        };
        vec![
            panel("how long the machine stands for a checkpoint, ms", |one| one.pause_ms.median),
            panel("of that not QEMU's own, ms", |one| one.own_ms.median),
            panel("share of time for which it stands, %", |one| one.paused_share * 100.0),
        ]
    }
}
