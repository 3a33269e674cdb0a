//! What can fail around a virtual machine, on what, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An operation on a virtual machine that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum HypervisorError {
    #[error("no QEMU found ({looked_at}); run: make setup, or name the program in ONECOPY_QEMU")]
    NoQemu { looked_at: String },
    #[error("{program} is QEMU {found}, needed is {needed} or newer; run: make setup")]
    OldQemu { program: PathBuf, found: String, needed: String },
    #[error("machine {name:?}: {reason}")]
    Configuration { name: String, reason: String },
    #[error("cannot {action} {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot run {program}: {source}")]
    Spawn { program: PathBuf, source: io::Error },
    #[error("a machine runs in {directory} already (process {process_id}); adopt or stop it")]
    Running { directory: PathBuf, process_id: u32 },
    #[error("machine {name:?} {ending}")]
    Ended { name: String, ending: String },
    #[error("machine {name:?} is not {wanted} after {waited:?}, it is {state}")]
    NotReached { name: String, wanted: &'static str, state: String, waited: Duration },
    #[error("no monitor answers at {socket} ({reason}); it serves one connection at a time")]
    NoMonitor { socket: PathBuf, reason: String },
    #[error("the connection to the monitor {socket} is lost: {reason}")]
    MonitorLost { socket: PathBuf, reason: String },
    #[error("QEMU refuses {command}: {description}")]
    Refused { command: String, class: String, description: String },
    #[error("QEMU has not answered {command} within {waited:?}")]
    NoAnswer { command: String, waited: Duration },
    #[error("QEMU's answer to {command} is not understood: {reason}")]
    UnknownAnswer { command: String, reason: String },
    #[error("no agent answers in the guest ({socket}): {reason}")]
    NoAgent { socket: PathBuf, reason: String },
    #[error(
        "the guest's agent does not understand this version: {reason}; \
         build the guest's image anew: guest/build-image.sh"
    )]
    AgentVersion { reason: String },
    #[error("the guest's agent was lost before it answered {command}: {reason}")]
    AgentLost { command: String, reason: String },
    #[error("the guest's agent has not answered {command} within {waited:?}")]
    AgentUnresponsive { command: String, waited: Duration },
    #[error("in the guest {command} failed: {failure}")]
    Agent { command: String, failure: onecopy_guest_agent::protocol::Failure },
}

impl HypervisorError {
    /// For `map_err`: what was tried on which path.
    pub(crate) fn file(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> HypervisorError {
        let path = path.as_ref().to_owned();
        move |source| HypervisorError::File { action, path, source }
    }
}
