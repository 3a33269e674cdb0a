//! What holds a machine's process in on its host.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What a machine's process may do. By default it is sandboxed, and has the account of who starts it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Security {
    /// QEMU's filter of system calls: no new processes, no other rights, no other priorities, nothing obsolete.
    pub sandboxed: bool,
    /// The account that QEMU runs as from its first instruction on; only root can choose one.
    pub account: Option<Account>,
    /// Directories of control groups that QEMU is put into before it begins: one, or one a hierarchy of version 1.
    pub control_groups: Vec<PathBuf>,
    /// What of the guest's memory stays in the host's memory.
    pub memory_lock: MemoryLock,
}

/// What of a process's memory the host does not take away (mlockall(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryLock {
    /// Nothing is locked.
    Off,
    /// Each page from its first use on (QEMU 10.0 and newer).
    OnFault,
    /// All of it, from the start.
    On,
}

impl Default for Security {
    fn default() -> Security {
        Security { sandboxed: true, account: None, control_groups: Vec::new(), memory_lock: MemoryLock::Off }
    }
}

/// An account of the host, by its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// User id.
    pub user_id: u32,
    /// Group id; the process is in no other group.
    pub group_id: u32,
}
