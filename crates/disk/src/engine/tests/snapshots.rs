//! Epochs, snapshots and the space that they keep.

use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use onecopy_pagemap::content_hash;
use onecopy_testing::until_seen;

use super::*;
use crate::storage::record::Recording;
use crate::{At, Direction, DiskError, GuestSegment, Observer, View, WriteRecord};

const SIZE: u64 = 1024 * BLOCK_BYTES;

fn disk(home: &Path) -> Disk {
    create(home, SIZE);
    Disk::open(home, options(None)).unwrap()
}

/// Waits for the background; what it frees is told by the statistics.
fn wait_for_blocks(disk: &Disk, blocks: u64) {
    let what = format!("{blocks} blocks are allocated");
    until_seen(&what, || disk.statistics(), |seen| seen.allocated_bytes == blocks * BLOCK_BYTES);
}

/// Space of discards, released epochs and deleted snapshots is given back to the file system.
///
/// Spec: L2
#[test]
fn b4_space_of_discards_epochs_and_snapshots_is_given_back() {
    let home = tempfile::tempdir().unwrap();
    let disk = disk(home.path());
    disk.write(0, &vec![1; 100 * BLOCK], &[]).unwrap();
    disk.flush().unwrap();
    let epoch = disk.cut().unwrap();
    disk.snapshot("kept").unwrap();
    disk.write(0, &vec![2; 100 * BLOCK], &[]).unwrap();
    let other = disk.cut().unwrap();
    disk.discard(0, 50 * BLOCK_BYTES).unwrap();
    assert_eq!(disk.statistics().allocated_bytes, 200 * BLOCK_BYTES);
    assert_eq!(disk.statistics().current_bytes, 50 * BLOCK_BYTES);
    let view = disk.view(&At::Epoch(other)).unwrap();
    disk.release(epoch).unwrap();
    disk.release(other).unwrap();
    disk.flush().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(whole(&view)[..BLOCK], [2; BLOCK]);
    drop(view);
    wait_for_blocks(&disk, 150);
    disk.delete_snapshot("kept").unwrap();
    wait_for_blocks(&disk, 50);
    disk.discard(0, SIZE).unwrap();
    disk.flush().unwrap();
    wait_for_blocks(&disk, 0);
    disk.close().unwrap();
    let allocated = std::fs::metadata(home.path().join("data")).unwrap().blocks() * 512;
    assert!(allocated <= 64 << 10, "{allocated} bytes are still allocated");
}

/// A disk without snapshots is a raw sparse image.
///
/// Spec: D4
#[test]
fn b5_a_disk_without_snapshots_is_a_raw_image() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let disk = disk(home.path());
    let content: Vec<u8> = (0..SIZE).map(|at| (at / 512 % 251) as u8).collect();
    disk.write(512, &content[512..SIZE as usize / 2], &[]).unwrap();
    disk.close().unwrap();
    let data = std::fs::read(home.path().join("data")).unwrap();
    assert_eq!(data[512..SIZE as usize / 2], content[512..SIZE as usize / 2]);
    assert!(data[SIZE as usize / 2..].iter().all(|byte| *byte == 0));
}

/// A snapshot can be read beside its owner and be the base of another disk, and is not deleted meanwhile.
///
/// Spec: D4
#[test]
fn b6_a_snapshot_is_read_beside_its_owner_and_not_deleted_meanwhile() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let disk = disk(home.path());
    disk.write(0, &[1; BLOCK], &[]).unwrap();
    let taken = disk.snapshot("one").unwrap();
    disk.write(0, &[2; BLOCK], &[]).unwrap();
    let view = View::open(home.path(), "one").unwrap();
    assert!(matches!(disk.delete_snapshot("one"), Err(DiskError::SnapshotInUse { .. })));
    assert!(matches!(View::open(home.path(), "two"), Err(DiskError::UnknownSnapshot { .. })));
    assert!(matches!(disk.snapshot("one"), Err(DiskError::SnapshotExists { .. })));
    assert!(matches!(disk.snapshot("a/b"), Err(DiskError::SnapshotName { .. })));
    disk.core().checkpoint().unwrap();
    disk.close().unwrap();
    assert_eq!(whole(&view)[..BLOCK], [1; BLOCK]);
    drop(view);
    let disk = Disk::open(home.path(), options(None)).unwrap();
    assert_eq!(disk.snapshots(), [taken]);
    disk.delete_snapshot("one").unwrap();
    assert!(matches!(disk.view(&At::Snapshot("one".into())), Err(DiskError::UnknownSnapshot { .. })));
    assert!(!home.path().join("snapshot.1.lock").exists());
}

