//! After a power cut every flushed write is there, every sector is old or new and never another's; after a killed
//! process every acknowledged write is there. Any instant, any subset of what was not synchronized.

use std::collections::BTreeMap;

use onecopy_testing::seed;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::storage::record::{Cut, Recording};
use crate::{At, View};

const SIZE: u64 = 2 * 512 * BLOCK_BYTES;
const SECTORS: u64 = SIZE / SECTOR_BYTES;
/// Blocks that are used: few, so that they are overwritten often.
const HOT_BLOCKS: u64 = 24;

/// What a sector got, by the number of events before and after.
struct Written {
    begin: usize,
    end: usize,
    version: u64,
}

/// The version of each sector that was written.
type Versions = BTreeMap<u64, u64>;

#[derive(Default)]
struct History {
    sectors: BTreeMap<u64, Vec<Written>>,
    /// Begin and end of each flush that was acknowledged.
    flushes: Vec<(usize, usize)>,
    /// Begin and end of the taking, begin of the deletion, and the sectors' versions.
    snapshots: Vec<(String, usize, usize, usize, Versions)>,
    /// The newest version.
    version: u64,
}

fn sector(number: u64, version: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if version != 0 {
        for word in bytes.chunks_exact_mut(16) {
            word[..8].copy_from_slice(&number.to_le_bytes());
            word[8..].copy_from_slice(&version.to_le_bytes());
        }
    }
    bytes
}

/// The version that a sector's bytes are of; none when they are another sector's or a mixture.
fn version(number: u64, bytes: &[u8]) -> Option<u64> {
    let version = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
    (bytes == sector(number, version)).then_some(version)
}

impl History {
    fn latest(&self) -> BTreeMap<u64, u64> {
        self.sectors.iter().map(|(number, list)| (*number, list.last().unwrap().version)).collect()
    }

    /// The versions that a sector may have after `count` events, when what ended before `safe` cannot be lost.
    fn allowed(&self, number: u64, count: usize, safe: usize) -> Vec<u64> {
        let Some(list) = self.sectors.get(&number) else { return vec![0] };
        let durable = list.iter().rposition(|written| written.end <= safe);
        let from = durable.unwrap_or(0);
        let later = list[from..].iter().filter(|written| written.begin <= count).map(|written| written.version);
        later.chain(durable.is_none().then_some(0)).collect()
    }

    /// Whether a sector may have the version that was found.
    fn check(&self, sector: u64, found: u64, count: usize, safe: usize) -> Result<(), Wrong> {
        let allowed = self.allowed(sector, count, safe);
        let mut later = self.sectors.get(&sector).into_iter().flatten().filter(|written| written.begin > count);
        if allowed.contains(&found) {
            Ok(())
        } else if later.any(|written| written.version == found) {
            Err(Wrong::Early { sector, found, allowed })
        } else {
            Err(Wrong::Missing { sector, found, allowed })
        }
    }
}

