//! `onecopy vm list`: the machines of a directory.

use std::fmt::Write as _;

use clap::Args;
use onecopy_host::TotalFootprint;
use onecopy_host::machines::{MachineSummary, Machines};
use onecopy_memory::size;

use super::protect;
use crate::directory::DirectoryOption;
use crate::machines;
use crate::watch::Watch;

/// Show the machines, those of the cluster among them
#[derive(Debug, Args)]
pub struct List {
    #[command(flatten)]
    directory: DirectoryOption,
    #[command(flatten)]
    watch: Watch,
}

impl List {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let machines = Machines::of(self.directory.resolve()?)?;
        crate::block_on(self.watch.show(async || machines.list().await, |list| table(list)))
    }
}

/// The list for people.
fn table(list: &[MachineSummary]) -> String {
    if list.is_empty() {
        return "There are no machines; make one with: onecopy vm create NAME\n".to_owned();
    }
    let mut text = format!(
        "{:<16} {:<9} {:>8} {:>4} {:>7} {:>15} {:<8} {}\n",
        "machine", "state", "process", "cpus", "memory", "disk", "server", "ports, or address"
    );
    for summary in list {
        lines(summary, &mut text);
    }
    let machines = list.iter().map(|summary| (&summary.machine.footprint, &summary.machine.disks[..]));
    // Writing to a String cannot fail, here and below.
    let _ = writeln!(text, "{}", machines::total_line(&TotalFootprint::of(machines)));
    text
}

fn lines(summary: &MachineSummary, text: &mut String) {
    let machine = &summary.machine;
    let process = machine.process_id.map_or_else(|| "-".to_owned(), |number| number.to_string());
    let disk = format!("{} of {}", size::text(machine.disk_used_bytes), size::text(machine.disk_bytes));
    let server = match (summary.of_cluster, summary.postgresql) {
        (true, _) => "cluster",
        (false, true) => "own",
        (false, false) => "-",
    };
    let forwards = summary.forwards.iter().map(ToString::to_string);
    let on_bridge = machine.network.iter().map(|network| {
        let address = network.network.address.map_or_else(|| "?".to_owned(), |address| address.to_string());
        format!("{address} on {}", network.network.bridge)
    });
    let ports = forwards.chain(on_bridge).collect::<Vec<_>>().join(" ");
    let _ = writeln!(
        text,
        "{:<16} {:<9} {process:>8} {:>4} {:>7} {disk:>15} {server:<8} {ports}",
        summary.name.as_str(),
        machine.state,
        machine.processors,
        size::text(machine.memory_bytes),
    );
    if machine.process_id.is_some() {
        let _ = writeln!(text, "  {}", machines::footprint_line(machine));
    }
    if let Some(protection) = &machine.protection {
        let _ = writeln!(text, "  {}", protect::line(protection));
    }
    if machine.in_doubt {
        let _ = writeln!(text, "  it is not known here on which host it goes on");
    }
    if let Some(failure) = machine.network.as_ref().and_then(|network| network.failure.as_ref()) {
        let _ = writeln!(text, "  its guest has not got its addresses: {}", failure.trim());
    }
    if let Some(seconds) = machine.unresponsive_s {
        let _ = writeln!(text, "  its guest has not answered for {seconds} s");
    }
    if let Some(end) = summary.end.as_ref().filter(|end| !end.clean && machine.process_id.is_none()) {
        let _ = writeln!(text, "  {}", end.reason.trim());
    }
}
