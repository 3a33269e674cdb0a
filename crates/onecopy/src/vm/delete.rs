//! `onecopy vm delete`: nothing of a machine is left.

use clap::Args;

use super::MachineOption;

/// Remove a machine that does not run, with its disk
#[derive(Debug, Args)]
pub struct Delete {
    #[command(flatten)]
    machine: MachineOption,
}

impl Delete {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let (name, machines) = (self.machine.name()?, self.machine.machines()?);
        crate::block_on(async { Ok(machines.delete(&name).await?) })
    }
}
