//! `onecopy disk stop`: the end of a disk's server.

use std::path::PathBuf;

use clap::Args;
use onecopy_disk_server::DiskClient;

/// Close a served disk and end its server
#[derive(Debug, Args)]
pub struct Stop {
    /// The disk's directory
    directory: PathBuf,
}

impl Stop {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        Ok(DiskClient::connect(&self.directory)?.stop()?)
    }
}
