//! Any requests, in any order, give what a plain vector gives: now, at kept epochs, in snapshots, and after reopening.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::{At, DiskError, Epoch, GuestSegment, View};

/// Three leaves and a little.
const SIZE: u64 = 3 * 512 * BLOCK_BYTES + 5 * BLOCK_BYTES;
const SECTORS: u64 = SIZE / SECTOR_BYTES;

#[derive(Clone, Debug)]
enum Step {
    Write { sector: u64, count: u64, tries: bool },
    Discard { sector: u64, count: u64 },
    WriteZeroes { sector: u64, count: u64, may_unmap: bool },
    Read { sector: u64, count: u64 },
    Flush,
    Cut,
    Release(usize),
    Snapshot(u8),
    DeleteSnapshot(u8),
    Checkpoint,
    Tend,
    Close,
    Drop,
}

/// Mostly around few places, so that requests meet; sizes from a sector to more than a leaf.
fn range() -> impl Strategy<Value = (u64, u64)> {
    let begin = prop_oneof![0u64..40, 4080u64..4130, 8180u64..8200, 0..SECTORS];
    let count = prop_oneof![1u64..20, Just(8u64), Just(16u64), 1u64..300, Just(4096u64), Just(5000u64)];
    (begin, count, any::<bool>()).prop_map(|(begin, count, is_aligned)| {
        let begin = if is_aligned { begin / 8 * 8 } else { begin };
        (begin, count.min(SECTORS - begin))
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (range(), any::<bool>()).prop_map(|((sector, count), tries)| Step::Write { sector, count, tries }),
        2 => range().prop_map(|(sector, count)| Step::Discard { sector, count }),
        1 => (range(), any::<bool>())
            .prop_map(|((sector, count), may_unmap)| Step::WriteZeroes { sector, count, may_unmap }),
        4 => range().prop_map(|(sector, count)| Step::Read { sector, count }),
        2 => Just(Step::Flush),
        2 => Just(Step::Cut),
        2 => any::<usize>().prop_map(Step::Release),
        1 => (0u8..4).prop_map(Step::Snapshot),
        1 => (0u8..4).prop_map(Step::DeleteSnapshot),
        1 => Just(Step::Checkpoint),
        1 => Just(Step::Tend),
        1 => Just(Step::Close),
        1 => Just(Step::Drop),
    ]
}

struct Model {
    now: Vec<u8>,
    epochs: BTreeMap<Epoch, (Vec<u8>, View)>,
    snapshots: BTreeMap<String, Vec<u8>>,
    version: u64,
}

impl Model {
    fn fresh(&mut self, length: usize) -> Vec<u8> {
        self.version += 1;
        let version = self.version;
        (0..length).map(|at| (version.wrapping_mul(31) + (at / 8) as u64) as u8).collect()
    }
}

fn run(steps: Vec<Step>, base: Option<u64>) -> Result<(), TestCaseError> {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    create(home.path(), SIZE);
    let mut disk = Disk::open(home.path(), options(base)).unwrap();
    let mut now = base.map_or(Vec::new(), Pattern::bytes);
    now.resize(SIZE as usize, 0);
    let mut model = Model { now, epochs: BTreeMap::new(), snapshots: BTreeMap::new(), version: 0 };
    for step in steps {
        take(&step, &mut disk, &mut model, home.path(), base)?;
    }
    prop_assert!(read(&disk, 0, SIZE as usize) == model.now);
    for (name, content) in &model.snapshots {
        prop_assert!(&whole(&disk.view(&At::Snapshot(name.clone())).unwrap()) == content, "snapshot {name}");
        prop_assert!(base.is_some() || &whole(&View::open(home.path(), name).unwrap()) == content);
    }
    for (epoch, (content, view)) in &model.epochs {
        prop_assert!(&whole(view) == content, "{epoch:?}");
    }
    check_changes(&disk, &model)?;
    drop(model);
    disk.close().unwrap();
    let report = Disk::check(home.path()).unwrap();
    prop_assert!(report.is_sound() && report.was_closed, "{report:?}");
    Ok(())
}

fn take(step: &Step, disk: &mut Disk, model: &mut Model, home: &Path, base: Option<u64>) -> Result<(), TestCaseError> {
    let bytes = |sector: u64, count: u64| (sector * SECTOR_BYTES) as usize..((sector + count) * SECTOR_BYTES) as usize;
    match step.clone() {
        Step::Write { sector, count, tries } => {
            let range = bytes(sector, count);
            let data = model.fresh(range.len());
            let segments = [GuestSegment { guest_address: Some(4096), length: range.len() as u32 }];
            if tries {
                let attempt = disk.try_write(range.start as u64, &data, &segments).unwrap();
                if attempt == crate::Attempt::WouldWait {
                    disk.write(range.start as u64, &data, &segments).unwrap();
                }
            } else {
                disk.write(range.start as u64, &data, &[]).unwrap();
            }
            model.now[range].copy_from_slice(&data);
        }
        Step::Discard { sector, count } => {
            disk.discard(sector * SECTOR_BYTES, count * SECTOR_BYTES).unwrap();
            model.now[bytes(sector, count)].fill(0);
        }
        Step::WriteZeroes { sector, count, may_unmap } => {
            disk.write_zeroes(sector * SECTOR_BYTES, count * SECTOR_BYTES, may_unmap).unwrap();
            model.now[bytes(sector, count)].fill(0);
        }
        Step::Read { sector, count } => {
            let range = bytes(sector, count);
            prop_assert!(read(disk, range.start as u64, range.len()) == model.now[range]);
        }
        Step::Flush => disk.flush().unwrap(),
        Step::Cut => {
            let epoch = disk.cut().unwrap();
            model.epochs.insert(epoch, (model.now.clone(), disk.view(&At::Epoch(epoch)).unwrap()));
        }
        Step::Release(index) => {
            if let Some(epoch) = model.epochs.keys().nth(index % model.epochs.len().max(1)).copied() {
                let (content, view) = model.epochs.remove(&epoch).unwrap();
                disk.release(epoch).unwrap();
                prop_assert!(whole(&view) == content, "a view of a released epoch");
                let is_gone = matches!(disk.view(&At::Epoch(epoch)), Err(DiskError::UnknownEpoch { .. }));
                prop_assert!(is_gone);
            }
        }
        Step::Snapshot(name) => {
            let name = format!("snapshot {name}");
            let taken = disk.snapshot(&name);
            prop_assert_eq!(taken.is_err(), model.snapshots.contains_key(&name));
            if taken.is_ok() {
                model.snapshots.insert(name, model.now.clone());
            }
        }
        Step::DeleteSnapshot(name) => {
            let name = format!("snapshot {name}");
            prop_assert_eq!(disk.delete_snapshot(&name).is_ok(), model.snapshots.remove(&name).is_some());
        }
        Step::Checkpoint => disk.core().checkpoint().unwrap(),
        Step::Tend => disk.core().signal.wake(),
        Step::Close | Step::Drop => {
            if matches!(step, Step::Close) {
                disk.close().unwrap();
                prop_assert!(model.epochs.values().all(|(_, view)| view.read(0, &mut [0; 512]).is_err()));
            }
            model.epochs.clear();
            // The old one goes first: it has the lease.
            let spare = home.join("spare");
            if !spare.exists() {
                create(&spare, BLOCK_BYTES);
            }
            *disk = Disk::open(&spare, options(None)).unwrap();
            *disk = Disk::open(home, options(base)).unwrap();
            prop_assert_eq!(disk.was_closed(), matches!(step, Step::Close));
        }
    }
    Ok(())
}

/// What changed between two kept epochs is told, and extents say zero only where zeros are.
fn check_changes(disk: &Disk, model: &Model) -> Result<(), TestCaseError> {
    let epochs: Vec<_> = model.epochs.iter().collect();
    for pair in epochs.windows(2) {
        let ((from, (older, _)), (to, (newer, _))) = (pair[0], pair[1]);
        let changed = disk.changed(*from, *to).unwrap();
        for block in 0..SIZE / BLOCK_BYTES {
            let range = (block * BLOCK_BYTES) as usize..((block + 1) * BLOCK_BYTES) as usize;
            let is_observed = changed.iter().any(|run| run.contains(&block));
            prop_assert!(is_observed || older[range.clone()] == newer[range], "block {block}");
        }
    }
    let extents = disk.view(&At::Current).unwrap().extents(100..SIZE + 5).unwrap();
    let mut end = 100;
    for extent in &extents {
        prop_assert_eq!(extent.range.start, end);
        end = extent.range.end;
        let there = extent.range.start as usize..end.min(SIZE) as usize;
        prop_assert!(!extent.is_zero || model.now[there].iter().all(|byte| *byte == 0));
    }
    prop_assert_eq!(end, SIZE + 5);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// A disk, over a base or not, reads as a plain vector: now, at kept epochs, in snapshots, after reopening; what
    /// changed between epochs is told.
    ///
    /// Spec: D4
    #[test]
    fn b1_a_disk_reads_as_a_plain_vector_now_in_epochs_in_snapshots_and_after_reopening(
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        run(steps, None)?;
    }

    /// Spec: D4
    #[test]
    fn b1_a_disk_over_a_base_reads_as_a_plain_vector(steps in proptest::collection::vec(step(), 1..60)) {
        run(steps, Some(SIZE - 4 * BLOCK_BYTES - 2048))?;
    }
}
