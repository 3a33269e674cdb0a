//! The options that say which daemon is meant: a cluster's, or an agent for memory alone.

use std::path::PathBuf;

use clap::Args;
use onecopy_host::Daemon;

use crate::directory::DirectoryOption;

/// Which daemon is meant.
#[derive(Debug, Args)]
pub struct DaemonOption {
    #[command(flatten)]
    directory: DirectoryOption,
    /// The socket of `onecopy memory agent` [default: that of this user's agent, where there is no cluster]
    #[arg(long, value_name = "PATH", conflicts_with = "dir")]
    socket: Option<PathBuf>,
}

impl DaemonOption {
    /// The daemon, which may not run.
    pub fn resolve(&self) -> anyhow::Result<Daemon> {
        if let Some(socket) = &self.socket {
            return Ok(Daemon::OfMemory(socket.clone()));
        }
        let directory = self.directory.resolve()?;
        let agent = socket_default();
        let is_unnamed = !self.directory.is_named();
        match is_unnamed && directory.state().is_err() && agent.exists() {
            true => Ok(Daemon::OfMemory(agent)),
            false => Ok(Daemon::OfCluster(directory)),
        }
    }
}

/// Where this user's agent for memory listens when nobody says where.
pub fn socket_default() -> PathBuf {
    let own = || std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()).map(PathBuf::from);
    let run = match rustix::process::geteuid().is_root() {
        true => PathBuf::from("/run"),
        false => own().unwrap_or_else(std::env::temp_dir),
    };
    run.join("onecopy").join("memory.sock")
}
