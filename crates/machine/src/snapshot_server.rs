//! The process that lets one snapshot of a disk be read over NBD, for the host to which its machine goes, or a disk
//! that nobody has. It has the account of the machines.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use onecopy_postgres::ServiceUser;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

use crate::{MachineError, MachineHome};

/// The subcommand of this program that serves a snapshot.
const COMMAND: &str = "snapshot-server";

/// The kernel's way to the file that a process runs; see proc_pid_exe(5).
const OWN_PROGRAM: &str = "/proc/self/exe";

/// How long it may take to listen: it reads the disk's map first.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(20);

/// The same of a disk that nobody has: it is recovered where nobody has closed it.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// How often it is tried.
const CONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// A snapshot that is to be served.
#[derive(Debug, Clone, Copy)]
pub struct ServedSnapshot<'a> {
    /// The disk's directory.
    pub disk: &'a Path,
    /// The snapshot; none: the disk as it is, which nobody else has meanwhile.
    pub name: Option<&'a str>,
    /// Nothing outside of this directory is read, whatever is written in the disk; none: the disk is believed.
    pub only_beneath: Option<&'a Path>,
}

/// Such a process; killed when dropped, and it ends with the process that has started it.
#[derive(Debug)]
pub struct SnapshotServer {
    child: Child,
    socket: PathBuf,
    account: u32,
    listen_timeout: Duration,
}

impl SnapshotServer {
    /// Starts it, listening on a socket in the machine's directory for that.
    ///
    /// # Errors
    /// [`MachineError::Directory`], [`MachineError::File`]: it cannot be started.
    pub fn start(
        home: &MachineHome,
        user: &ServiceUser,
        socket: PathBuf,
        snapshot: ServedSnapshot<'_>,
    ) -> Result<SnapshotServer, MachineError> {
        home.make_run(user)?;
        let mut nbd = OsString::from("unix:");
        nbd.push(&socket);
        let mut command = user.command(OWN_PROGRAM);
        command.arg(COMMAND).arg("--nbd").arg(nbd);
        if let Some(directory) = snapshot.only_beneath {
            command.arg("--only-beneath").arg(directory);
        }
        // Names of another host are no options.
        command.arg("--").arg(snapshot.disk).args(snapshot.name);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = Command::from(command).kill_on_drop(true).spawn();
        let child = child.map_err(MachineError::file("serve a snapshot of", snapshot.disk))?;
        let listen_timeout = if snapshot.name.is_some() { LISTEN_TIMEOUT } else { RECOVERY_TIMEOUT };
        Ok(SnapshotServer { child, socket, account: user.user_id(), listen_timeout })
    }

    /// Whether it has not ended.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|ended| ended.is_none())
    }

    /// A connection to it; waits until it listens.
    ///
    /// # Errors
    /// In words: it has ended, does not listen in time, or somebody else does in its place.
    pub async fn connect(&mut self) -> Result<UnixStream, String> {
        let begun = Instant::now();
        loop {
            match UnixStream::connect(&self.socket).await {
                Ok(connected) => {
                    // The account may have put anything there: no byte goes to another one's process.
                    let peer = connected.peer_cred().map_err(|error| error.to_string())?.uid();
                    return match peer == self.account {
                        true => Ok(connected),
                        false => Err(format!("its snapshot is served by account {peer} instead of {}", self.account)),
                    };
                }
                Err(error) if begun.elapsed() >= self.listen_timeout => return Err(format!("its snapshot: {error}")),
                Err(_) => {}
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("its snapshot is not served: {status}"));
            }
            tokio::time::sleep(CONNECT_INTERVAL).await;
        }
    }
}
