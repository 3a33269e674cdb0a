//! The experiment as tables, as JSON and as a page with a plot.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use super::back_end::Way;
use super::guest::{GuestLoad, GuestMeasured, GuestWay};
use super::guest_report::{self, GuestFigure};
use super::load::{Load, Measured};
use crate::head::{Head, cell};
use crate::plot::{Panel, draw};
use crate::statistics::Spread;

/// Everything that the experiment gave.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Its head.
    #[serde(flatten)]
    pub head: Head,
    /// Seconds of a load.
    pub seconds: u32,
    /// What was measured without a guest.
    pub figures: Vec<Figure>,
    /// What was measured in one.
    pub guest_figures: Vec<GuestFigure>,
}

/// One load on one way in one round.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Figure {
    /// The round.
    pub round: u32,
    /// The back end.
    pub way: Way,
    /// The load.
    pub load: Load,
    /// What came of it.
    #[serde(flatten)]
    pub measured: Measured,
}

impl Report {
    /// Without any figure as yet.
    pub fn new(head: Head, seconds: u32) -> Report {
        Report { head, seconds, figures: Vec::new(), guest_figures: Vec::new() }
    }

    /// Adds a figure.
    pub fn add(&mut self, round: u32, way: Way, load: Load, measured: Measured) {
        self.figures.push(Figure { round, way, load, measured });
    }

    /// Adds a figure of the guest.
    pub fn add_guest(&mut self, round: u32, way: GuestWay, load: GuestLoad, measured: GuestMeasured) {
        self.guest_figures.push(GuestFigure { round, way, load, measured });
    }

    /// Whether there is nothing to show.
    pub fn is_empty(&self) -> bool {
        self.figures.is_empty() && self.guest_figures.is_empty()
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

    /// Writes `disk.md` and `disk.png`.
    pub fn write(&self, directory: &Path) -> anyhow::Result<()> {
        let notes = ["medians, with the smallest and the largest; ratios are formed within one round".to_owned()];
        let page = ("Disks of virtual machines: measured", &notes[..], &*self.tables());
        self.head.write(directory, page, |path| draw(path, &self.panels()))
    }

    fn tables(&self) -> String {
        let mut text = String::new();
        if !self.figures.is_empty() {
            text = format!(
                "## The back end alone\n\nA driver without a guest, {} s a load, on 256 MB that the host has in its \
                 cache: 4 KiB at depth 16, 128 KiB at depth 4, one queue, no flushes. Processor time is that of the \
                 back end's process.\n\n",
                self.seconds
            );
            for load in Load::ALL {
                // Writing to a string cannot fail.
                let _ = self.write_load(load, &mut text);
            }
        }
        text + &guest_report::tables(&self.guest_figures, self.seconds)
    }

    fn write_load(&self, load: Load, text: &mut String) -> std::fmt::Result {
        writeln!(
            text,
            "| {} | requests/s | MB/s | processor, us a request | requests/s to QEMU's | processor to QEMU's |\n\
             |---|---|---|---|---|---|",
            load.name()
        )?;
        for way in Way::ALL {
            let rate = self.spread(way, load, |measured| measured.per_second);
            let megabytes = self.spread(way, load, |measured| measured.megabytes_per_second);
            let processor = self.spread(way, load, |measured| measured.processor_us);
            writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} |",
                way.name(),
                cell(rate, 0),
                cell(megabytes, 0),
                cell(processor, 2),
                cell(self.ratio(way, load, |measured| measured.per_second), 2),
                cell(self.ratio(way, load, |measured| measured.processor_us), 2),
            )?;
        }
        writeln!(text)
    }

    fn spread(&self, way: Way, load: Load, value: impl Fn(&Measured) -> f64) -> Option<Spread> {
        let of = |figure: &&Figure| figure.way == way && figure.load == load;
        let values: Vec<f64> = self.figures.iter().filter(of).map(|figure| value(&figure.measured)).collect();
        Spread::of(&values)
    }

    /// To the rival's figure of the same round.
    fn ratio(&self, way: Way, load: Load, value: impl Fn(&Measured) -> f64) -> Option<Spread> {
        let rival = way.rival()?;
        let find = |way: Way, round: u32| {
            self.figures.iter().find(|figure| figure.way == way && figure.load == load && figure.round == round)
        };
        let last = self.figures.iter().map(|figure| figure.round).max()?;
        let ratios: Vec<f64> = (1..=last)
            .filter_map(|round| Some(value(&find(way, round)?.measured) / value(&find(rival, round)?.measured)))
            .collect();
        Spread::of(&ratios)
    }

    fn panels(&self) -> Vec<Panel> {
        let mut panels = if self.figures.is_empty() { Vec::new() } else { self.driver_panels() };
        panels.extend(guest_report::panels(&self.guest_figures));
        panels
    }

    fn driver_panels(&self) -> Vec<Panel> {
        let series: Vec<(String, usize)> =
            Way::ALL.iter().enumerate().map(|(colour, way)| (way.name().to_owned(), colour)).collect();
        let panel = |title: &str, loads: &[Load], value: fn(&Measured) -> f64| Panel {
            title: title.to_owned(),
            series: series.clone(),
            groups: loads
                .iter()
                .map(|load| {
                    (load.name().to_owned(), Way::ALL.iter().map(|way| self.spread(*way, *load, value)).collect())
                })
                .collect(),
        };
        let (random, sequential) = Load::ALL.split_at(2);
        vec![
            panel("requests a second, 4 KiB", random, |measured| measured.per_second),
            panel("processor time of the back end, us a request of 4 KiB", random, |measured| measured.processor_us),
            panel("megabytes a second, 128 KiB", sequential, |measured| measured.megabytes_per_second),
        ]
    }
}
