//! How a disk is made and opened, and what it tells of itself.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::source::{BaseSpecification, Source};
use crate::{Epoch, Observer};

/// What a new disk is.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Its size: whole blocks.
    pub size_bytes: u64,
    /// What is below it: read where nothing was written.
    pub base: Option<BaseSpecification>,
    /// Whether a base elsewhere is copied into the disk's directory, on demand and in the background.
    pub copy_base: bool,
}

/// How a disk is opened.
#[derive(Clone)]
pub struct OpenOptions {
    /// Who learns what content passes.
    pub observer: Option<Arc<dyn Observer>>,
    /// Whether writes are recorded for [`Disk::take_write_log`](crate::Disk::take_write_log).
    pub record_writes: bool,
    /// The base, instead of the one that the header names.
    pub base: Option<Arc<dyn Source>>,
    /// How long to wait for another holder to give the disk back.
    pub lease_timeout: Duration,
    /// Limit of the background copy of a base, in bytes a second; none is no limit.
    pub hydration_limit: Option<u64>,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions {
            observer: None,
            record_writes: false,
            base: None,
            lease_timeout: Duration::from_secs(10),
            hydration_limit: None,
        }
    }
}

/// What a disk is, told without opening it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Its size.
    pub size_bytes: u64,
    /// Its identity, 32 hexadecimal digits.
    pub uuid: String,
    /// The version of its format.
    pub format_version: u32,
    /// What is below it.
    pub base: Option<BaseSpecification>,
    /// Whether the base is copied here.
    pub copy_base: bool,
}

/// A durable, named point in time of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its name.
    pub name: String,
    /// The epoch that it ended.
    pub epoch: Epoch,
    /// When, in milliseconds since 1970.
    pub created_unix_ms: u64,
}

/// What a disk did since it was opened, and what it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// The size that the guest sees.
    pub size_bytes: u64,
    /// Blocks' data held in the disk's own files, for the current content and all that is retained.
    pub allocated_bytes: u64,
    /// Of them, blocks of the current content.
    pub current_bytes: u64,
    /// Named snapshots.
    pub snapshots: u64,
    /// Epochs that were cut and not released.
    pub retained_epochs: u64,
    /// The current epoch's number.
    pub epoch: u64,
    /// Bytes in the journal since the last checkpoint.
    pub journal_bytes: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Reads done.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes done.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Flushes asked for.
    pub flushes: u64,
    /// Flushes that reached the files: others rode along.
    pub synchronizations: u64,
    /// Discards and write-zeroes done.
    pub discards: u64,
    /// Bytes discarded or zeroed.
    pub discarded_bytes: u64,
    /// Requests that wait for or run in the disk's workers.
    pub pending_requests: u64,
}
