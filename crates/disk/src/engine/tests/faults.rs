//! Full and failing file systems.

use std::io::ErrorKind;

use super::handover::names;
use super::*;
use crate::DiskError;
use crate::engine::checkpoint::JOURNAL_BYTES_AT_CLOSE;
use crate::storage::record::Recording;

const SIZE: u64 = 512 * BLOCK_BYTES;

fn recorded() -> (tempfile::TempDir, Recording, Disk) {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let recording = Recording::begin(home.path());
    create(home.path(), SIZE);
    let disk = Disk::open(home.path(), options(None)).unwrap();
    (home, recording, disk)
}

/// A full file system fails the write or flush that needs space, and loses nothing.
///
/// Spec: L2
#[test]
fn b8_a_full_disk_refuses_writes_and_loses_nothing() {
    let (home, recording, disk) = recorded();
    disk.write(0, &[1; BLOCK], &[]).unwrap();
    for refused in ["data", "recent"] {
        recording.recorder.refuse_writes(refused, libc::ENOSPC);
        assert!(matches!(disk.write(BLOCK_BYTES, &[2; 2 * BLOCK], &[]), Err(DiskError::Full)));
        assert_eq!(read(&disk, 0, 2 * BLOCK), [[1; BLOCK], [0; BLOCK]].concat());
        disk.flush().unwrap();
        recording.recorder.allow_all();
    }
    // A flush that has no space for the journal fails, and the next one that has makes all durable.
    disk.write(BLOCK_BYTES, &[3; BLOCK], &[]).unwrap();
    recording.recorder.refuse_writes("journal", libc::ENOSPC);
    assert!(matches!(disk.flush(), Err(DiskError::Full)));
    assert!(matches!(disk.snapshot("full"), Err(DiskError::Full)));
    assert_eq!(disk.snapshots(), []);
    recording.recorder.allow_all();
    disk.write(3 * BLOCK_BYTES, &[4; BLOCK], &[]).unwrap();
    disk.flush().unwrap();
    let used = disk.statistics().allocated_bytes;
    assert_eq!(used, 3 * BLOCK_BYTES);
    drop(disk);
    std::fs::remove_file(home.path().join("recent.1")).unwrap();
    let disk = Disk::open(home.path(), options(None)).unwrap();
    let expected = [[1; BLOCK], [3; BLOCK], [0; BLOCK], [4; BLOCK]].concat();
    assert_eq!(read(&disk, 0, 4 * BLOCK), expected);
    disk.close().unwrap();
    assert!(Disk::check(home.path()).unwrap().is_sound());
}

/// After a crash a disk is opened on a full file system that lets nothing be freed.
///
/// Spec: L2
#[test]
fn b8_a_disk_is_opened_where_nothing_can_be_freed() {
    let (home, recording, disk) = recorded();
    disk.write(0, &[[1; BLOCK], [2; BLOCK]].concat(), &[]).unwrap();
    disk.flush().unwrap();
    disk.discard(0, BLOCK_BYTES).unwrap();
    disk.flush().unwrap();
    drop(disk);
    recording.recorder.refuse_writes("data", libc::ENOSPC);
    let disk = Disk::open(home.path(), options(None)).unwrap();
    assert!(!disk.was_closed());
    recording.recorder.allow_all();
    disk.write(2 * BLOCK_BYTES, &[3; BLOCK], &[]).unwrap();
    assert_eq!(read(&disk, 0, 3 * BLOCK), [[0; BLOCK], [2; BLOCK], [3; BLOCK]].concat());
    disk.close().unwrap();
    assert!(Disk::check(home.path()).unwrap().is_sound());
}

/// Where there is no room for another journal's reserve, the one that has one goes on; behind a torn record there must
/// be another, and it has what there is room for.
///
/// Spec: L2
#[test]
fn b8_a_journal_gives_its_reserve_away_only_for_another() {
    let (home, recording, disk) = recorded();
    disk.write(0, &[1; BLOCK], &[]).unwrap();
    disk.flush().unwrap();
    recording.recorder.limit_reserves("journal", 64 << 10);
    for round in 1..4 {
        assert!(matches!(disk.core().checkpoint(), Err(DiskError::Full)));
        assert_eq!(names(home.path(), "journal."), ["journal.1"]);
        disk.write(round * BLOCK_BYTES, &[1; BLOCK], &[]).unwrap();
        disk.flush().unwrap();
    }
    let end = disk.core().committer().end;
    drop(disk);
    let journal = std::fs::OpenOptions::new().write(true).open(home.path().join("journal.1")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&journal, &[0xa5; 100], end).unwrap();
    let disk = Disk::open(home.path(), options(None)).unwrap();
    disk.write(5 * BLOCK_BYTES, &[1; BLOCK], &[]).unwrap();
    disk.flush().unwrap();
    assert_eq!(read(&disk, 0, 6 * BLOCK), [vec![1; 4 * BLOCK], vec![0; BLOCK], vec![1; BLOCK]].concat());
    recording.recorder.allow_all();
    disk.close().unwrap();
    assert!(Disk::check(home.path()).unwrap().is_sound());
}

