//! Commands that move a machine's state.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Monitor, text_of};
use crate::HypervisorError;

/// Where a machine's state goes to, or comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MigrationTarget {
    /// A Unix socket.
    Unix(PathBuf),
    /// A descriptor that was given under this name ([`Monitor::give_descriptor`]).
    Descriptor(String),
    /// A file (QEMU 8.2 and newer).
    File {
        /// The file.
        path: PathBuf,
        /// Where in it the state begins.
        offset_bytes: u64,
    },
    /// A command (`sh -c`) reads or writes it; a sandboxed QEMU refuses.
    Command(String),
}

/// What is known of a migration, `query-migrate`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Migration {
    /// How far it is; none when there was none.
    #[serde(default)]
    pub status: Option<MigrationStatus>,
    /// Milliseconds since it began.
    #[serde(default, rename = "total-time")]
    pub total_ms: Option<u64>,
    /// Milliseconds that the guest stood.
    #[serde(default, rename = "downtime")]
    pub downtime_ms: Option<u64>,
    /// Milliseconds that it is expected to stand.
    #[serde(default, rename = "expected-downtime")]
    pub expected_downtime_ms: Option<u64>,
    /// Memory.
    #[serde(default)]
    pub ram: Option<MigrationMemory>,
    /// Why it failed.
    #[serde(default)]
    pub error_desc: Option<String>,
}

/// The memory's part of a migration.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MigrationMemory {
    /// Bytes sent.
    #[serde(rename = "transferred")]
    pub transferred_bytes: u64,
    /// Bytes still to send.
    #[serde(rename = "remaining")]
    pub remaining_bytes: u64,
    /// Bytes of the whole memory.
    #[serde(rename = "total")]
    pub total_bytes: u64,
    /// Pages of zeros.
    #[serde(rename = "duplicate")]
    pub zero_pages: u64,
    /// Pages sent whole.
    #[serde(rename = "normal")]
    pub normal_pages: u64,
    /// How often dirty pages were gathered.
    #[serde(default)]
    pub dirty_sync_count: u64,
}

/// How far a migration is (`MigrationStatus` in qapi/migration.json).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum MigrationStatus {
    /// None was begun.
    None,
    /// It begins.
    Setup,
    /// It is being given up.
    Cancelling,
    /// It was given up.
    Cancelled,
    /// Memory goes.
    Active,
    /// The guest runs at the destination, memory follows.
    PostcopyActive,
    /// The connection was lost in that.
    PostcopyPaused,
    /// It goes on.
    PostcopyRecover,
    /// It is done.
    Completed,
    /// It has failed; the guest is where it was.
    Failed,
    /// It waits before the guest is stopped.
    PreSwitchover,
    /// Devices go.
    Device,
    /// The network is waited for.
    WaitUnplug,
    /// Another one, of a newer QEMU.
    #[serde(other)]
    Other,
}

impl MigrationStatus {
    /// Nothing more happens by itself.
    pub fn is_final(self) -> bool {
        matches!(self, MigrationStatus::Completed | MigrationStatus::Failed | MigrationStatus::Cancelled)
    }
}

impl MigrationTarget {
    /// QEMU's way of writing it.
    fn address(&self) -> Result<String, HypervisorError> {
        Ok(match self {
            MigrationTarget::Unix(path) => format!("unix:{}", text_of(path)?),
            MigrationTarget::Descriptor(name) => format!("fd:{name}"),
            MigrationTarget::File { path, offset_bytes } => format!("file:{},offset={offset_bytes}", text_of(path)?),
            MigrationTarget::Command(command) => format!("exec:{command}"),
        })
    }
}

impl Monitor {
    /// `migrate`: begins to send the machine's state; [`Monitor::migration`] and events tell how it goes.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn migrate(&self, target: &MigrationTarget) -> Result<(), HypervisorError> {
        self.tell("migrate", json!({ "uri": target.address()? })).await
    }

    /// `migrate-incoming`: takes another machine's state; for one that was started with
    /// [`crate::configuration::Incoming::Deferred`].
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn migrate_incoming(&self, source: &MigrationTarget) -> Result<(), HypervisorError> {
        self.tell("migrate-incoming", json!({ "uri": source.address()? })).await
    }

    /// `query-migrate`.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`], [`HypervisorError::UnknownAnswer`].
    pub async fn migration(&self) -> Result<Migration, HypervisorError> {
        self.ask("query-migrate", json!({})).await
    }

    /// `migrate_cancel`.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn cancel_migration(&self) -> Result<(), HypervisorError> {
        self.tell("migrate_cancel", json!({})).await
    }

    /// `migrate-set-capabilities`, by QEMU's names.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn set_migration_capabilities(&self, capabilities: &[(&str, bool)]) -> Result<(), HypervisorError> {
        let list = capabilities.iter().map(|(name, on)| json!({ "capability": name, "state": on }));
        self.tell("migrate-set-capabilities", json!({ "capabilities": list.collect::<Vec<Value>>() })).await
    }

    /// `migrate-set-parameters`, by QEMU's names.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn set_migration_parameters(&self, parameters: Map<String, Value>) -> Result<(), HypervisorError> {
        self.tell("migrate-set-parameters", Value::Object(parameters)).await
    }

    /// `xen-save-devices-state`: the state of all devices, without memory and disks, to a new file. The machine must
    /// stand; with `live: false` it stays usable for more than being sent away. Works in builds without Xen.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn save_devices(&self, file: &Path, live: bool) -> Result<(), HypervisorError> {
        self.tell("xen-save-devices-state", json!({ "filename": text_of(file)?, "live": live })).await
    }
}
