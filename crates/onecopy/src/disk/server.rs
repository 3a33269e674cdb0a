//! `onecopy disk-server`: the process that serves a machine's disk, below the machine's keeper.

use clap::Args;

use super::serve::Serving;

/// Serve the disk of a machine
#[derive(Debug, Args)]
pub struct DiskServer {
    #[command(flatten)]
    serving: Serving,
}

impl DiskServer {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("info");
        self.serving.run(|served| tracing::info!(transports = served.transports.len(), "the disk is served"))
    }
}
