//! How the program ends: its exit codes, and the last thing that it says.

use std::process::ExitCode;

use onecopy_disk::DiskError;
use onecopy_disk_server::DiskServerError;
use onecopy_host::HostError;
use onecopy_machine::MachineError;

use crate::output;

/// The exit codes, for `--help`.
pub const HELP: &str = "Exit codes: 0 done, 1 failed, 2 the command line is wrong, 3 no cluster or no daemon there, \
4 a configuration file is wrong, 5 another onecopy serves the directory or socket, 130 interrupted.";

/// The child of `up --detach` has failed and said so in its last event.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct DetachedFailed {
    /// What it said.
    pub message: String,
    /// Its exit code.
    pub code: u8,
}

/// A configuration file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidConfiguration(pub String);

/// A program in a guest has failed, and has said so itself.
#[derive(Debug, thiserror::Error)]
#[error("the program ended with status {code}")]
pub struct GuestFailed {
    /// Its exit code.
    pub code: u8,
}

/// A signal ended the work before it was done.
#[derive(Debug, thiserror::Error)]
#[error("interrupted; everything that was started is stopped again")]
pub struct Interrupted;

/// The exit code for an error.
pub fn code(error: &anyhow::Error) -> ExitCode {
    ExitCode::from(number(error))
}

/// The same as a number.
pub fn number(error: &anyhow::Error) -> u8 {
    if let Some(detached) = error.downcast_ref::<DetachedFailed>() {
        return detached.code;
    }
    if let Some(failed) = error.downcast_ref::<GuestFailed>() {
        return failed.code;
    }
    if error.is::<Interrupted>() {
        return 130;
    }
    if error.is::<InvalidConfiguration>() {
        return 4;
    }
    if is_closed_output(error) {
        return 0;
    }
    match error.downcast_ref::<DiskServerError>() {
        Some(DiskServerError::NotServed { .. }) => return 3,
        Some(DiskServerError::Served { .. } | DiskServerError::Disk { source: DiskError::Leased { .. }, .. }) => {
            return 5;
        }
        _ => {}
    }
    match error.downcast_ref::<HostError>() {
        Some(HostError::NotACluster { .. } | HostError::NotRunning { .. } | HostError::NoMemoryAgent { .. }) => 3,
        Some(HostError::Machine(MachineError::NotThere { .. } | MachineError::DoesNotRun { .. })) => 3,
        Some(HostError::InvalidMemory(_)) => 4,
        Some(HostError::Locked { .. } | HostError::MemoryAgentRuns { .. }) => 5,
        _ => 1,
    }
}

/// Whether whoever read the output has seen enough of it, as `head` does: then nothing failed.
fn is_closed_output(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Says what failed.
pub fn tell(error: &anyhow::Error) {
    if is_closed_output(error) || error.is::<GuestFailed>() {
        return;
    }
    output::note(text(error));
}

/// What failed, with its causes, each once.
pub fn text(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}
