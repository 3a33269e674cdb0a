//! The core against models: a plain vector, and what a crash may leave.

mod concurrency;
mod crash;
mod faults;
mod handover;
mod model;
mod observed;
mod planted;
mod snapshots;
mod withdrawn;

use std::io::IoSliceMut;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::source::{Extent, Source, SourceError};
use crate::{BLOCK_BYTES, CreateOptions, Disk, OpenOptions, SECTOR_BYTES};

const BLOCK: usize = BLOCK_BYTES as usize;
const SECTOR: usize = SECTOR_BYTES as usize;

/// A base whose every sector tells its number; the last block's second half is beyond its end.
struct Pattern {
    bytes: Vec<u8>,
}

impl Pattern {
    fn sector(number: u64) -> [u8; SECTOR] {
        let mut bytes = [0xba; SECTOR];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    fn bytes(size_bytes: u64) -> Vec<u8> {
        (0..size_bytes / SECTOR_BYTES).flat_map(Pattern::sector).collect()
    }
}

impl Source for Pattern {
    fn size_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        let there = self.size_bytes().saturating_sub(offset).min(into.len() as u64) as usize;
        let (bytes, behind_end) = into.split_at_mut(there);
        behind_end.fill(0);
        if !bytes.is_empty() {
            bytes.copy_from_slice(&self.bytes[offset as usize..][..there]);
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, SourceError> {
        Ok(vec![Extent { range, is_zero: false }])
    }

    fn describe(&self) -> String {
        "a pattern".into()
    }
}

fn create(directory: &Path, size_bytes: u64) {
    Disk::create(directory, &CreateOptions { size_bytes, base: None, copy_base: false }).unwrap();
}

fn options(base: Option<u64>) -> OpenOptions {
    OpenOptions {
        base: base.map(|size_bytes| Arc::new(Pattern { bytes: Pattern::bytes(size_bytes) }) as Arc<dyn Source>),
        lease_timeout: Duration::ZERO,
        ..OpenOptions::default()
    }
}

fn read(disk: &Disk, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; length];
    disk.read(offset, &mut [IoSliceMut::new(&mut bytes)]).unwrap();
    bytes
}

fn whole(source: &dyn Source) -> Vec<u8> {
    let mut bytes = vec![0xee; source.size_bytes() as usize];
    source.read(0, &mut bytes).unwrap();
    bytes
}
