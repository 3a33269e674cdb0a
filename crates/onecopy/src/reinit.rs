//! `onecopy reinit`: one follower of a running cluster, made anew.

use clap::Args;
use onecopy_host::ReinitRequest;

use crate::cloning::CloningOptions;
use crate::directory::DirectoryOption;
use crate::progress::Display;
use crate::scale;

/// Throw a follower away and make it anew under its name
///
/// Returns when it answers queries. Ctrl-C ends the waiting only: the change goes on.
#[derive(Debug, Args)]
pub struct Reinit {
    /// The follower, as `onecopy status` names it
    follower: String,
    #[command(flatten)]
    directory: DirectoryOption,
    #[command(flatten)]
    cloning: CloningOptions,
    /// Return when all its data is there
    #[arg(long)]
    wait: bool,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

impl Reinit {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let directory = self.directory.resolve()?;
        let (follower, clone) = (self.follower.clone(), self.cloning.of_cluster());
        let request = ReinitRequest { follower, clone, wait: self.wait };
        crate::block_on(async {
            let display = Display::choose(self.json);
            let outcome = onecopy_host::reinit(&directory, &request, &display).await;
            display.finish();
            scale::tell(&display, outcome?);
            Ok(())
        })
    }
}
