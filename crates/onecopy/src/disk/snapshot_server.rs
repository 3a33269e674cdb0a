//! `onecopy snapshot-server`: one snapshot of a disk over NBD, for the host to which its machine moves. It reads the
//! disk's files beside whoever has the disk, and needs nobody who has it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use onecopy_disk::nbd::{Address, Server, ServerOptions, SourceExports};
use onecopy_disk::{Source, View};

use crate::signals::{HangUp, StopSignal};

/// Connections at once: those of one copy, also while it makes new ones for those that were lost.
const CONNECTIONS_MAX: usize = 16;

/// How often it is looked whether who has started it lives.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// How long requests that are under way have to finish.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Let one snapshot of a disk be read over NBD, and nothing else
#[derive(Debug, Args)]
pub struct SnapshotServer {
    /// The disk's directory
    directory: PathBuf,
    /// The snapshot
    snapshot: String,
    /// Where clients come in
    #[arg(long, value_name = "ADDRESS")]
    nbd: Address,
}

impl SnapshotServer {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("info");
        let view: Arc<dyn Source> = Arc::new(View::open(&self.directory, &self.snapshot)?);
        let exports = Arc::new(SourceExports::new([(String::new(), view)]));
        let addresses = vec![self.nbd.clone()];
        let options = ServerOptions { addresses, tls: None, connections_max: CONNECTIONS_MAX };
        let server = Server::start(&options, exports)?;
        let parent = rustix::process::getppid();
        crate::block_on(async {
            let signal = StopSignal::listen(HangUp::Stops)?;
            tokio::select! {
                () = signal.received() => {}
                // Whoever has started it is dead, and starts another one.
                () = async {
                    while rustix::process::getppid() == parent {
                        tokio::time::sleep(LOOK_INTERVAL).await;
                    }
                } => {}
            }
            Ok(())
        })?;
        server.stop(DRAIN_TIMEOUT);
        Ok(())
    }
}