/// A disk is closed where there is no room for a checkpoint: its journal has all of it.
///
/// Spec: L2
#[test]
fn b8_a_disk_is_closed_where_a_checkpoint_has_no_room() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    create(home.path(), SIZE);
    let disk = Disk::open(home.path(), options(None)).unwrap();
    // No file can be made of this name.
    let in_the_way = home.path().join("map.2.new");
    std::fs::create_dir(&in_the_way).unwrap();
    let mut round = 0_u64;
    while disk.core().committer().end <= JOURNAL_BYTES_AT_CLOSE {
        for block in 0..SIZE / BLOCK_BYTES / 2 {
            // Runs of one block each, that are other ones each time.
            let offset = 2 * block * BLOCK_BYTES;
            match round % 2 {
                0 => disk.write(offset, &[1 + round as u8; SECTOR_BYTES as usize], &[]).unwrap(),
                _ => disk.discard(offset, BLOCK_BYTES).unwrap(),
            }
        }
        disk.flush().unwrap();
        round += 1;
    }
    let content = read(&disk, 0, SIZE as usize);
    disk.close().unwrap();
    assert_eq!(names(home.path(), "map."), ["map.1", "map.2.new"]);
    std::fs::remove_dir(&in_the_way).unwrap();
    let disk = Disk::open(home.path(), options(None)).unwrap();
    assert!(disk.was_closed());
    assert_eq!(read(&disk, 0, SIZE as usize), content);
    disk.close().unwrap();
    assert!(Disk::check(home.path()).unwrap().is_sound());
}

/// After a failed synchronization nothing is written any more, reads go on.
///
/// Spec: D4
#[test]
fn b9_after_a_failed_synchronization_nothing_is_written_any_more() {
    for refused in ["data", "journal"] {
        let (home, recording, disk) = recorded();
        disk.write(0, &[1; BLOCK], &[]).unwrap();
        disk.flush().unwrap();
        disk.write(BLOCK_BYTES, &[2; BLOCK], &[]).unwrap();
        recording.recorder.refuse_synchronizations(refused, libc::EIO);
        assert!(matches!(disk.flush(), Err(DiskError::Io { .. })));
        recording.recorder.allow_all();
        // The kernel tells a failure once: the next synchronization would succeed and mean nothing.
        assert!(matches!(disk.flush(), Err(DiskError::ReadOnly { .. })));
        assert!(matches!(disk.write(0, &[3; BLOCK], &[]), Err(DiskError::ReadOnly { .. })));
        assert!(matches!(disk.discard(0, BLOCK_BYTES), Err(DiskError::ReadOnly { .. })));
        assert!(matches!(disk.snapshot("late"), Err(DiskError::ReadOnly { .. })));
        assert_eq!(read(&disk, 0, BLOCK), [1; BLOCK]);
        assert!(matches!(disk.close(), Err(DiskError::ReadOnly { .. })));
        // Nobody goes on before somebody has looked, and then without what was never flushed.
        assert!(matches!(Disk::open(home.path(), options(None)), Err(DiskError::Failed { .. })));
        assert!(!Disk::check(home.path()).unwrap().is_sound());
        std::fs::remove_file(home.path().join("failed")).unwrap();
        let disk = Disk::open(home.path(), options(None)).unwrap();
        assert!(!disk.was_closed());
        assert_eq!(read(&disk, 0, BLOCK), [1; BLOCK]);
        if refused == "data" {
            assert_eq!(read(&disk, BLOCK_BYTES, BLOCK), [0; BLOCK]);
        }
    }
}

#[test]
fn requests_that_are_no_whole_sectors_within_the_disk_are_refused() {
    let (_home, _recording, disk) = recorded();
    for (offset, length) in [(1, 512), (0, 511), (SIZE, 512), (SIZE - 512, 1024), (u64::MAX - 511, 512)] {
        let mut bytes = vec![0; length];
        let is_refused = |outcome| matches!(outcome, Err(DiskError::OutOfRange { .. }));
        assert!(is_refused(disk.read(offset, &mut [IoSliceMut::new(&mut bytes)])));
        assert!(is_refused(disk.write(offset, &bytes, &[])));
        assert!(is_refused(disk.discard(offset, length as u64)));
    }
    let segment = crate::GuestSegment { guest_address: None, length: 512 };
    assert!(matches!(disk.write(0, &[0; 1024], &[segment]), Err(DiskError::Segments { .. })));
}

/// Damaged header, journal, checkpoint: told, never used, no panic.
///
/// Spec: C6
#[test]
fn damaged_files_are_told_and_never_used() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    create(home.path(), SIZE);
    let disk = Disk::open(home.path(), options(None)).unwrap();
    disk.write(0, &[1; BLOCK], &[]).unwrap();
    disk.snapshot("one").unwrap();
    disk.core().checkpoint().unwrap();
    disk.write(0, &[2; BLOCK], &[]).unwrap();
    disk.close().unwrap();
    for (name, at) in [("map.2", 100), ("journal.2", 20), ("header", 3)] {
        let path = home.path().join(name);
        let whole = std::fs::read(&path).unwrap();
        let mut damaged = whole.clone();
        damaged[at] ^= 0x40;
        std::fs::write(&path, damaged).unwrap();
        assert!(matches!(Disk::open(home.path(), options(None)), Err(DiskError::Format { .. })), "{name}");
        let is_observed = Disk::check(home.path()).map_or(true, |report| !report.is_sound());
        assert!(is_observed, "{name}");
        std::fs::write(&path, whole).unwrap();
    }
    std::fs::rename(home.path().join("journal.2"), home.path().join("gone")).unwrap();
    let error = Disk::open(home.path(), options(None)).map(|_| "opened").unwrap_err();
    assert!(matches!(&error, DiskError::Io { source, .. } if source.kind() == ErrorKind::NotFound), "{error:?}");
    std::fs::rename(home.path().join("gone"), home.path().join("journal.2")).unwrap();
    assert_eq!(read(&Disk::open(home.path(), options(None)).unwrap(), 0, BLOCK), [2; BLOCK]);
}
