//! Many threads on the same blocks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, mpsc};

use super::*;
use crate::engine::workers::ZERO_STEP_BYTES;
use crate::{At, Direction, DiskError, Observer, Request};

const SIZE: u64 = 64 * BLOCK_BYTES;
const THREADS: u64 = 4;
const ROUNDS: u64 = 300;

/// Each thread owns the sectors of its number modulo the threads' count: all meet in every block. Another thread cuts
/// epochs, takes snapshots, checkpoints and flushes meanwhile.
///
/// Threads on overlapping blocks lose no sector while epochs are cut, snapshots taken and checkpoints written.
///
/// Spec: D4
#[test]
fn b11_threads_on_overlapping_blocks_lose_no_sector() {
    for base in [None, Some(SIZE)] {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        create(home.path(), SIZE);
        let disk = Disk::open(home.path(), options(base)).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..THREADS)
                .map(|thread| {
                    scope.spawn({
                        let disk = disk.clone();
                        move || write_own_sectors(&disk, thread)
                    })
                })
                .collect();
            scope.spawn(|| disturb(&disk, &is_over));
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            is_over.store(true, Ordering::Relaxed);
        });
        for sector in 0..SIZE / SECTOR_BYTES {
            let found = read(&disk, sector * SECTOR_BYTES, SECTOR);
            assert_eq!(found, stamp(sector, ROUNDS - 1), "sector {sector}");
        }
        disk.close().unwrap();
        assert!(Disk::check(home.path()).unwrap().is_sound());
    }
}

fn stamp(sector: u64, round: u64) -> Vec<u8> {
    [sector.to_le_bytes(), round.to_le_bytes()].concat().repeat(SECTOR / 16)
}

fn write_own_sectors(disk: &Disk, thread: u64) {
    for round in 0..ROUNDS {
        for sector in (0..SIZE / SECTOR_BYTES).filter(|sector| sector % THREADS == thread) {
            disk.write(sector * SECTOR_BYTES, &stamp(sector, round), &[]).unwrap();
        }
        let sector = (round * THREADS + thread) % (SIZE / SECTOR_BYTES);
        assert_eq!(read(disk, sector * SECTOR_BYTES, SECTOR), stamp(sector, round), "one's own write is read");
    }
}

fn disturb(disk: &Disk, is_over: &AtomicBool) {
    let mut kept = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let epoch = disk.cut().unwrap();
        let view = disk.view(&At::Epoch(epoch)).unwrap();
        let content = whole(&view);
        disk.flush().unwrap();
        assert!(whole(&view) == content, "an ended epoch has changed");
        kept.push(epoch);
        if kept.len() > 3 {
            disk.release(kept.remove(0)).unwrap();
        }
        let _ = disk.delete_snapshot("moving");
        disk.snapshot("moving").unwrap();
        disk.core().checkpoint().unwrap();
    }
}

#[test]
fn submitted_requests_complete_once_and_flushes_share_the_work() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    create(home.path(), SIZE);
    let disk = Disk::open(home.path(), options(None)).unwrap();
    let (sender, receiver) = mpsc::channel();
    let count = 200;
    for number in 0..count {
        let sender = sender.clone();
        let request = match number % 4 {
            0 => {
                Request::Write { offset: number % 64 * BLOCK_BYTES, data: vec![number as u8; BLOCK], segments: vec![] }
            }
            1 => Request::Read { offset: 0, length: SIZE, segments: vec![] },
            2 => Request::Flush,
            _ => Request::Discard { offset: 63 * BLOCK_BYTES, length: BLOCK_BYTES },
        };
        disk.submit(request, Box::new(move |outcome| sender.send((number, outcome.map(|bytes| bytes.len()))).unwrap()));
    }
    let mut outcomes: Vec<_> = receiver.iter().take(count as usize).collect();
    outcomes.sort_by_key(|outcome| outcome.0);
    for (at, (number, outcome)) in outcomes.into_iter().enumerate() {
        assert_eq!(at as u64, number);
        assert_eq!(outcome.unwrap(), if number % 4 == 1 { SIZE as usize } else { 0 });
    }
    disk.submit(
        Request::Read { offset: 0, length: u64::MAX, segments: vec![] },
        Box::new({
            let sender = sender.clone();
            move |outcome| sender.send((0, outcome.map(|bytes| bytes.len()))).unwrap()
        }),
    );
    assert!(matches!(receiver.recv().unwrap().1, Err(DiskError::OutOfRange { .. })));
    disk.close().unwrap();
    disk.submit(Request::Flush, Box::new(move |outcome| sender.send((0, outcome.map(|_| 0))).unwrap()));
    assert!(matches!(receiver.recv().unwrap().1, Err(DiskError::Closed)));
}

/// A base that answers only when it is closed.
struct Unreachable(AtomicBool, AtomicU64);

impl Source for Unreachable {
    fn size_bytes(&self) -> u64 {
        SIZE
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), SourceError> {
        self.1.fetch_add(1, Ordering::SeqCst);
        while !self.0.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(SourceError { source_name: self.describe(), reason: "closed".into() })
    }

