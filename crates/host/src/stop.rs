//! `onecopy down`: asks the daemon to end, or does its work when it is gone.

use std::time::Duration;

use onecopy_postgres::{Binaries, Role, ServiceUser, StopMode};
use rustix::process::{Pid, Signal, kill_process};

use crate::lock::{DirectoryLock, LockState};
use crate::making::Workshop;
use crate::secret::Secrets;
use crate::state::ClusterState;
use crate::{Directory, HostError, Progress};

/// How long a daemon may take to stop all its servers.
const DAEMON_STOP_TIMEOUT: Duration = Duration::from_secs(180);

/// How often it is looked whether the daemon has ended.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Stops the cluster of `directory`: through its daemon, or server by server when the daemon was killed.
///
/// A cluster that is down already is down: that is no error.
///
/// # Errors
/// [`HostError::NotACluster`], [`HostError::DoesNotEnd`], [`HostError::Server`] of a server that does not stop.
pub async fn down(directory: &Directory, progress: &dyn Progress) -> Result<(), HostError> {
    let state = directory.state()?;
    let mut waited = Duration::ZERO;
    let mut asked = None;
    // Held until the last server has stopped: no `up` may start one behind our back.
    let _lock = loop {
        match DirectoryLock::take(&directory.lock())? {
            LockState::Taken(lock) => break lock,
            LockState::HeldBy(process_id) => {
                if process_id.is_some() && asked != process_id {
                    ask_to_end(directory, process_id, progress)?;
                    asked = process_id;
                }
                if waited >= DAEMON_STOP_TIMEOUT {
                    let seconds = waited.as_secs();
                    return Err(HostError::DoesNotEnd { directory: directory.root().to_owned(), process_id, seconds });
                }
                tokio::time::sleep(LOOK_INTERVAL).await;
                waited += LOOK_INTERVAL;
            }
        }
    };
    let workshop = Workshop {
        directory: directory.clone(),
        binaries: Binaries::find(state.pg_bindir.as_deref())?,
        user: ServiceUser::resolve(None)?,
        secrets: Secrets::read_or_make(&directory.secrets())?,
    };
    stop_servers(&workshop, &state, progress).await
}

/// Sends SIGTERM to the daemon that holds the lock, so the number is its own.
fn ask_to_end(directory: &Directory, process_id: Option<u32>, progress: &dyn Progress) -> Result<(), HostError> {
    let Some(pid) = process_id.and_then(|number| Pid::from_raw(number.cast_signed())) else { return Ok(()) };
    progress.step(format!("asking the daemon (process {}) to stop", pid.as_raw_nonzero()));
    match kill_process(pid, Signal::TERM) {
        // It has ended since it was looked at: the lock is free now.
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(HostError::file("stop the daemon of", directory.root())(error.into())),
    }
}

/// Stops what runs of a cluster that no supervisor watches, followers first.
///
/// # Errors
/// [`HostError::Server`] of the first server that does not stop; the others are stopped all the same.
pub(crate) async fn stop_servers(
    workshop: &Workshop,
    state: &ClusterState,
    progress: &dyn Progress,
) -> Result<(), HostError> {
    let mut outcome = Ok(());
    for server_state in state.servers.iter().rev().filter(|server| workshop.is_there(server)) {
        // The role decides on settings only, and those count at a start.
        let server = workshop.open(server_state, Role::Follower).await?;
        if !server.is_running() {
            continue;
        }
        progress.step(format!("stopping {}", server_state.name));
        let stopped = server.stop(StopMode::Fast).await.map_err(HostError::server(&server_state.name));
        outcome = outcome.and(stopped);
    }
    outcome
}
