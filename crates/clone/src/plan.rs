//! What a clone shall be.

use std::path::PathBuf;

use onecopy_postgres::ConnectionParameters;
use serde::{Deserialize, Serialize};

/// The default of [`FillOptions::limit_bytes_per_second`].
pub const LIMIT_BYTES_PER_SECOND_DEFAULT: u64 = 64 << 20;

/// A running server to clone, as seen from its own host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceServer {
    /// How a superuser reaches it.
    pub connection: ConnectionParameters,
    /// Its data directory.
    pub data_directory: PathBuf,
    /// How a superuser reaches the primary that it follows, if it is a standby.
    pub leader: Option<ConnectionParameters>,
    /// How a role that may replicate reaches it; none: as `connection`.
    #[serde(default)]
    pub replication: Option<ConnectionParameters>,
}

impl SourceServer {
    /// How a standby or a base backup reaches it.
    pub fn replication(&self) -> &ConnectionParameters {
        self.replication.as_ref().unwrap_or(&self.connection)
    }
}

/// How PostgreSQL is made to accept the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recovery {
    /// `Crash` where `full_page_writes` is on, else `Backup`.
    #[default]
    Auto,
    /// As after a crash: a patched control file, full-page images repair what is torn.
    Crash,
    /// As from an online backup: `pg_backup_start`, `pg_backup_stop`, a label.
    Backup,
}

/// What is done so that a clone is as fast as its source soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Warm {
    /// Nothing.
    Off,
    /// The source's hot pages are filled first.
    Cache,
    /// They are then read into the clone's shared buffers.
    #[default]
    Full,
}

/// How a clone is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FillOptions {
    /// Bytes a second of the background; none: as fast as it goes. What is touched comes at once in any case.
    pub limit_bytes_per_second: Option<u64>,
    /// Hot pages.
    pub warm: Warm,
}

impl Default for FillOptions {
    fn default() -> FillOptions {
        FillOptions { limit_bytes_per_second: Some(LIMIT_BYTES_PER_SECOND_DEFAULT), warm: Warm::default() }
    }
}

/// One clone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What is cloned.
    pub source: SourceServer,
    /// The clone's data directory; does not exist yet.
    pub target: PathBuf,
    /// Where its tablespaces go: one directory for each, named by its OID. Default: beside `target`, with
    /// `.tablespaces` added.
    pub tablespaces: PathBuf,
    /// The account that it runs as.
    pub user_name: String,
    /// The physical replication slot on the source; made new.
    pub slot: String,
    /// Crash or backup.
    pub recovery: Recovery,
    /// How it is filled.
    pub fill: FillOptions,
    /// More WAL than this kept for the clone, in bytes: it cannot catch up and is discarded.
    pub wal_keep_bytes_max: u64,
}

/// The longest name of a replication slot (`NAMEDATALEN`).
const SLOT_NAME_BYTES_MAX: usize = 63;

/// Whether PostgreSQL takes this name for a replication slot (`ReplicationSlotValidateName`).
pub fn is_slot_name(name: &str) -> bool {
    let is_letter = |letter: u8| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == b'_';
    !name.is_empty() && name.len() <= SLOT_NAME_BYTES_MAX && name.bytes().all(is_letter)
}
