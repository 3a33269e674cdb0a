//! What a guest sees of its disks, as tables and panels.

use std::fmt::Write as _;

use serde::Serialize;

use super::guest::{GuestLoad, GuestMeasured, GuestWay};
use crate::head::cell;
use crate::plot::Panel;
use crate::statistics::Spread;

/// One load on one disk of the guest in one round.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct GuestFigure {
    /// The round.
    pub round: u32,
    /// The back end.
    pub way: GuestWay,
    /// The load.
    pub load: GuestLoad,
    /// What came of it.
    #[serde(flatten)]
    pub measured: GuestMeasured,
}

/// The tables; nothing without figures.
pub fn tables(figures: &[GuestFigure], seconds: u32) -> String {
    if figures.is_empty() {
        return String::new();
    }
    let virtualization = if onecopy_hypervisor::kvm_runs_guests() { "KVM" } else { "QEMU's translator (no KVM)" };
    let mut text = format!(
        "## In a guest\n\n\
         One guest of 1 processor and 512 MiB under {virtualization} with all disks at once, \
         {seconds} s a load, 4 KiB anywhere in 256 MB, O_DIRECT in the guest; the disks take turns within a round. A \
         raw file has no serving process: QEMU does its work. QEMU's processor time has in it what the guest itself \
         computes.\n\n"
    );
    for load in GuestLoad::ALL {
        // Writing to a string cannot fail.
        let _ = write_load(figures, load, &mut text);
    }
    text
}

fn write_load(figures: &[GuestFigure], load: GuestLoad, text: &mut String) -> std::fmt::Result {
    writeln!(
        text,
        "| {} | requests/s | median, us | serving process, us a request | QEMU, us a request \
         | requests/s to raw file, writeback |\n\
         |---|---|---|---|---|---|",
        load.name()
    )?;
    for way in GuestWay::ALL {
        let spread = |value: fn(&GuestMeasured) -> Option<f64>| spread(figures, way, load, value);
        let server = spread(|measured| measured.server_us);
        let rate = spread(|measured| Some(measured.per_second));
        writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} |",
            way.name(),
            cell(rate, 0),
            cell(spread(|measured| Some(measured.median_us)), 0),
            if rate.is_some() && server.is_none() { "none".to_owned() } else { cell(server, 2) },
            cell(spread(|measured| Some(measured.qemu_us)), 1),
            cell(ratio(figures, way, load), 2),
        )?;
    }
    writeln!(text)
}

fn spread(
    figures: &[GuestFigure],
    way: GuestWay,
    load: GuestLoad,
    value: fn(&GuestMeasured) -> Option<f64>,
) -> Option<Spread> {
    let of = |figure: &&GuestFigure| figure.way == way && figure.load == load;
    let values: Vec<f64> = figures.iter().filter(of).filter_map(|figure| value(&figure.measured)).collect();
    Spread::of(&values)
}

/// Requests a second to those of the raw file in the same round.
fn ratio(figures: &[GuestFigure], way: GuestWay, load: GuestLoad) -> Option<Spread> {
    let raw = |round: u32| {
        let of = |figure: &&GuestFigure| figure.way == GuestWay::Raw && figure.load == load && figure.round == round;
        figures.iter().find(of).map(|figure| figure.measured.per_second)
    };
    let ratios: Vec<f64> = figures
        .iter()
        .filter(|figure| figure.way == way && figure.load == load)
        .filter_map(|figure| Some(figure.measured.per_second / raw(figure.round)?))
        .collect();
    Spread::of(&ratios)
}

/// What is drawn; nothing without figures.
pub fn panels(figures: &[GuestFigure]) -> Vec<Panel> {
    if figures.is_empty() {
        return Vec::new();
    }
    let series = GuestWay::ALL.iter().enumerate().map(|(colour, way)| (way.name().to_owned(), colour)).collect();
    let bars = |load: &GuestLoad| {
        let rate = |way: &GuestWay| spread(figures, *way, *load, |measured| Some(measured.per_second));
        (load.name(), GuestWay::ALL.iter().map(rate).collect())
    };
    vec![Panel {
        title: "requests a second in a guest, 4 KiB".to_owned(),
        series,
        groups: GuestLoad::ALL.iter().map(bars).collect(),
    }]
}
