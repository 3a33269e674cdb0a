//! `onecopy down`: stops the router, the followers and the leader.

use clap::Args;

use crate::directory::DirectoryOption;
use crate::progress::Display;

/// Stop the cluster cleanly, also when its daemon was killed
#[derive(Debug, Args)]
pub struct Down {
    #[command(flatten)]
    directory: DirectoryOption,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

impl Down {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let directory = self.directory.resolve()?;
        crate::block_on(async {
            // Ctrl-C ends the waiting only: the daemon goes on stopping.
            let display = Display::choose(self.json);
            let outcome = onecopy_host::down(&directory, &display).await;
            display.finish();
            Ok(outcome?)
        })
    }
}
