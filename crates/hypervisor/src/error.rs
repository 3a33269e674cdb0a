//! What can fail around a virtual machine, on what, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An operation on a virtual machine that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HypervisorError {
    /// There is no QEMU.
    #[error("no QEMU found ({looked_at}); run: make setup, or name the program in ONECOPY_QEMU")]
    NoQemu {
        /// What was tried and what was wrong with it.
        looked_at: String,
    },
    /// QEMU is too old.
    #[error("{program} is QEMU {found}, needed is {needed} or newer; run: make setup")]
    OldQemu {
        /// The program.
        program: PathBuf,
        /// Its version.
        found: String,
        /// The oldest that will do.
        needed: String,
    },
    /// The configuration asks for what cannot be.
    #[error("machine {name:?}: {reason}")]
    Configuration {
        /// The machine.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file or directory operation failed.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// What was tried, as a verb.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A program could not be started.
    #[error("cannot run {program}: {source}")]
    Spawn {
        /// The program.
        program: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A machine runs in this directory.
    #[error("a machine runs in {directory} already (process {process_id}); adopt or stop it")]
    Running {
        /// The machine's directory.
        directory: PathBuf,
        /// QEMU's process.
        process_id: u32,
    },
    /// The machine has ended, or did so while something was asked of it.
    #[error("machine {name:?} {ending}")]
    Ended {
        /// The machine.
        name: String,
        /// How, with what QEMU and the guest have said last.
        ending: String,
    },
    /// The machine did not get where it should in time.
    #[error("machine {name:?} is not {wanted} after {waited:?}, it is {state}")]
    NotReached {
        /// The machine.
        name: String,
        /// What was waited for.
        wanted: &'static str,
        /// The state that it is in.
        state: String,
        /// How long was waited.
        waited: Duration,
    },
    /// Nobody answers at a monitor's socket.
    #[error("no monitor answers at {socket} ({reason}); it serves one connection at a time")]
    NoMonitor {
        /// The socket.
        socket: PathBuf,
        /// What happened instead.
        reason: String,
    },
    /// The connection to the monitor is gone; the machine may run on.
    #[error("the connection to the monitor {socket} is lost: {reason}")]
    MonitorLost {
        /// The socket.
        socket: PathBuf,
        /// Why.
        reason: String,
    },
    /// QEMU has refused a command.
    #[error("QEMU refuses {command}: {description}")]
    Refused {
        /// The command's name.
        command: String,
        /// QEMU's class of errors, `GenericError` mostly.
        class: String,
        /// QEMU's words.
        description: String,
    },
    /// QEMU did not answer in time. The command may still be done.
    #[error("QEMU has not answered {command} within {waited:?}")]
    NoAnswer {
        /// The command's name.
        command: String,
        /// How long was waited.
        waited: Duration,
    },
    /// QEMU's answer is not what its documentation says.
    #[error("QEMU's answer to {command} is not understood: {reason}")]
    UnknownAnswer {
        /// The command's name.
        command: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The guest's agent is not there.
    #[error("no agent answers in the guest ({socket}): {reason}")]
    NoAgent {
        /// The agent's socket.
        socket: PathBuf,
        /// What happened instead.
        reason: String,
    },
    /// The guest's agent speaks no version that we understand.
    #[error(
        "the guest's agent does not understand this version: {reason}; \
         build the guest's image anew: guest/build-image.sh"
    )]
    AgentVersion {
        /// What it said.
        reason: String,
    },
    /// The guest's agent was lost, or restarted, before it answered. What was asked for may have been done.
    #[error("the guest's agent was lost before it answered {command}: {reason}")]
    AgentLost {
        /// What was asked for.
        command: String,
        /// Why.
        reason: String,
    },
    /// The guest's agent did not answer in time. What was asked for may still be done.
    #[error("the guest's agent has not answered {command} within {waited:?}")]
    AgentUnresponsive {
        /// What was asked for.
        command: String,
        /// How long was waited.
        waited: Duration,
    },
    /// The guest's agent could not do it.
    #[error("in the guest {command} failed: {failure}")]
    Agent {
        /// What was asked for.
        command: String,
        /// What the agent said.
        failure: onecopy_guest_agent::protocol::Failure,
    },
}

impl HypervisorError {
    /// For `map_err`: what was tried on which path.
    pub(crate) fn file(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> HypervisorError {
        let path = path.as_ref().to_owned();
        move |source| HypervisorError::File { action, path, source }
    }
}