/// Spec: D4
#[test]
fn b6_a_snapshot_is_the_base_of_another_disk() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let parent = disk(&home.path().join("parent"));
    parent.write(BLOCK_BYTES, &[1; 2 * BLOCK], &[]).unwrap();
    parent.snapshot("one").unwrap();
    parent.write(BLOCK_BYTES, &[9; BLOCK], &[]).unwrap();
    let base = crate::BaseSpecification::Disk { directory: "../parent".into(), snapshot: "one".into() };
    let child = home.path().join("child");
    Disk::create(&child, &CreateOptions { size_bytes: 2 * SIZE, base: Some(base), copy_base: false }).unwrap();
    let child = Disk::open(&child, options(None)).unwrap();
    child.write(BLOCK_BYTES + 512, &[5; 512], &[]).unwrap();
    child.discard(2 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
    let mut expected = vec![0; 4 * BLOCK];
    expected[BLOCK..2 * BLOCK].fill(1);
    expected[BLOCK + 512..BLOCK + 1024].fill(5);
    assert_eq!(read(&child, 0, 4 * BLOCK), expected);
    assert_eq!(read(&child, SIZE, BLOCK), [0; BLOCK]);
    let image = home.path().join("image");
    let mut told = 0;
    crate::export(&child.view(&At::Current).unwrap(), &image, |bytes| told = bytes).unwrap();
    let image = std::fs::read(image).unwrap();
    assert_eq!((image.len() as u64, told), (2 * SIZE, 2 * SIZE));
    assert!(image[..4 * BLOCK] == expected && image[4 * BLOCK..].iter().all(|byte| *byte == 0));
}

/// Spec: C6
#[test]
fn b24_another_snapshot_under_the_same_name_is_not_taken_for_the_first() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let (parent, child) = (home.path().join("parent"), home.path().join("child"));
    let fill = |disk: &Disk, byte| {
        disk.write(0, &[byte; BLOCK], &[]).unwrap();
        disk.snapshot("one").unwrap();
        disk.close().unwrap();
    };
    fill(&disk(&parent), 1);
    let base = crate::BaseSpecification::Disk { directory: "../parent".into(), snapshot: "one".into() };
    let over = CreateOptions { size_bytes: SIZE, base: Some(base), copy_base: false };
    Disk::create(&child, &over).unwrap();
    let first_byte = || {
        let disk = Disk::open(&child, options(None)).map_err(|error| error.to_string())?;
        let found = read(&disk, 0, BLOCK)[0];
        disk.close().map(|()| found).map_err(|error| error.to_string())
    };
    assert_eq!(first_byte(), Ok(1));

    let again = Disk::open(&parent, options(None)).unwrap();
    again.delete_snapshot("one").unwrap();
    fill(&again, 2);
    let error = first_byte().unwrap_err();
    assert!(error.contains("the base changed") && error.contains("base.identity"), "{error}");

    std::fs::remove_dir_all(&parent).unwrap();
    fill(&disk(&parent), 3);
    let error = first_byte().unwrap_err();
    assert!(error.contains("the base changed"), "{error}");
    // Whoever knows better says so.
    std::fs::remove_file(child.join("base.identity")).unwrap();
    assert_eq!(first_byte(), Ok(3));

    // Without the base nothing is made, and nothing is in the way when it is there.
    std::fs::rename(&parent, home.path().join("away")).unwrap();
    std::fs::remove_dir_all(&child).unwrap();
    assert!(Disk::create(&child, &over).is_err());
    std::fs::rename(home.path().join("away"), &parent).unwrap();
    Disk::create(&child, &over).unwrap();
    assert_eq!(first_byte(), Ok(3));
}

