//! What the observer is told while others change what is read.

use std::sync::{Mutex, OnceLock};

use onecopy_pagemap::{Bounds, Found, PageMap, content_hash};

use super::*;
use crate::{Direction, Observer};

/// Knows the last content that it was told of one block, and changes that block when it is asked for the first time.
#[derive(Default)]
struct Meddler {
    disk: OnceLock<Disk>,
    meddles: Mutex<Option<Meddling>>,
    hash: Mutex<Option<u128>>,
}

#[derive(Clone, Copy)]
enum Meddling {
    Write,
    Discard,
}

impl Observer for Meddler {
    fn transferred(&self, block: u64, hash: u128, _guest_address: Option<u64>, _direction: Direction) {
        if block == 1 {
            *self.hash.lock().unwrap() = Some(hash);
        }
    }

    fn invalidated(&self, blocks: Range<u64>) {
        if blocks.contains(&1) {
            *self.hash.lock().unwrap() = None;
        }
    }

    /// Called when the bytes of a read are in memory, before they are told.
    fn knows(&self, _block: u64) -> bool {
        let meddling = self.meddles.lock().unwrap().take();
        if let (Some(meddling), Some(disk)) = (meddling, self.disk.get()) {
            match meddling {
                Meddling::Write => disk.write(BLOCK_BYTES, &[2; BLOCK], &[]).unwrap(),
                Meddling::Discard => disk.discard(BLOCK_BYTES, BLOCK_BYTES).unwrap(),
            }
        }
        false
    }

    fn placed(&self, _block: u64, _guest_address: u64) {}
}

fn meddled(meddling: Meddling) -> (tempfile::TempDir, Arc<Meddler>, Disk) {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    create(home.path(), 64 * BLOCK_BYTES);
    let meddler = Arc::new(Meddler::default());
    let options = OpenOptions { observer: Some(meddler.clone()), ..options(None) };
    let disk = Disk::open(home.path(), options).unwrap();
    disk.write(BLOCK_BYTES, &[1; BLOCK], &[]).unwrap();
    assert!(meddler.disk.set(disk.clone()).is_ok());
    *meddler.meddles.lock().unwrap() = Some(meddling);
    (home, meddler, disk)
}

fn hash(disk: &Disk, byte: u8) -> u128 {
    content_hash(disk.hash_seed(), &[byte; BLOCK])
}

/// Spec: D4
#[test]
fn b10_a_read_does_not_tell_what_was_overwritten_meanwhile() {
    let (_home, meddler, disk) = meddled(Meddling::Write);
    assert_eq!(read(&disk, BLOCK_BYTES, BLOCK), [1; BLOCK]);
    assert_eq!(*meddler.hash.lock().unwrap(), Some(hash(&disk, 2)));
    // One that nobody disturbs is told.
    *meddler.hash.lock().unwrap() = None;
    assert_eq!(read(&disk, BLOCK_BYTES, BLOCK), [2; BLOCK]);
    assert_eq!(*meddler.hash.lock().unwrap(), Some(hash(&disk, 2)));
    disk.close().unwrap();
}

/// Spec: D4
#[test]
fn b10_a_read_does_not_tell_what_was_discarded_meanwhile() {
    let (_home, meddler, disk) = meddled(Meddling::Discard);
    assert_eq!(read(&disk, BLOCK_BYTES, BLOCK), [1; BLOCK]);
    assert_eq!(*meddler.hash.lock().unwrap(), None);
    disk.close().unwrap();
}

/// A page map that observes a disk.
struct Mapped(PageMap);

impl Observer for Mapped {
    fn transferred(&self, block: u64, hash: u128, guest_address: Option<u64>, _direction: Direction) {
        self.0.record(block, hash, guest_address);
    }

    fn invalidated(&self, blocks: Range<u64>) {
        self.0.forget(blocks);
    }

    fn knows(&self, block: u64) -> bool {
        self.0.knows(block)
    }

    fn placed(&self, block: u64, guest_address: u64) {
        self.0.hint(block, guest_address);
    }
}

#[test]
fn a_page_map_finds_what_a_disk_has_written_and_read_by_the_bytes_of_a_page() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    create(home.path(), 64 * BLOCK_BYTES);
    let disk = Disk::open(home.path(), options(None)).unwrap();
    disk.write(2 * BLOCK_BYTES, &[2; BLOCK], &[]).unwrap();
    let size_bytes = disk.size_bytes();
    let map = PageMap::new(size_bytes, disk.hash_seed(), Bounds::for_disk(size_bytes)).unwrap();
    let mapped = Arc::new(Mapped(map));
    disk.close().unwrap();
    let disk = Disk::open(home.path(), OpenOptions { observer: Some(mapped.clone()), ..options(None) }).unwrap();
    let find = |byte| mapped.0.find(&[byte; BLOCK], None);
    disk.write(BLOCK_BYTES, &[1; BLOCK], &[]).unwrap();
    assert_eq!([find(1), find(2)], [Found::Block { block: 1, by_hint: false }, Found::Unknown]);
    assert_eq!(read(&disk, 2 * BLOCK_BYTES, BLOCK), [2; BLOCK]);
    assert_eq!(find(2), Found::Block { block: 2, by_hint: false });
    disk.close().unwrap();
}
