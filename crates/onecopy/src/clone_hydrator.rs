//! `onecopy clone-hydrator`: the process in which clones are made and filled. Started by `onecopy clone-keeper` only,
//! with the channel to it as its standard input.

use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use onecopy_clone::hydrator;
use onecopy_clone::keeper::Channel;

/// Make and fill clones
#[derive(Debug, Args)]
pub struct CloneHydrator {
    /// The service's directory
    directory: PathBuf,
    /// Only remove what cannot become whole
    #[arg(long, alias = "bury")]
    clean_up: bool,
}

impl CloneHydrator {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        crate::logging::start("info");
        let input = std::io::stdin().as_fd().try_clone_to_owned();
        let channel = input.and_then(Channel::over).context("not started by a onecopy clone-keeper")?;
        if self.clean_up {
            Ok(hydrator::clean_up(self.directory, channel)?)
        } else {
            Ok(hydrator::run(self.directory, channel)?)
        }
    }
}