/// One holder at a time, named to others; the lease is waited for and can be taken again; nothing is written after it
/// was given back.
///
/// Spec: D4
#[test]
fn b7_one_holder_at_a_time_and_the_lease_can_be_taken_again() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let first = disk(home.path());
    let Err(DiskError::Leased { holder, .. }) = Disk::open(home.path(), options(None)) else {
        panic!("two holders");
    };
    assert!(holder.starts_with(&format!("process {} (", std::process::id())), "{holder}");
    let generation = first.generation();
    let patient = OpenOptions { lease_timeout: Duration::from_secs(120), ..options(None) };
    let directory = home.path().to_owned();
    let second = std::thread::spawn(move || Disk::open(&directory, patient).unwrap());
    std::thread::sleep(Duration::from_millis(20));
    first.write(0, &[7; BLOCK], &[]).unwrap();
    first.close().unwrap();
    assert!(matches!(first.flush(), Err(DiskError::Closed)));
    assert!(matches!(first.write(0, &[8; BLOCK], &[]), Err(DiskError::Closed)));
    assert!(matches!(first.close(), Err(DiskError::Closed)));
    let second = second.join().unwrap();
    assert_eq!(second.generation(), generation + 1);
    assert!(second.was_closed());
    assert_eq!(read(&second, 0, BLOCK), [7; BLOCK]);
}

/// Block, hash, guest address and direction, as far as they were told.
type Told = (u64, Option<u128>, Option<u64>, Option<Direction>);

#[derive(Default)]
struct Seen(Mutex<Vec<Told>>);

impl Observer for Seen {
    fn transferred(&self, block: u64, hash: u128, guest_address: Option<u64>, direction: Direction) {
        self.0.lock().unwrap().push((block, Some(hash), guest_address, Some(direction)));
    }

    fn invalidated(&self, blocks: Range<u64>) {
        self.0.lock().unwrap().extend(blocks.map(|block| (block, None, None, None)));
    }

    fn knows(&self, block: u64) -> bool {
        block == 3
    }

    fn placed(&self, block: u64, guest_address: u64) {
        self.0.lock().unwrap().push((block, None, Some(guest_address), Some(Direction::Read)));
    }
}

/// The observer learns each whole block's hash and guest page, the write log each write.
///
/// Spec: D4
#[test]
fn b10_the_observer_learns_hashes_and_guest_pages_and_the_log_every_write() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    create(home.path(), SIZE);
    let seen = Arc::new(Seen::default());
    let options = OpenOptions { observer: Some(seen.clone()), record_writes: true, ..options(None) };
    let disk = Disk::open(home.path(), options).unwrap();
    let hash = |byte| content_hash(disk.hash_seed(), &[byte; BLOCK]);
    let segment = |address, length| GuestSegment { guest_address: Some(address), length };
    // Half a block, then one in a page, one across two segments, one in the middle of two pages.
    let segments = [segment(512, 2048), segment(8192, 4096 + 1024), segment(20480, 3072), segment(40000, 4096)];
    disk.write(2048, &[1; 2048 + 3 * BLOCK], &segments).unwrap();
    let write = Some(Direction::Write);
    let expected = [
        (0, None, None, None),
        (1, Some(hash(1)), Some(8192), write),
        (2, Some(hash(1)), None, write),
        (3, Some(hash(1)), None, write),
    ];
    assert_eq!(seen.0.lock().unwrap().split_off(0), expected);
    let mut halves = [[0; BLOCK / 2]; 6];
    let mut slices: Vec<IoSliceMut<'_>> = halves.iter_mut().map(|half| IoSliceMut::new(half)).collect();
    disk.try_read(BLOCK_BYTES, &mut slices, &[segment(0, 2 * 4096), segment(16384, 4096)]).unwrap();
    let read = Some(Direction::Read);
    let expected =
        [(1, Some(hash(1)), Some(0), read), (2, Some(hash(1)), Some(4096), read), (3, None, Some(16384), read)];
    assert_eq!(seen.0.lock().unwrap().split_off(0), expected);
    let epoch = disk.cut().unwrap();
    disk.write(0, &[2; BLOCK], &[]).unwrap();
    let log = disk.take_write_log(epoch).unwrap();
    let partial = content_hash(disk.hash_seed(), &[1; 2048]);
    assert!(!log.overflowed);
    let record = |sector, guest_address, length, hash| WriteRecord { sector, guest_address, length, hash };
    assert_eq!(
        log.records,
        [
            record(4, Some(512), 2048, partial),
            record(8, Some(8192), 4096, hash(1)),
            record(16, None, 4096, hash(1)),
            record(24, Some(40000), 4096, hash(1)),
        ]
    );
    assert!(disk.take_write_log(epoch).is_none() && disk.take_write_log(disk.epoch()).is_none());
    let next = disk.cut().unwrap();
    assert_eq!(disk.changed(epoch, next).unwrap(), std::slice::from_ref(&(0..1)));
    assert_eq!(disk.take_write_log(next).unwrap().records.len(), 1);
}

