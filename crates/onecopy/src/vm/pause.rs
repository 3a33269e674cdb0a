//! `onecopy vm pause` and `onecopy vm resume`: a machine's processors stand, and run again.

use clap::Args;

use super::MachineOption;

/// Make a machine's processors stand; it keeps its memory, and stands also when its keeper is another one
#[derive(Debug, Args)]
pub struct Pause {
    #[command(flatten)]
    machine: MachineOption,
}

/// Let a paused machine run again
#[derive(Debug, Args)]
pub struct Resume {
    #[command(flatten)]
    machine: MachineOption,
}

impl Pause {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        set_paused(&self.machine, true)
    }
}

impl Resume {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        set_paused(&self.machine, false)
    }
}

fn set_paused(machine: &MachineOption, is_wanted: bool) -> anyhow::Result<()> {
    let (name, machines) = (machine.name()?, machine.machines()?);
    crate::block_on(async { Ok(machines.set_paused(&name, is_wanted).await?) })
}
