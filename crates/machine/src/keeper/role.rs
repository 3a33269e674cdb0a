//! What a machine's processes serve: their subcommands, sockets, logs, and what finds them.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use onecopy_disk::vhost_user::QUEUES_MAX;
use rustix::process::geteuid;

use crate::MachineHome;

/// The subcommand of this program that serves memory.
pub const MEMORY_SERVER_COMMAND: &str = "memory-server";

/// The subcommand of this program that passes a machine's frames.
pub const NETWORK_HOLDER_COMMAND: &str = "network-holder";

/// The subcommand of this program that serves a disk.
pub(super) const DISK_SERVER_COMMAND: &str = "disk-server";

/// What a process serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The machine's disk.
    Disk,
    /// Its memory.
    Memory,
    /// Its network.
    Network,
}

impl Role {
    /// All of them.
    pub(crate) const ALL: [Role; 3] = [Role::Disk, Role::Memory, Role::Network];
}

impl std::fmt::Display for Role {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Role::Disk => "disk server",
            Role::Memory => "memory server",
            Role::Network => "network holder",
        })
    }
}

impl Role {
    /// The socket whose being there tells that it serves: the machine connects to that of the disk.
    pub(super) fn socket(self, home: &MachineHome) -> PathBuf {
        match self {
            Role::Disk => home.in_run("vhost.sock"),
            Role::Memory => home.memory_socket(),
            Role::Network => home.network_socket(),
        }
    }

    pub(super) fn log(self, home: &MachineHome) -> PathBuf {
        match self {
            Role::Disk => home.disk_log(),
            Role::Memory => home.memory_log(),
            Role::Network => home.network_log(),
        }
    }

    pub(super) fn process_file(self, home: &MachineHome) -> PathBuf {
        match self {
            Role::Disk => home.disk_process_file(),
            Role::Memory => home.memory_process_file(),
            Role::Network => home.network_process_file(),
        }
    }

    /// By what its process is found: its subcommand, and what it serves.
    pub(super) fn words(self, home: &MachineHome) -> (&'static str, PathBuf) {
        match self {
            Role::Disk => (DISK_SERVER_COMMAND, home.disk()),
            Role::Memory => (MEMORY_SERVER_COMMAND, home.root().to_owned()),
            Role::Network => (NETWORK_HOLDER_COMMAND, home.root().to_owned()),
        }
    }

    /// The user that it runs as: the disk's files are its server's, the others are of their keeper's account.
    pub(super) fn account(self, home: &MachineHome) -> Option<u32> {
        match self {
            Role::Disk => fs::symlink_metadata(home.disk()).ok().map(|found| found.uid()),
            Role::Memory | Role::Network => Some(geteuid().as_raw()),
        }
    }
}

/// Where the disk is reached over NBD.
pub(super) fn nbd_socket(home: &MachineHome) -> PathBuf {
    home.in_run("nbd.sock")
}

/// What a disk server is told. It offers both transports, and as many queues as a back end can have: QEMU takes those
/// that it was started with, and goes on with them when the server is another one and `machine.toml` says something
/// else by then.
pub(super) fn disk_arguments(home: &MachineHome) -> Vec<OsString> {
    let mut nbd = OsString::from("unix:");
    nbd.push(nbd_socket(home));
    let (socket, queues) = (Role::Disk.socket(home), QUEUES_MAX.to_string());
    let options = ["--vhost".into(), socket.into(), "--queues".into(), queues.into(), "--nbd".into(), nbd];
    [DISK_SERVER_COMMAND.into(), home.disk().into()].into_iter().chain(options).collect()
}