/// Does any requests for a while and remembers what each may have left.
fn work(disk: &Disk, recording: &Recording, random: &mut StdRng, steps: u64, history: &mut History) {
    let events = || recording.recorder.len();
    let mut kept = Vec::new();
    for step in 0..steps {
        let begin = events();
        let block = random.random_range(0..HOT_BLOCKS) * 41 % (SIZE / BLOCK_BYTES - 8);
        match random.random_range(0..100) {
            0..60 => {
                let is_whole = random.random_bool(0.7);
                let first = block * 8 + if is_whole { 0 } else { random.random_range(0..7) };
                let count = if is_whole { 8 * random.random_range(1..4) } else { random.random_range(1..9) };
                history.version += 1;
                let version = history.version;
                let data: Vec<u8> = (first..first + count).flat_map(|number| sector(number, version)).collect();
                disk.write(first * SECTOR_BYTES, &data, &[]).unwrap();
                note(history, first, count, begin, events(), version);
            }
            60..68 => {
                disk.discard(block * BLOCK_BYTES, 2 * BLOCK_BYTES).unwrap();
                note(history, block * 8, 16, begin, events(), 0);
            }
            68..82 => {
                disk.flush().unwrap();
                history.flushes.push((begin, events()));
            }
            82..86 => {
                let name = format!("{begin} {step}");
                disk.snapshot(&name).unwrap();
                history.flushes.push((begin, events()));
                let versions = history.latest();
                history.snapshots.push((name, begin, events(), usize::MAX, versions));
            }
            86..88 => {
                if let Some(entry) = history.snapshots.iter_mut().find(|entry| entry.3 == usize::MAX) {
                    entry.3 = begin;
                    disk.delete_snapshot(&entry.0).unwrap();
                    history.flushes.push((begin, events()));
                }
            }
            88..92 => kept.push(disk.cut().unwrap()),
            92..95 => kept.drain(..).for_each(|epoch| disk.release(epoch).unwrap()),
            95..97 => {
                disk.core().checkpoint().unwrap();
            }
            _ => {
                // What is free is used again soon: the background is given time.
                disk.core().signal.wake();
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

fn note(history: &mut History, first: u64, count: u64, begin: usize, end: usize, version: u64) {
    for number in first..first + count {
        history.sectors.entry(number).or_default().push(Written { begin, end, version });
    }
}

/// What is not as it may be after a cut.
#[derive(Debug, PartialEq)]
enum Wrong {
    /// The files contradict each other.
    Unsound(String),
    /// A sector holds another sector's bytes, or a mixture.
    Foreign {
        sector: u64,
    },
    /// A write is missing that a flush made durable, or that was acknowledged before a kill.
    Missing {
        sector: u64,
        found: u64,
        allowed: Vec<u64>,
    },
    /// A sector is of a version that it cannot have yet.
    Early {
        sector: u64,
        found: u64,
        allowed: Vec<u64>,
    },
    SnapshotMissing(String),
    SnapshotEarly(String),
    SnapshotChanged {
        name: String,
        sector: u64,
    },
    /// Closing has changed the content.
    Closing,
}

/// Whether what is there after the first `count` events is what may be. Panics only where it cannot look.
fn check(home: &Path, history: &History, count: usize, cut: Cut) -> Result<(), Wrong> {
    check_files(home)?;
    let disk = Disk::open(home, options(None)).unwrap();
    let safe = match cut {
        Cut::Killed => count,
        Cut::Power { .. } => history.flushes.iter().rfind(|flush| flush.1 <= count).map_or(0, |flush| flush.0),
    };
    let content = read(&disk, 0, SIZE as usize);
    for number in 0..SECTORS {
        let bytes = &content[(number * SECTOR_BYTES) as usize..][..SECTOR];
        let found = version(number, bytes).ok_or(Wrong::Foreign { sector: number })?;
        history.check(number, found, count, safe)?;
    }
    for (name, begin, end, deleted, versions) in &history.snapshots {
        match disk.view(&At::Snapshot(name.clone())) {
            Ok(_) if *begin > count => return Err(Wrong::SnapshotEarly(name.clone())),
            Ok(view) => check_snapshot(&view, name, versions)?,
            Err(_) if *end > count || *deleted <= count => {}
            Err(_) => return Err(Wrong::SnapshotMissing(name.clone())),
        }
    }
    // And it works on.
    disk.write(0, &[1; BLOCK], &[]).unwrap();
    disk.close().unwrap();
    check_files(home)?;
    // And what it has closed is there, in the boot in which much may have been told to a successor.
    let disk = Disk::open(home, options(None)).unwrap();
    let closed = [&[1; BLOCK], &content[BLOCK..]].concat();
    let is_same = disk.was_closed() && read(&disk, 0, SIZE as usize) == closed;
    is_same.then_some(()).ok_or(Wrong::Closing)
}

fn check_files(home: &Path) -> Result<(), Wrong> {
    let report = Disk::check(home).unwrap();
    if report.is_sound() { Ok(()) } else { Err(Wrong::Unsound(format!("{report:?}"))) }
}

fn check_snapshot(view: &View, name: &str, versions: &BTreeMap<u64, u64>) -> Result<(), Wrong> {
    let content = whole(view);
    for number in 0..SECTORS {
        let bytes = &content[(number * SECTOR_BYTES) as usize..][..SECTOR];
        if version(number, bytes) != Some(versions.get(&number).copied().unwrap_or(0)) {
            return Err(Wrong::SnapshotChanged { name: name.to_owned(), sector: number });
        }
    }
    Ok(())
}

fn run(random: &mut StdRng, steps: u64, cuts: u64) {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let recording = Recording::begin(home.path());
    create(home.path(), SIZE);
    let created = recording.recorder.len();
    let mut history = History::default();
    // Each but the first takes over from one that was killed, and may lose power while it does.
    for _ in 0..3 {
        let disk = Disk::open(home.path(), options(None)).unwrap();
        work(&disk, &recording, random, steps, &mut history);
    }
    let events = recording.recorder.len();
    for number in 0..cuts {
        let count = random.random_range(created..=events);
        let cut = if number % 3 == 0 { Cut::Killed } else { Cut::Power { seed: random.random() } };
        let after = tempfile::tempdir_in("/dev/shm").unwrap();
        recording.recorder.rebuild(count, cut, after.path());
        let checked = check(after.path(), &history, count, cut);
        assert_eq!(checked, Ok(()), "{count} of {events} events, {cut:?}");
    }
}

/// After a power cut at any instant every acknowledged flush and snapshot is there, every sector is old or new, never
/// another's.
///
/// Spec: D4
#[test]
fn b2_b3_no_flushed_write_is_lost_by_a_power_cut_and_no_acknowledged_one_by_a_kill() {
    let mut random = StdRng::seed_from_u64(seed());
    for _ in 0..4 {
        run(&mut random, 150, 40);
    }
}

/// A process is killed after every single thing that it does to its files, checkpoints and openings among them.
///
/// Spec: D4
#[test]
fn b3_a_kill_at_any_event_loses_nothing() {
    let mut random = StdRng::seed_from_u64(seed());
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let recording = Recording::begin(home.path());
    create(home.path(), SIZE);
    let created = recording.recorder.len();
    let mut history = History::default();
    for _ in 0..3 {
        let disk = Disk::open(home.path(), options(None)).unwrap();
        work(&disk, &recording, &mut random, 12, &mut history);
        disk.core().checkpoint().unwrap();
        work(&disk, &recording, &mut random, 12, &mut history);
    }
    for count in created..=recording.recorder.len() {
        let after = tempfile::tempdir_in("/dev/shm").unwrap();
        recording.recorder.rebuild(count, Cut::Killed, after.path());
        let checked = check(after.path(), &history, count, Cut::Killed);
        assert_eq!(checked, Ok(()), "killed after {count} events");
    }
}

/// The control: a recording whose synchronizations are ignored must be found out, by a flushed write that is missing;
/// with them the first of these cuts leave what they may.
///
/// Spec: D4
#[test]
fn control_a_disk_whose_flushes_do_nothing_is_found_out() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let recording = Recording::begin(home.path());
    create(home.path(), SIZE);
    let disk = Disk::open(home.path(), options(None)).unwrap();
    let mut history = History::default();
    work(&disk, &recording, &mut StdRng::seed_from_u64(1), 300, &mut history);
    let events = recording.recorder.len();
    drop(disk);
    let checked = |seed| {
        let after = tempfile::tempdir_in("/dev/shm").unwrap();
        recording.recorder.rebuild(events, Cut::Power { seed }, after.path());
        check(after.path(), &history, events, Cut::Power { seed })
    };
    (0..10).for_each(|seed| assert_eq!(checked(seed), Ok(()), "seed {seed}"));
    recording.recorder.forget_synchronizations("data");
    let found: Vec<_> = (0..60).map(checked).collect();
    assert!(found.iter().any(|found| matches!(found, Err(Wrong::Missing { .. }))), "{found:?}");
}

/// A killed process's successor notes in the journal what it was told: what a snapshot has must stay the snapshot's.
///
/// Spec: D4
#[test]
fn b3_a_snapshot_survives_a_kill_two_openings_and_a_write() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    create(home.path(), SIZE);
    let disk = Disk::open(home.path(), options(None)).unwrap();
    disk.write(0, &[1; BLOCK], &[]).unwrap();
    disk.snapshot("one").unwrap();
    drop(disk);
    Disk::open(home.path(), options(None)).unwrap().close().unwrap();
    let disk = Disk::open(home.path(), options(None)).unwrap();
    disk.write(0, &[2; BLOCK], &[]).unwrap();
    assert_eq!(whole(&disk.view(&At::Snapshot("one".into())).unwrap())[..BLOCK], [1; BLOCK]);
}
