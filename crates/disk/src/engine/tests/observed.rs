//! What the observer is told while others change what is read.

use std::sync::{Mutex, OnceLock};

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
    xxhash_rust::xxh3::xxh3_128_with_seed(&[byte; BLOCK], disk.hash_seed())
}

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

#[test]
fn b10_a_read_does_not_tell_what_was_discarded_meanwhile() {
    let (_home, meddler, disk) = meddled(Meddling::Discard);
    assert_eq!(read(&disk, BLOCK_BYTES, BLOCK), [1; BLOCK]);
    assert_eq!(*meddler.hash.lock().unwrap(), None);
    disk.close().unwrap();
}