/// What records of writes take of the room for them is given back with every epoch and snapshot that goes, or is not
/// made.
///
/// Spec: L1
#[test]
fn b63_the_write_logs_room_is_given_back_with_every_snapshot_that_goes() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let recording = Recording::begin(home.path());
    create(home.path(), SIZE);
    let disk = Disk::open(home.path(), OpenOptions { record_writes: true, ..options(None) }).unwrap();
    let recorded = || disk.core().recorded.load(Ordering::Relaxed);
    let write = || disk.write(0, &vec![1; 5 * BLOCK], &[]).unwrap();
    write();
    disk.snapshot("one").unwrap();
    assert_eq!(recorded(), 5, "whoever asks for the snapshot's epoch gets its record");
    disk.delete_snapshot("one").unwrap();
    assert_eq!(recorded(), 0, "a snapshot was deleted");
    write();
    recording.recorder.refuse_writes("journal", libc::ENOSPC);
    assert!(matches!(disk.snapshot("two"), Err(DiskError::Full)));
    recording.recorder.allow_all();
    assert_eq!(recorded(), 0, "a snapshot was not made");
    write();
    let epoch = disk.cut().unwrap();
    disk.release(epoch).unwrap();
    assert_eq!(recorded(), 0, "an epoch was released");
    write();
    let epoch = disk.cut().unwrap();
    assert_eq!(disk.take_write_log(epoch).unwrap().records.len(), 5);
    assert_eq!(recorded(), 0, "a log was taken");
    disk.close().unwrap();
}

/// A large base full of sevens.
struct Sevens;

impl Source for Sevens {
    fn size_bytes(&self) -> u64 {
        1 << 30
    }

    fn read(&self, _: u64, into: &mut [u8]) -> Result<(), SourceError> {
        into.fill(7);
        Ok(())
    }

    fn describe(&self) -> String {
        "sevens".into()
    }
}

/// A discard over a base takes no memory for each of its blocks, now, after reopening and from a checkpoint.
///
/// Spec: L1
#[test]
fn b65_a_discard_over_a_base_takes_no_memory_for_each_of_its_blocks() {
    const LEAF_BYTES: u64 = crate::map::LEAF_BLOCKS * BLOCK_BYTES;
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    create(home.path(), 1 << 30);
    let open = || Disk::open(home.path(), OpenOptions { base: Some(Arc::new(Sevens)), ..options(None) }).unwrap();
    // All leaves, and those that are kept.
    let leaves = |disk: &Disk| {
        let trees: Vec<_> = disk.core().stripes.iter().map(|stripe| stripe.map().tree.clone()).collect();
        let leaves = (0..512).filter_map(|leaf| trees[leaf % 64].leaf(leaf / 64).map(Arc::as_ptr));
        let leaves: Vec<_> = leaves.collect();
        (leaves.len(), leaves.iter().collect::<std::collections::HashSet<_>>().len())
    };
    let disk = open();
    disk.discard(0, 1 << 29).unwrap();
    // In pieces, too.
    for begin in ((1 << 29)..1 << 30).step_by(1 << 20) {
        disk.discard(begin, 1 << 20).unwrap();
    }
    assert_eq!(leaves(&disk), (512, 1));
    disk.flush().unwrap();
    disk.cut().unwrap();
    disk.write(3 * LEAF_BYTES, &[1; BLOCK], &[]).unwrap();
    disk.discard(3 * LEAF_BYTES, BLOCK_BYTES).unwrap();
    assert_eq!(leaves(&disk), (512, 2), "what is younger is not like the others");
    disk.close().unwrap();
    // From the journal, and from a checkpoint.
    let disk = open();
    assert_eq!(leaves(&disk), (512, 2));
    disk.core().checkpoint().unwrap();
    disk.close().unwrap();
    let disk = open();
    assert_eq!(leaves(&disk), (512, 2));
    disk.write(5 * LEAF_BYTES + BLOCK_BYTES, &[2; BLOCK], &[]).unwrap();
    assert_eq!(read(&disk, 5 * LEAF_BYTES, 2 * BLOCK), [[0; BLOCK], [2; BLOCK]].concat());
    assert_eq!(read(&disk, 6 * LEAF_BYTES, 2 * BLOCK), [0; 2 * BLOCK]);
    assert_eq!(leaves(&disk), (512, 3));
    disk.close().unwrap();
}
