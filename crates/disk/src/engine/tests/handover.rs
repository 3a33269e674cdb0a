//! What one holder leaves to the next: no commit after the lease, nothing old to believe, nothing half-made in the way.

use super::*;
use crate::DiskError;
use crate::storage::record::{Cut, FOLDER, Recording};

const SIZE: u64 = 512 * BLOCK_BYTES;

fn recorded() -> (tempfile::TempDir, Recording, Disk) {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let recording = Recording::begin(home.path());
    create(home.path(), SIZE);
    let disk = Disk::open(home.path(), options(None)).unwrap();
    (home, recording, disk)
}

pub(super) fn names(home: &Path, prefix: &str) -> Vec<String> {
    let entries = std::fs::read_dir(home).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.filter(|name| name.starts_with(prefix)).collect();
    names.sort_unstable();
    names
}

/// Spec: D4
#[test]
fn b7_no_commit_reaches_the_journal_after_the_lease_is_given_back() {
    for closes in [true, false] {
        let (home, _recording, disk) = recorded();
        disk.write(0, &[1; BLOCK], &[]).unwrap();
        let core = disk.core().clone();
        if closes {
            disk.close().unwrap();
        }
        drop(disk);
        let journal = std::fs::read(home.path().join("journal.1")).unwrap();
        // A request that entered before the disk was closed.
        assert!(matches!(core.flush(), Err(DiskError::Closed)), "closed: {closes}");
        assert!(matches!(core.begin_journal(false), Err(DiskError::Closed)), "closed: {closes}");
        assert_eq!(std::fs::read(home.path().join("journal.1")).unwrap(), journal, "closed: {closes}");
        assert_eq!(names(home.path(), "journal."), ["journal.1"]);
        assert_eq!(read(&Disk::open(home.path(), options(None)).unwrap(), 0, BLOCK), [1; BLOCK]);
    }
}

