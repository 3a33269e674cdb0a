//! `onecopy clone-keeper`: the process above a hydrator. Started by whoever wants a clone, with the listening socket as
//! its standard input, the lock as its standard output, the service's log as its standard error.

use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use onecopy_clone::keeper::{self, Ending, Hydrator, KeptFiles};
use onecopy_clone::service::{HYDRATOR_COMMAND, KEPT_LISTENER, KEPT_LOCK};

/// This program's own file, also when it was replaced meanwhile.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// Hold what a clone service has open, and start it again when it dies
#[derive(Debug, Args)]
pub struct CloneKeeper {
    /// The service's directory
    directory: PathBuf,
}

impl CloneKeeper {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("info");
        // Signals of a terminal, and its end, are not for a service.
        crate::detach::leave_session()?;
        let copy = |file: std::io::Result<_>| file.context("not started by a onecopy that wants a clone");
        let listener = copy(std::io::stdin().as_fd().try_clone_to_owned())?;
        let lock = copy(std::io::stdout().as_fd().try_clone_to_owned())?;
        let kept = KeptFiles::from([(KEPT_LISTENER.to_owned(), listener), (KEPT_LOCK.to_owned(), lock)]);
        let directory = self.directory.as_os_str().to_owned();
        let hydrator = Hydrator {
            program: OWN_PROGRAM.into(),
            arguments: vec![HYDRATOR_COMMAND.into(), directory.clone()],
            cleanup_arguments: vec![HYDRATOR_COMMAND.into(), "--clean-up".into(), directory],
        };
        match keeper::run(&hydrator, kept)? {
            Ending::Done => Ok(()),
            Ending::CleanedUp => anyhow::bail!("the hydrator died again and again; its clones are removed"),
            Ending::Left => anyhow::bail!("the hydrator died again and again; what it had begun could not be removed"),
        }
    }
}
