//! `onecopy router`: the router alone, over servers that exist already.

use std::path::PathBuf;

use clap::Args;

/// Run the router alone, over a leader and standbys that exist already
#[derive(Debug, Args)]
pub struct Router {
    /// The file that names the servers
    #[arg(long, value_name = "FILE", default_value = crate::config::FILE_DEFAULT)]
    config: PathBuf,
}

impl Router {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let _configuration = crate::config::read(&self.config)?;
        todo!()
    }
}
