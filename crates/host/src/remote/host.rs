//! What every connection of another host needs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use onecopy_clone::network::keys::HostKeys;
use onecopy_machine::{MachineName, SnapshotServer};
use tokio::sync::{Mutex, Semaphore};

use super::allowed::Allowed;
use crate::machines::Machines;

/// What every connection needs.
#[derive(Debug)]
pub(super) struct Host {
    pub keys: HostKeys,
    pub keys_directory: PathBuf,
    pub allowed: Allowed,
    /// This program, which is also the one that fills clones.
    pub program: PathBuf,
    /// Machines that may go from here to other hosts, and among which those of others come.
    pub machines: Option<Machines>,
    pub snapshots: Snapshots,
    pub(super) connections: Semaphore,
    pub(super) orders: Arc<Semaphore>,
}

/// Processes that serve snapshots of disks that have gone.
#[derive(Debug, Default)]
pub(super) struct Snapshots(pub(super) Mutex<BTreeMap<MachineName, (String, SnapshotServer)>>);
