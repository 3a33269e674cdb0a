//! `onecopy dsn`: a connection string that works from this machine.

use clap::Args;

use crate::directory::DirectoryOption;
use crate::output;

/// Print a connection string that works from this machine, with its password
#[derive(Debug, Args)]
pub struct Dsn {
    #[command(flatten)]
    directory: DirectoryOption,
}

impl Dsn {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        output::say(onecopy_host::ClientAccess::of(&self.directory.resolve()?)?.url());
        Ok(())
    }
}