    fn is_local(&self, _: u64, _: u64) -> bool {
        false
    }

    fn close(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    fn describe(&self) -> String {
        "far away".into()
    }
}

/// What waits for an unreachable base holds up nothing else and ends with the close, also when the base is a snapshot
/// of a disk with a base; long zeroings let others come between; a request whose worker panics is answered, and others
/// are served.
///
/// Spec: D4
#[test]
fn b12_what_waits_for_an_unreachable_base_holds_up_nothing_else_and_ends_with_the_close() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    create(home.path(), SIZE);
    let base = Arc::new(Unreachable(AtomicBool::new(false), AtomicU64::new(0)));
    let disk = Disk::open(home.path(), OpenOptions { base: Some(base.clone()), ..options(None) }).unwrap();
    let (sender, receiver) = mpsc::channel();
    for number in 0..40u64 {
        let sender = sender.clone();
        let request = match number % 2 {
            0 => Request::Read { offset: 0, length: BLOCK_BYTES, segments: vec![] },
            _ => Request::Write { offset: number * BLOCK_BYTES, data: vec![1; SECTOR], segments: vec![] },
        };
        disk.submit(request, Box::new(move |outcome| sender.send(outcome.is_err()).unwrap()));
    }
    while base.1.load(Ordering::SeqCst) < 16 {
        std::thread::yield_now();
    }
    assert_eq!(disk.try_write(0, &[1; SECTOR], &[]).unwrap(), crate::Attempt::WouldWait);
    disk.write(0, &[5; BLOCK], &[]).unwrap();
    disk.discard(BLOCK_BYTES, BLOCK_BYTES).unwrap();
    let epoch = disk.cut().unwrap();
    disk.snapshot("meanwhile").unwrap();
    disk.flush().unwrap();
    assert_eq!(read(&disk, 0, BLOCK), [5; BLOCK]);
    disk.release(epoch).unwrap();
    assert!(receiver.try_recv().is_err());
    disk.close().unwrap();
    assert_eq!(receiver.iter().take(40).filter(|is_error| *is_error).count(), 40);
}

/// Holds zeroings: at their begin at first, then behind their first step, and in the end not at all.
struct Gate {
    open_blocks: Mutex<u64>,
    opened: Condvar,
}

impl Gate {
    fn open(&self, blocks: u64) {
        *self.open_blocks.lock().unwrap() = blocks;
        self.opened.notify_all();
    }
}

impl Observer for Gate {
    fn transferred(&self, block: u64, _: u128, _: Option<u64>, _: Direction) {
        let is_closed = |open_blocks: &mut u64| block % ZEROED_BLOCKS >= *open_blocks;
        let open_blocks = self.open_blocks.lock().unwrap();
        drop(self.opened.wait_timeout_while(open_blocks, Duration::from_secs(240), is_closed).unwrap());
    }

    fn invalidated(&self, _: Range<u64>) {}

    fn knows(&self, _: u64) -> bool {
        true
    }

    fn placed(&self, _: u64, _: u64) {}
}

/// As many as two steps.
const ZEROED_BLOCKS: u64 = 2 * ZERO_STEP_BYTES / BLOCK_BYTES;

/// More than the disk has threads for.
const ZEROINGS: u64 = 5;

/// Spec: D4
#[test]
fn b12_long_zeroings_let_others_come_between() {
    let home = tempfile::tempdir().unwrap();
    create(home.path(), ZEROINGS * ZEROED_BLOCKS * BLOCK_BYTES);
    let gate = Arc::new(Gate { open_blocks: Mutex::new(0), opened: Condvar::new() });
    let disk = Disk::open(home.path(), OpenOptions { observer: Some(gate.clone()), ..options(None) }).unwrap();
    let (sender, receiver) = mpsc::channel();
    for number in 0..ZEROINGS {
        let (sender, length) = (sender.clone(), ZEROED_BLOCKS * BLOCK_BYTES);
        let request = Request::WriteZeroes { offset: number * length, length, may_unmap: false };
        disk.submit(
            request,
            Box::new(move |outcome| {
                let _ = sender.send((number, outcome.is_ok()));
            }),
        );
    }
    let read = Request::Read { offset: 0, length: BLOCK_BYTES, segments: vec![] };
    disk.submit(
        read,
        Box::new(move |outcome| {
            let _ = sender.send((ZEROINGS, outcome.is_ok()));
        }),
    );
    gate.open(ZERO_STEP_BYTES / BLOCK_BYTES);
    assert_eq!(receiver.recv_timeout(Duration::from_secs(120)), Ok((ZEROINGS, true)), "the read is first");
    gate.open(ZEROED_BLOCKS);
    let mut zeroed: Vec<_> = receiver.iter().take(ZEROINGS as usize).collect();
    zeroed.sort_unstable();
    assert_eq!(zeroed, (0..ZEROINGS).map(|number| (number, true)).collect::<Vec<_>>());
    let told = disk.statistics();
    assert_eq!((told.discards, told.discarded_bytes), (ZEROINGS, told.size_bytes));
    assert_eq!(told.allocated_bytes, told.size_bytes);
    disk.close().unwrap();
}
