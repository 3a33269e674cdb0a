//! What starts a process that serves a machine.

use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};

use onecopy_checkpoint::memory::Descriptors;
use onecopy_postgres::ServiceUser;

use super::memory_file::MemoryOpen;
use super::role::{MEMORY_SERVER_COMMAND, NETWORK_HOLDER_COMMAND, Role, disk_arguments};
use crate::MachineHome;

/// The kernel's way to the file that a process runs; see proc_pid_exe(5).
const OWN_PROGRAM: &str = "/proc/self/exe";

/// With what such a process is started.
#[derive(Debug)]
pub(super) enum Launch {
    /// The disk's runs as this account.
    Disk(ServiceUser),
    /// The memory's takes these over from this process, and runs as it.
    Memory(Descriptors),
    /// So does the network's.
    Network(NetworkDescriptors),
    /// A memory's which this process has open: it has not what a server needs, so one that dies now is the last one.
    OnceClosed(MemoryOpen),
}

/// What must outlive a network holder.
#[derive(Debug)]
pub(super) struct NetworkDescriptors {
    /// The tap interface.
    pub tap: OwnedFd,
    /// The memory file with what is held.
    pub state: OwnedFd,
}

impl Launch {
    pub(super) fn role(&self) -> Role {
        match self {
            Launch::Disk(_) => Role::Disk,
            Launch::Memory(_) => Role::Memory,
            Launch::Network(_) => Role::Network,
            Launch::OnceClosed(_) => Role::Memory,
        }
    }

    /// What starts one. An error: this process has not what it needs.
    pub(super) fn command(&self, home: &MachineHome) -> Result<Command, String> {
        Ok(match self {
            Launch::OnceClosed(_) => return Err("nobody has what its server needs".to_owned()),
            Launch::Disk(user) => {
                let mut command = user.command(OWN_PROGRAM);
                command.envs(std::env::vars_os().filter(|(name, _)| name == "RUST_LOG"));
                command.args(disk_arguments(home));
                command
            }
            Launch::Memory(Descriptors { device, state }) => {
                taking_over(MEMORY_SERVER_COMMAND, home, [("--device", device), ("--state", state)])
            }
            Launch::Network(NetworkDescriptors { tap, state }) => {
                taking_over(NETWORK_HOLDER_COMMAND, home, [("--tap", tap), ("--state", state)])
            }
        })
    }
}

/// A process that takes descriptors over from this one, by their numbers here.
fn taking_over(command: &str, home: &MachineHome, descriptors: [(&str, &OwnedFd); 2]) -> Command {
    let mut process = Command::new(OWN_PROGRAM);
    process.current_dir("/").stdin(Stdio::null()).arg(command).arg(home.root());
    for (name, descriptor) in descriptors {
        process.arg(name).arg(descriptor.as_raw_fd().to_string());
    }
    process
}
