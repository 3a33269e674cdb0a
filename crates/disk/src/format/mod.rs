//! What is in a disk's files; `docs/disk-format.md` tells it to people. All numbers are little-endian.
//!
//! Bytes that are read here may be anything: each parser is total, checks each number against what there can be, and
//! never reserves more memory than the file has bytes for.

pub(crate) mod checkpoint;
pub(crate) mod header;
pub(crate) mod journal;
pub(crate) mod load;
pub(crate) mod recent;

use serde::{Deserialize, Serialize};

use crate::Epoch;
use crate::options::Snapshot;

/// The version of all that is written. A disk of another version is refused.
pub(crate) const VERSION: u32 = 1;

/// The data file's name.
pub(crate) const DATA: &str = "data";

/// Longest name of a snapshot, in bytes.
pub(crate) const NAME_BYTES_MAX: usize = 128;

/// Most snapshots of a disk: each is a root in every checkpoint and a list in memory.
pub(crate) const SNAPSHOTS_MAX: usize = 1024;

/// A snapshot as the files keep it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotRecord {
    /// The number of the epoch that it ended: births up to here belong to it.
    pub(crate) number: u32,
    pub(crate) snapshot: Snapshot,
}

/// Whether a snapshot can have this name.
pub(crate) fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && name != "."
        && name != ".."
        && !name.chars().any(|character| character.is_control() || character == '/')
}

/// Writes numbers one after another.
#[derive(Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn snapshot(&mut self, record: &SnapshotRecord) {
        self.u32(record.number);
        self.u64(record.snapshot.epoch.0);
        self.u64(record.snapshot.created_unix_ms);
        self.u8(record.snapshot.name.len() as u8);
        self.bytes(record.snapshot.name.as_bytes());
    }
}

/// Reads numbers one after another; the error says what was missing.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or_else(|| format!("ends {count} bytes too early"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or_else(|| format!("ends {N} bytes too early"))?;
        self.0 = rest;
        Ok(*bytes)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, String> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, String> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn snapshot(&mut self) -> Result<SnapshotRecord, String> {
        let (number, epoch, created_unix_ms) = (self.u32()?, Epoch(self.u64()?), self.u64()?);
        let length = usize::from(self.u8()?);
        let name = std::str::from_utf8(self.bytes(length)?).map_err(|_| "a snapshot's name is not text".to_owned())?;
        if !is_name(name) {
            return Err(format!("{name:?} is no snapshot's name"));
        }
        Ok(SnapshotRecord { number, snapshot: Snapshot { name: name.to_owned(), epoch, created_unix_ms } })
    }
}
