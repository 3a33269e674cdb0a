//! Epochs: the writes between two cuts.

use onecopy_pagemap::ContentHash;
use serde::{Deserialize, Serialize};

/// An epoch's number. Each write belongs to one; numbers grow with each cut and never repeat within a disk's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

/// A point in time of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum At {
    /// Now: what is read may change between two reads.
    Current,
    /// The end of an epoch that was cut and is not released.
    Epoch(Epoch),
    /// A snapshot, by name.
    Snapshot(String),
}

/// One whole block written during an epoch, and where it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteRecord {
    /// The first sector, in units of 512 bytes.
    pub sector: u64,
    /// Guest physical address of the first byte, when known and when the record lies in one piece.
    pub guest_address: Option<u64>,
    /// Its length in bytes: at most a block.
    pub length: u32,
    /// The [`content_hash`](onecopy_pagemap::content_hash) of these bytes with the disk's seed.
    pub hash: ContentHash,
}

/// All writes of an epoch, in an order that respects each block's.
#[derive(Clone, Debug, Default)]
pub struct WriteLog {
    /// The writes.
    pub records: Vec<WriteRecord>,
    /// There were more than the log keeps: what changed must be asked of [`Disk::changed`](crate::Disk::changed).
    pub overflowed: bool,
}