/// Spec: D4
#[test]
fn b7_the_lease_is_given_back_after_the_commit_that_is_at_work() {
    let (home, _recording, disk) = recorded();
    let core = disk.core().clone();
    let commit = core.committer();
    let dropper = std::thread::spawn(move || drop(disk));
    for _ in 0..20 {
        assert!(matches!(Disk::open(home.path(), options(None)), Err(DiskError::Leased { .. })));
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(commit);
    dropper.join().unwrap();
    Disk::open(home.path(), options(None)).unwrap();
}

/// A checkpoint that did not come far leaves two files for a successor: none of them is believed after a close.
///
/// Spec: D4
#[test]
fn b3_what_a_successor_was_told_before_a_close_is_not_believed_after_it() {
    let (home, recording, disk) = recorded();
    disk.write(0, &[1; BLOCK], &[]).unwrap();
    recording.recorder.refuse_writes("journal", libc::ENOSPC);
    assert!(matches!(disk.core().checkpoint(), Err(DiskError::Full)));
    recording.recorder.allow_all();
    assert_eq!(names(home.path(), "recent."), ["recent.1", "recent.2"]);
    // The block moves, and what it had is free.
    let epoch = disk.cut().unwrap();
    disk.write(0, &[2; BLOCK], &[]).unwrap();
    disk.release(epoch).unwrap();
    disk.close().unwrap();
    let disk = Disk::open(home.path(), options(None)).unwrap();
    assert!(disk.was_closed());
    assert_eq!(read(&disk, 0, BLOCK), [2; BLOCK]);
}

/// Spec: D4
#[test]
fn b9_a_new_journal_whose_name_may_not_last_makes_the_disk_read_only() {
    let (home, recording, disk) = recorded();
    disk.write(0, &[1; BLOCK], &[]).unwrap();
    recording.recorder.refuse_synchronizations(FOLDER, libc::EIO);
    assert!(matches!(disk.core().checkpoint(), Err(DiskError::Io { .. })));
    recording.recorder.allow_all();
    // The old journal must not go on: the new one follows what it had.
    assert!(matches!(disk.write(BLOCK_BYTES, &[2; BLOCK], &[]), Err(DiskError::ReadOnly { .. })));
    assert!(matches!(disk.flush(), Err(DiskError::ReadOnly { .. })));
    drop(disk);
    std::fs::remove_file(home.path().join("failed")).unwrap();
    assert!(Disk::check(home.path()).unwrap().is_sound());
    let disk = Disk::open(home.path(), options(None)).unwrap();
    assert_eq!(read(&disk, 0, 2 * BLOCK), [[1; BLOCK], [0; BLOCK]].concat());
}

/// A write to several places that fails gives all of them back: a successor must not be told of some.
///
/// Spec: D4
#[test]
fn b3_a_successor_is_told_of_a_change_wholly_or_not_at_all() {
    let (home, recording, disk) = recorded();
    for block in [0, 5] {
        disk.write(block * BLOCK_BYTES, &[1; BLOCK], &[]).unwrap();
    }
    // Block 0's own place is kept: it will go behind the end, and block 1 to its own place.
    disk.cut().unwrap();
    disk.discard(0, BLOCK_BYTES).unwrap();
    recording.recorder.refuse_writes_after("recent", crate::format::recent::SLOT_BYTES, libc::ENOSPC);
    assert!(matches!(disk.write(0, &[2; 2 * BLOCK], &[]), Err(DiskError::Full)));
    recording.recorder.allow_all();
    disk.write(5 * BLOCK_BYTES, &[3; BLOCK], &[]).unwrap();
    drop(disk);
    let disk = Disk::open(home.path(), options(None)).unwrap();
    assert_eq!(read(&disk, 0, 2 * BLOCK), [0; 2 * BLOCK]);
    assert_eq!(read(&disk, 5 * BLOCK_BYTES, BLOCK), [3; BLOCK]);
}

/// Spec: L2
#[test]
fn b8_a_checkpoint_that_has_no_space_leaves_nothing_and_is_done_later() {
    let (home, recording, disk) = recorded();
    disk.write(0, &[1; BLOCK], &[]).unwrap();
    recording.recorder.refuse_writes_after("map", 100, libc::ENOSPC);
    for _ in 0..3 {
        assert!(matches!(disk.core().checkpoint(), Err(DiskError::Full)));
        assert_eq!(names(home.path(), "map."), ["map.1"]);
        assert_eq!(names(home.path(), "journal."), ["journal.1", "journal.2"]);
        disk.write(BLOCK_BYTES, &[2; BLOCK], &[]).unwrap();
        disk.flush().unwrap();
    }
    recording.recorder.allow_all();
    disk.core().checkpoint().unwrap();
    assert_eq!(names(home.path(), "map."), ["map.2"]);
    assert_eq!(names(home.path(), "journal."), ["journal.2"]);
    drop(disk);
    std::fs::write(home.path().join("map.9.new"), "of a killed process").unwrap();
    std::fs::remove_file(home.path().join("recent.2")).unwrap();
    let disk = Disk::open(home.path(), options(None)).unwrap();
    assert_eq!(names(home.path(), "map."), ["map.2"]);
    assert_eq!(read(&disk, 0, 2 * BLOCK), [[1; BLOCK], [2; BLOCK]].concat());
    disk.close().unwrap();
}

/// A record that a killed process wrote and did not synchronize is made durable before another one follows it.
///
/// Spec: D4
#[test]
fn b3_a_power_cut_after_a_kill_finds_no_hole_in_the_journal() {
    let (home, recording, disk) = recorded();
    disk.write(0, &[1; BLOCK], &[]).unwrap();
    recording.recorder.refuse_synchronizations("journal", libc::EIO);
    let error = disk.flush().unwrap_err();
    assert!(matches!(&error, DiskError::Io { source, .. } if source.raw_os_error() == Some(libc::EIO)), "{error:?}");
    recording.recorder.allow_all();
    drop(disk);
    std::fs::remove_file(home.path().join("failed")).unwrap();
    let killed = recording.recorder.len();
    let disk = Disk::open(home.path(), options(None)).unwrap();
    disk.write(BLOCK_BYTES, &[2; BLOCK], &[]).unwrap();
    disk.flush().unwrap();
    for count in killed..=recording.recorder.len() {
        for seed in 0..40 {
            let after = tempfile::tempdir_in("/dev/shm").unwrap();
            recording.recorder.rebuild(count, Cut::Power { seed }, after.path());
            let _ = std::fs::remove_file(after.path().join("failed"));
            let report = Disk::check(after.path()).unwrap();
            assert!(report.is_sound(), "{count} events, seed {seed}: {report:?}");
        }
    }
}

/// Panics at the first block that passes.
struct Panicking(std::sync::atomic::AtomicBool);

impl crate::Observer for Panicking {
    fn transferred(&self, _: u64, _: u128, _: Option<u64>, _: crate::Direction) {
        assert!(self.0.swap(true, std::sync::atomic::Ordering::SeqCst), "as the test wants it");
    }

    fn invalidated(&self, _: Range<u64>) {}

    fn knows(&self, _: u64) -> bool {
        false
    }

    fn placed(&self, _: u64, _: u64) {}
}

/// Spec: D4
#[test]
fn b12_a_request_whose_worker_panics_is_answered_and_others_are_served() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    create(home.path(), SIZE);
    let observer = Arc::new(Panicking(Default::default()));
    let disk = Disk::open(home.path(), OpenOptions { observer: Some(observer), ..options(None) }).unwrap();
    let (sender, answers) = std::sync::mpsc::channel();
    for is_refused in [true, false] {
        let sender = sender.clone();
        let request = crate::Request::Write { offset: 0, data: vec![1; BLOCK], segments: Vec::new() };
        disk.submit(request, Box::new(move |outcome| sender.send(outcome).unwrap()));
        let outcome = answers.recv_timeout(Duration::from_secs(120)).unwrap();
        assert_eq!(matches!(outcome, Err(DiskError::Panicked)), is_refused);
    }
    disk.close().unwrap();
}
