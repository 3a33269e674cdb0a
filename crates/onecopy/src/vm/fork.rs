//! `onecopy vm fork`: a machine that goes on from where another one is.

use clap::Args;
use onecopy_host::machines::Fork as NewFork;
use onecopy_machine::InterfaceAddress;

use super::MachineOption;
use crate::output;
use crate::progress::Display;

/// Make a running machine of another one, as that is now, with all that it has in memory; the other one runs on
///
/// Its disk lies over a snapshot of the other one's, and takes only what is written. In memory it shares with other
/// forks of the same checkpoint what none of them has changed.
#[derive(Debug, Args)]
pub struct Fork {
    #[command(flatten)]
    machine: MachineOption,
    /// The new machine's name
    #[arg(value_name = "NEW")]
    fork: String,
    /// Begin as the machine was at this checkpoint of it [default: a new one, or the last one of a machine at rest]
    #[arg(long, value_name = "NUMBER")]
    checkpoint: Option<u64>,
    /// Give it memory of its own, so that checkpoints and forks can be made of it, too, before its next start
    #[arg(long)]
    independent: bool,
    /// Its address on the bridge that its parent is on; it is unplugged until its guest has taken it
    #[arg(long, value_name = "ADDRESS/BITS")]
    address: Option<InterfaceAddress>,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

impl Fork {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let (parent, machines) = (self.machine.name()?, self.machine.machines()?);
        let (checkpoint, shares, address) = (self.checkpoint, !self.independent, self.address);
        let fork = NewFork { name: self.fork.parse()?, checkpoint, shares, address };
        let display = Display::choose(self.json);
        let forked = crate::block_on(async { Ok(machines.fork(&parent, &fork, &display).await) })?;
        display.finish();
        let number = forked?;
        if matches!(display, Display::Json) {
            return Ok(());
        }
        output::say(format_args!("The machine {} goes on from checkpoint {number} of {parent}.", fork.name));
        super::start::tell(&machines, &fork.name)
    }
}
