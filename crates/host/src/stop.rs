//! `onecopy down`: asks the daemon to end, or does its work when it is gone.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use onecopy_postgres::{Binaries, Role, ServiceUser, StopMode};
use rustix::process::{Pid, Signal, kill_process};

use crate::membership::Returned;
use crate::memory::ServersMemory;
use crate::provisioning::Provisioner;
use crate::secret::Secrets;
use crate::state::{ClusterState, ServerState};
use crate::{Directory, HostError, Progress};
use onecopy_directory::{DirectoryLock, LockState};

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
    directory.state()?;
    let mut waited = Duration::ZERO;
    let mut asked = None;
    // Held until the last server has stopped: no `up` may start one behind our back.
    let _lock = loop {
        match DirectoryLock::take(&directory.lock())? {
            LockState::Taken(lock) => break lock,
            LockState::HeldBy(process_id) => {
                // Where it is this process, an `up` that was broken off lets go of the server that it was starting.
                let is_other = process_id.is_some_and(|holder| holder != std::process::id());
                if is_other && asked != process_id {
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
    // Not before: the daemon may have changed it while it ended.
    let mut state = directory.state()?;
    let provisioner = Provisioner {
        directory: directory.clone(),
        binaries: Binaries::find(state.pg_bindir.as_deref())?,
        user: ServiceUser::resolve(None)?,
        secrets: Secrets::read_or_make(&directory.secrets())?,
        // Nothing is started here.
        memory: Arc::new(ServersMemory::none()),
        machines: state.machine.clone(),
    };
    stop_servers(&provisioner, &mut state, progress).await
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
    provisioner: &Provisioner,
    state: &mut ClusterState,
    progress: &dyn Progress,
) -> Result<(), HostError> {
    let mut outcome = discard_incomplete(provisioner, state, progress).await;
    for server_state in state.topology.servers().rev().filter(|server| provisioner.is_there(server)) {
        // One that cannot even be looked at leaves the others to be stopped.
        let stopped = stop_server(provisioner, server_state, progress).await;
        outcome = outcome.and(stopped);
    }
    for server in state.topology.servers() {
        provisioner.memory.remove_group(&server.name, &provisioner.data_directory(server), progress).await;
    }
    // Of followers that have left a moment ago.
    provisioner.memory.remove_groups_but(&BTreeSet::new(), progress).await;
    outcome
}

async fn stop_server(provisioner: &Provisioner, state: &ServerState, progress: &dyn Progress) -> Result<(), HostError> {
    // The role decides on settings only, and those count at a start.
    let server = provisioner.open(state, Role::Follower).await?;
    // A machine may be about to start, or have left the server of its disk: it is asked in any case.
    let is_machine = provisioner.machine_home(state).is_some();
    if server.process_id().is_some() || is_machine {
        if let Some(server) = Arc::clone(&server).into_process() {
            provisioner.memory.remember_group(&state.name, &server);
        }
        progress.step(format!("stopping {}", state.name));
    }
    // Also where none is found: its postmaster may have been begun a moment ago.
    // A fork that is not one of the cluster's servers yet cannot stop in peace, and is not wanted.
    let mode = if is_machine && !state.made { StopMode::Immediate } else { StopMode::Fast };
    server.stop(mode).await.map_err(HostError::server(&state.name))
}

/// Gives up clones that are not whole, and the process that fills them: they run only as long as it does, and nothing
/// is left running. One that has become whole since it was last written down is a follower like any other, and stays.
///
/// # Errors
/// [`HostError`] of the first one that does not go; the next `up` makes all of them again in any case.
pub(crate) async fn discard_incomplete(
    provisioner: &Provisioner,
    state: &mut ClusterState,
    progress: &dyn Progress,
) -> Result<(), HostError> {
    let leader = state.leader().clone();
    let filling: Vec<ServerState> = state.followers().iter().filter(|follower| follower.filling).cloned().collect();
    let mut incomplete = Vec::new();
    for follower in &filling {
        let is_whole = Returned::is_whole(provisioner, &leader, follower).await;
        let Some(server) = state.server_mut(&follower.name) else { continue };
        if is_whole {
            server.filling = false;
            continue;
        }
        progress
            .notice(format!("{} has not all its data and is given up; the next `up` makes it again", follower.name));
        server.mark_unmade();
        incomplete.push(follower);
    }
    if !filling.is_empty() {
        state.write(&provisioner.directory.state_file())?;
    }
    let mut outcome = Ok(());
    for follower in incomplete {
        outcome = outcome.and(provisioner.discard(&leader, follower).await);
    }
    match provisioner.is_there(&leader) {
        true => outcome.and(provisioner.end_clone_service(&leader).await),
        false => outcome,
    }
}
