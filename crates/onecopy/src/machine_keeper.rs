//! `onecopy machine-keeper`: the process that looks after one machine. Started by whoever wants the machine to run,
//! with the machine's `keeper.log` as its standard error.

use std::path::PathBuf;

use clap::Args;
use onecopy_machine::keeper;

/// Look after a machine until it has ended
#[derive(Debug, Args)]
pub struct MachineKeeper {
    /// Look after it only where it runs: where it has ended meanwhile it is not begun
    #[arg(long)]
    take_over: bool,
    /// The machine's directory
    directory: PathBuf,
}

impl MachineKeeper {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("info");
        // Signals of a terminal, and its end, are not for who looks after a machine.
        crate::detach::leave_session()?;
        crate::block_on(async { Ok(keeper::run(&self.directory, self.take_over).await?) })
    }
}
