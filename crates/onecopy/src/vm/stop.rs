//! `onecopy vm stop`: a machine ends.

use clap::Args;

use super::MachineOption;

/// Stop a machine cleanly: its server first, then the guest by itself; one that does not run is stopped already
#[derive(Debug, Args)]
pub struct Stop {
    #[command(flatten)]
    machine: MachineOption,
    /// At once, as a power cut would
    #[arg(long)]
    force: bool,
}

impl Stop {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let (name, machines) = (self.machine.name()?, self.machine.machines()?);
        crate::block_on(async { Ok(machines.stop(&name, self.force).await?) })
    }
}
