//! `onecopy vm list`: the machines of a directory.

use clap::Args;
use onecopy_host::TotalFootprint;
use onecopy_host::machines::{MachineSummary, Machines};
use onecopy_memory::size;

use super::protect;
use crate::directory::DirectoryOption;
use crate::{machines, output};

/// Show the machines, those of the cluster among them
#[derive(Debug, Args)]
pub struct List {
    #[command(flatten)]
    directory: DirectoryOption,
    /// Everything, as one JSON document
    #[arg(long)]
    json: bool,
}

impl List {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let machines = Machines::of(self.directory.resolve()?)?;
        let list = crate::block_on(async { Ok(machines.list().await?) })?;
        if self.json {
            output::say(serde_json::to_string(&list)?);
            return Ok(());
        }
        if list.is_empty() {
            output::say("There are no machines; make one with: onecopy vm create NAME");
            return Ok(());
        }
        output::say(format_args!(
            "{:<16} {:<9} {:>8} {:>4} {:>7} {:>15} {:<8} {}",
            "machine", "state", "process", "cpus", "memory", "disk", "server", "ports, or address"
        ));
        list.iter().for_each(show);
        let machines = list.iter().map(|summary| (&summary.machine.footprint, &summary.machine.disks[..]));
        output::say(machines::total_line(&TotalFootprint::of(machines)));
        Ok(())
    }
}

fn show(summary: &MachineSummary) {
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
    output::say(format_args!(
        "{:<16} {:<9} {process:>8} {:>4} {:>7} {disk:>15} {server:<8} {ports}",
        summary.name.as_str(),
        machine.state,
        machine.processors,
        size::text(machine.memory_bytes),
    ));
    if machine.process_id.is_some() {
        output::say(format_args!("  {}", machines::footprint_line(machine)));
    }
    if let Some(protection) = &machine.protection {
        output::say(format_args!("  {}", protect::line(protection)));
    }
    if let Some(failure) = machine.network.as_ref().and_then(|network| network.failure.as_ref()) {
        output::say(format_args!("  its guest has not got its addresses: {}", failure.trim()));
    }
    if let Some(seconds) = machine.unresponsive_s {
        output::say(format_args!("  its guest has not answered for {seconds} s"));
    }
    if let Some(end) = summary.end.as_ref().filter(|end| !end.clean && machine.process_id.is_none()) {
        output::say(format_args!("  {}", end.reason.trim()));
    }
}
