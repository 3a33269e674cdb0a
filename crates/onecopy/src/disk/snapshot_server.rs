//! `onecopy snapshot-server`: one snapshot of a disk over NBD, for the host to which its machine moves. It reads the
//! disk's files beside whoever has the disk, and needs nobody who has it. Or the disk as it is, where nobody has it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr,
};
use onecopy_disk::nbd::{Address, Server, ServerOptions, SourceExports};
use onecopy_disk::{At, Disk, OpenOptions, Source, View};

use crate::signals::{HangUp, StopSignal};

/// Connections at once: those of one copy, also while it makes new ones for those that were lost.
const CONNECTIONS_MAX: usize = 16;

/// How often it is looked whether who has started it lives.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// How long requests that are under way have to finish.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Let one snapshot of a disk be read over NBD, or a disk that nobody has, and nothing else
#[derive(Debug, Args)]
pub struct SnapshotServer {
    /// The disk's directory
    directory: PathBuf,
    /// The snapshot; without it: the disk as it is, which nobody else may have meanwhile
    snapshot: Option<String>,
    /// Where clients come in
    #[arg(long, value_name = "ADDRESS")]
    nbd: Address,
    /// Read nothing outside of this directory, whatever the disk names as its base: another host has made it
    #[arg(long, value_name = "DIRECTORY", requires = "snapshot")]
    only_beneath: Option<PathBuf>,
}

impl SnapshotServer {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("info");
        // First: whoever has started it may die at any time.
        let parent = rustix::process::getppid();
        if let Some(directory) = &self.only_beneath {
            self.confine(directory).context("the disk of another host is read confined by Landlock (Linux 6.7)")?;
        }
        let (view, _disk) = match &self.snapshot {
            Some(snapshot) if self.only_beneath.is_some() => (View::open_of_files(&self.directory, snapshot)?, None),
            Some(snapshot) => (View::open(&self.directory, snapshot)?, None),
            None => {
                // Nobody waits for the rest of a base that is copied.
                let options = OpenOptions { hydration_limit: Some(0), ..OpenOptions::default() };
                let disk = Disk::open(&self.directory, options)?;
                (disk.view(&At::Current)?, Some(disk))
            }
        };
        let view: Arc<dyn Source> = Arc::new(view);
        let exports = Arc::new(SourceExports::new([(String::new(), view)]));
        let addresses = vec![self.nbd.clone()];
        let options = ServerOptions { addresses, tls: None, connections_max: CONNECTIONS_MAX };
        let server = Server::start(&options, exports)?;
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

    /// From here on this process reads files beneath the directory alone, where it may lock a snapshot; it listens on
    /// its Unix socket, and uses no TCP. The kernel sees to that, whatever a link or a header names. Source:
    /// landlock(7).
    fn confine(&self, directory: &Path) -> anyhow::Result<()> {
        let abi = ABI::V4;
        let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
        let ruleset = ruleset.handle_access(AccessFs::from_all(abi))?.handle_access(AccessNet::from_all(abi))?;
        let locks = AccessFs::WriteFile | AccessFs::MakeReg;
        let storage = PathBeneath::new(PathFd::new(directory)?, AccessFs::ReadFile | AccessFs::ReadDir | locks);
        let mut ruleset = ruleset.create()?.add_rule(storage)?;
        if let Address::Unix(socket) = &self.nbd {
            let place = socket.parent().context("its socket lies in no directory")?;
            let makes = AccessFs::MakeSock | AccessFs::RemoveFile;
            ruleset = ruleset.add_rule(PathBeneath::new(PathFd::new(place)?, makes))?;
        }
        ruleset.restrict_self()?;
        Ok(())
    }
}
