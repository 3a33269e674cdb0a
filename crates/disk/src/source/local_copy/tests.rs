//! The copy against a source that counts, waits, fails and lies.

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{OnceLock, Weak};
use std::time::{Duration, Instant};

use onecopy_testing::{until, until_seen};

use super::*;
use crate::storage::{PLANTED, plant};

const SIZE_BYTES: u64 = (6 << 20) + 4096 * 3;

/// A source whose bytes are known by their place; every other megabyte is zeros.
#[derive(Default)]
struct Far {
    /// How often each cluster was read.
    reads: Mutex<BTreeMap<u64, u32>>,
    /// So many reads fail from now on.
    failures: AtomicU32,
    is_closed: AtomicBool,
    tells_zeros: bool,
}

fn byte(at: u64) -> u8 {
    if (at >> 20).is_multiple_of(2) { (at / 512 % 255 + 1) as u8 } else { 0 }
}

fn expected(range: Range<u64>) -> Vec<u8> {
    range.map(byte).collect()
}

impl Far {
    fn total_reads(&self) -> u32 {
        self.reads.lock().unwrap().values().sum()
    }
}

impl Source for Far {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        assert!(offset + into.len() as u64 <= SIZE_BYTES);
        if self.is_closed.load(Ordering::SeqCst) {
            return Err(SourceError::new("far", "closed"));
        }
        let take = |left: u32| left.checked_sub(1);
        if self.failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok() {
            return Err(SourceError::new("far", "the link is down"));
        }
        for cluster in offset / CLUSTER_BYTES..(offset + into.len() as u64).div_ceil(CLUSTER_BYTES) {
            *self.reads.lock().unwrap().entry(cluster).or_default() += 1;
        }
        for (at, byte_here) in (offset..).zip(into.iter_mut()) {
            *byte_here = byte(at);
        }
        Ok(())
    }

    fn is_local(&self, _offset: u64, _length: u64) -> bool {
        false
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, SourceError> {
        if !self.tells_zeros {
            return Ok(vec![Extent { range, is_zero: false }]);
        }
        let (mut extents, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let end = (((at >> 20) + 1) << 20).min(range.end);
            extents.push(Extent { range: at..end, is_zero: byte(at) == 0 });
            at = end;
        }
        Ok(extents)
    }

    fn identity(&self) -> Option<String> {
        Some("far, far away".into())
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
    }

    fn describe(&self) -> String {
        "far".into()
    }
}

const ON_DEMAND: LocalCopyOptions = LocalCopyOptions { background: false, limit_bytes_per_second: None };

fn copy(directory: &Path, far: &Arc<Far>, options: LocalCopyOptions) -> LocalCopy {
    far.is_closed.store(false, Ordering::SeqCst);
    let far: Arc<dyn Source> = Arc::clone(far) as _;
    LocalCopy::open(directory, |_| Ok(far), options).unwrap()
}

fn read(copy: &LocalCopy, range: Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0xee; (range.end - range.start) as usize];
    copy.read(range.start, &mut bytes).unwrap();
    bytes
}

fn wait_until_whole(copy: &LocalCopy) {
    until_seen("the copy is whole", || copy.hydration().unwrap(), |hydration| hydration.is_whole);
}

fn wait_until_left(far: &Far) {
    until("the copy has closed its source", || far.is_closed.load(Ordering::SeqCst));
}

fn never(_: Option<&Remembered>) -> Result<Arc<dyn Source>, SourceError> {
    panic!("the source is needed no more")
}

#[test]
fn what_is_read_comes_once_with_what_is_around_it() {
    let directory = tempfile::tempdir().unwrap();
    let far = Arc::new(Far::default());
    let copy = copy(directory.path(), &far, ON_DEMAND);
    assert!(!copy.is_local(70000, 512));
    assert!(!copy.try_read(70000, &mut [0; 512]).unwrap());
    assert_eq!(far.total_reads(), 0);
    assert_eq!(read(&copy, 70000..70512), expected(70000..70512));
    assert!(copy.is_local(65536, 65536) && !copy.is_local(65536, 65537));
    let mut bytes = [0; 512];
    assert!(copy.try_read(70000, &mut bytes).unwrap() && bytes[..] == expected(70000..70512));
    assert!(!copy.try_read(131072 - 256, &mut bytes).unwrap(), "half of it is not here");
    assert_eq!(read(&copy, 65536..131072), expected(65536..131072));
    assert_eq!(*far.reads.lock().unwrap(), BTreeMap::from([(1, 1)]));
    // Across what is here, what is not, and the end.
    assert_eq!(read(&copy, 1000..400_000), expected(1000..400_000));
    assert_eq!(far.total_reads(), 7);
    let past_end = read(&copy, SIZE_BYTES - 600..SIZE_BYTES + 600);
    assert_eq!(past_end, [expected(SIZE_BYTES - 600..SIZE_BYTES), vec![0; 600]].concat());
    let told = copy.hydration().unwrap();
    assert_eq!((told.faults, told.total_bytes), (3, SIZE_BYTES));
    assert_eq!(told.copied_bytes, 7 * CLUSTER_BYTES + SIZE_BYTES % CLUSTER_BYTES);
}

#[test]
fn many_readers_of_one_place_fetch_it_once() {
    let directory = tempfile::tempdir().unwrap();
    let far = Arc::new(Far::default());
    let copy = copy(directory.path(), &far, LocalCopyOptions::default());
    std::thread::scope(|scope| {
        for reader in 0..8_u64 {
            let copy = &copy;
            scope.spawn(move || {
                for step in 0..60 {
                    let at = ((step * 7 + reader) * 104_729 % (SIZE_BYTES - 200_000)) & !511;
                    assert_eq!(read(copy, at..at + 200_000), expected(at..at + 200_000));
                }
            });
        }
    });
    wait_until_whole(&copy);
    assert_eq!(read(&copy, 0..SIZE_BYTES), expected(0..SIZE_BYTES));
    assert!(far.reads.lock().unwrap().values().all(|count| *count == 1), "{:?}", far.reads);
}

#[test]
fn the_background_ends_with_a_copy_that_needs_no_source() {
    let directory = tempfile::tempdir().unwrap();
    let far = Arc::new(Far { tells_zeros: true, ..Far::default() });
    let first = copy(directory.path(), &far, LocalCopyOptions::default());
    wait_until_whole(&first);
    // A whole copy leaves its source at once, while it goes on serving.
    wait_until_left(&far);
    assert_eq!(read(&first, 0..SIZE_BYTES), expected(0..SIZE_BYTES));
    drop(first);
    // What the source said is zeros did not come: three of the six megabytes did, and the end.
    let came = far.reads.lock().unwrap().len() as u64;
    assert_eq!(came, 3 * 16 + 1);
    let again = LocalCopy::open(directory.path(), never, LocalCopyOptions::default()).unwrap();
    assert_eq!(read(&again, 0..SIZE_BYTES), expected(0..SIZE_BYTES));
    assert_eq!(again.hydration().unwrap().copied_bytes, SIZE_BYTES);
    assert!(again.is_local(0, SIZE_BYTES));
    let zeros: Vec<Extent> =
        again.extents(0..SIZE_BYTES).unwrap().into_iter().filter(|extent| extent.is_zero).collect();
    assert_eq!(zeros.iter().map(|extent| extent.range.end - extent.range.start).sum::<u64>(), 3 << 20);
    let beside = LocalCopy::open_beside(directory.path(), never, None).unwrap().unwrap();
    assert_eq!(read(&beside, 0..SIZE_BYTES), expected(0..SIZE_BYTES));
}

/// Spec: C4, C6
#[test]
fn what_is_planted_in_the_place_of_a_copy_is_refused_and_a_new_copy_is_new() {
    let directory = tempfile::tempdir().unwrap();
    let (far, own) = (Arc::new(Far::default()), directory.path().join("own"));
    drop(copy(directory.path(), &far, ON_DEMAND));
    let remote = |_: Option<&Remembered>| Ok(Arc::clone(&far) as Arc<dyn Source>);
    for path in [DATA_FILE, MAP_FILE].map(|file| directory.path().join(file)) {
        fs::rename(&path, &own).unwrap();
        for (what, told) in PLANTED {
            plant(what, &path, &own);
            let opened = LocalCopy::open(directory.path(), remote, ON_DEMAND).map(drop);
            let beside = LocalCopy::open_beside(directory.path(), remote, None).map(drop);
            for error in [opened, beside].map(Result::unwrap_err) {
                assert_eq!(error.source_name, path.display().to_string());
                assert!(error.reason.contains(told), "{what}: {error}");
            }
            if what == "directory" { fs::remove_dir(&path) } else { fs::remove_file(&path) }.unwrap();
        }
        fs::rename(&own, &path).unwrap();
    }
    fs::remove_file(directory.path().join(MAP_FILE)).unwrap();
    fs::remove_file(directory.path().join(DATA_FILE)).unwrap();
    fs::write(&own, "precious").unwrap();
    plant("link", &directory.path().join(DATA_FILE), &own);
    plant("second name", &directory.path().join("base.map.unfinished"), &own);
    assert_eq!(read(&copy(directory.path(), &far, ON_DEMAND), 0..SIZE_BYTES), expected(0..SIZE_BYTES));
    assert_eq!(fs::read(&own).unwrap(), b"precious");
}

/// A copy killed at any moment goes on from what was durable, also after a power cut while its end is written; what is
/// here at the end is what came.
///
/// Spec: D4
#[test]
fn b26_a_copy_goes_on_where_any_moment_left_it() {
    let directory = tempfile::tempdir().unwrap();
    let far = Arc::new(Far::default());
    let first = copy(directory.path(), &far, ON_DEMAND);
    for moment in 0..6_u64 {
        read(&first, moment << 20..(moment << 20) + 300_000);
        if moment == 3 {
            first.shared.persist();
        }
        // The files as they are now are what a killed process leaves.
        let left = directory.path().join(format!("left-{moment}"));
        fs::create_dir(&left).unwrap();
        for file in [DATA_FILE, MAP_FILE] {
            fs::copy(directory.path().join(file), left.join(file)).unwrap();
        }
    }
    for moment in 0..6_u64 {
        let left = directory.path().join(format!("left-{moment}"));
        let far = Arc::new(Far::default());
        let remembered = Mutex::new(None);
        let remote: Arc<dyn Source> = Arc::clone(&far) as _;
        let opened = LocalCopy::open(
            &left,
            |told| {
                *remembered.lock().unwrap() = told.cloned();
                Ok(remote)
            },
            LocalCopyOptions::default(),
        );
        let again = opened.unwrap();
        let told = remembered.into_inner().unwrap().unwrap();
        assert_eq!((told.size_bytes, told.identity.as_deref()), (SIZE_BYTES, Some("far, far away")));
        assert_eq!(read(&again, 0..SIZE_BYTES), expected(0..SIZE_BYTES), "{moment}");
        wait_until_whole(&again);
        assert_eq!(read(&again, 0..SIZE_BYTES), expected(0..SIZE_BYTES), "{moment}");
        // What was durable does not come again, what was not does.
        let kept = if moment >= 3 { 4 * 5 } else { 0 };
        assert_eq!(u64::from(far.total_reads()), SIZE_BYTES.div_ceil(CLUSTER_BYTES) - kept, "{moment}");
    }
}

/// The background keeps its limit and readers do not wait for it; what nobody needs is not copied and never shown as
/// zeros.
///
/// Spec: A5
#[test]
fn b27_a_limit_holds_the_background_and_not_the_readers() {
    let directory = tempfile::tempdir().unwrap();
    let far = Arc::new(Far::default());
    let paused = LocalCopyOptions { background: true, limit_bytes_per_second: Some(0) };
    let copy = copy(directory.path(), &far, paused);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(far.total_reads(), 0);
    assert_eq!(read(&copy, 0..512), expected(0..512));
    assert_eq!(far.total_reads(), 1);
    let limit = 2 << 20;
    let since = Instant::now();
    copy.set_hydration_limit(Some(limit));
    for _ in 0..8 {
        std::thread::sleep(Duration::from_millis(100));
        let came = u64::from(far.total_reads()) * CLUSTER_BYTES;
        // Nothing is saved up: one step of each thread is the most that can be ahead.
        let allowed = (since.elapsed().as_secs_f64() * limit as f64) as u64 + 8 * 4 * CLUSTER_BYTES;
        assert!(came <= allowed, "{came} bytes where {allowed} are allowed");
    }
    assert_eq!(copy.hydration().unwrap().limit_bytes_per_second, Some(limit));
    copy.set_hydration_limit(None);
    wait_until_whole(&copy);
}

/// Spec: A5
#[test]
fn b27_what_nobody_needs_is_left_out_and_can_still_be_read_until_the_source_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let far = Arc::new(Far::default());
    let first = copy(directory.path(), &far, LocalCopyOptions { background: true, limit_bytes_per_second: Some(0) });
    first.set_needed(Arc::new(|range: Range<u64>| range.start < 2 << 20));
    let at = 4 << 20;
    assert_eq!(read(&first, at..at + 512), expected(at..at + 512));
    first.set_hydration_limit(None);
    wait_until_whole(&first);
    wait_until_left(&far);
    let is_asked_for = |cluster: &u64| cluster * CLUSTER_BYTES < 3 << 20 || *cluster == at / CLUSTER_BYTES;
    assert!(far.reads.lock().unwrap().keys().all(is_asked_for), "{:?}", far.reads);
    let check = |copy: &LocalCopy| {
        assert_eq!(read(copy, 0..2 << 20), expected(0..2 << 20));
        assert_eq!(read(copy, at..at + 512), expected(at..at + 512));
        // Never zeros in place of what is not here.
        let error = copy.read(5 << 20, &mut [0; 512]).map(|()| "read").unwrap_err().to_string();
        assert!(error.contains("not copied"), "{error}");
    };
    check(&first);
    drop(first);
    check(&LocalCopy::open(directory.path(), never, LocalCopyOptions::default()).unwrap());
}

#[test]
fn failures_of_the_source_are_told_and_overcome() {
    let directory = tempfile::tempdir().unwrap();
    let far = Arc::new(Far { failures: AtomicU32::new(u32::MAX), ..Far::default() });
    let copy = copy(directory.path(), &far, LocalCopyOptions::default());
    let is_told = |trouble: &str| trouble.contains("the link is down");
    until_seen(
        "nine failures have happened and are told",
        || (copy.hydration().unwrap().trouble, u32::MAX - far.failures.load(Ordering::SeqCst)),
        |(trouble, failures)| trouble.as_deref().is_some_and(is_told) && *failures >= 9,
    );
    far.failures.store(0, Ordering::SeqCst);
    wait_until_whole(&copy);
    assert_eq!(copy.hydration().unwrap().trouble, None);
    assert_eq!(read(&copy, 0..SIZE_BYTES), expected(0..SIZE_BYTES));
}

#[test]
fn a_reader_sees_the_sources_failure_when_it_is_final() {
    let directory = tempfile::tempdir().unwrap();
    let far = Arc::new(Far { failures: AtomicU32::new(1), ..Far::default() });
    let copy = copy(directory.path(), &far, ON_DEMAND);
    assert!(copy.read(0, &mut [0; 512]).is_err());
    assert_eq!(read(&copy, 0..512), expected(0..512));
    copy.close();
    let error = copy.read(1 << 20, &mut [0; 512]).unwrap_err();
    assert!(error.to_string().contains("closed"), "{error}");
    assert_eq!(read(&copy, 0..512), expected(0..512));
}

/// Spec: D4
#[test]
fn b26_a_copy_that_is_not_what_came_is_found_at_the_end_and_comes_again() {
    let directory = tempfile::tempdir().unwrap();
    let far = Arc::new(Far::default());
    let first = copy(directory.path(), &far, ON_DEMAND);
    read(&first, 0..1 << 20);
    first.shared.persist();
    first.shared.data.write_all_at(&[0x55; 100], 3 * CLUSTER_BYTES + 7).unwrap();
    drop(first);
    let again = copy(directory.path(), &far, LocalCopyOptions::default());
    wait_until_whole(&again);
    assert_eq!(read(&again, 0..SIZE_BYTES), expected(0..SIZE_BYTES));
    assert_eq!(far.reads.lock().unwrap()[&3], 2);
}

#[test]
fn another_source_in_the_place_of_the_first_is_refused() {
    struct Shorter;
    impl Source for Shorter {
        fn size_bytes(&self) -> u64 {
            SIZE_BYTES - 4096
        }
        fn read(&self, _offset: u64, _into: &mut [u8]) -> Result<(), SourceError> {
            Ok(())
        }
        fn describe(&self) -> String {
            "shorter".into()
        }
    }
    let directory = tempfile::tempdir().unwrap();
    drop(copy(directory.path(), &Arc::new(Far::default()), ON_DEMAND));
    let other: Arc<dyn Source> = Arc::new(Shorter);
    let error = LocalCopy::open(directory.path(), |_| Ok(other), ON_DEMAND).map(|_| "opened").unwrap_err().to_string();
    assert!(error.contains("had"), "{error}");
    let empty = tempfile::tempdir().unwrap();
    assert!(LocalCopy::open_beside(empty.path(), never, None).unwrap().is_none());
}

/// A source that has left: it is waited for, and then it has not come.
#[derive(Default)]
struct Gone(AtomicU32);

impl Source for Gone {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES
    }

    fn read(&self, _offset: u64, _into: &mut [u8]) -> Result<(), SourceError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(LOOK_AGAIN_INTERVAL);
        Err(SourceError::new("gone", "it is away"))
    }

    fn describe(&self) -> String {
        "gone".into()
    }
}

/// A disk over a snapshot of a disk whose base is still being copied sees what the copy gets, outlives the source,
/// waits no longer than it may, and says so when a place was left out of the finished copy.
///
/// Spec: D4
#[test]
fn b62_a_reader_beside_the_writer_sees_what_came_since_and_does_not_wait_for_what_never_comes() {
    let directory = tempfile::tempdir().unwrap();
    let paused = LocalCopyOptions { background: true, limit_bytes_per_second: Some(0) };
    let writer = copy(directory.path(), &Arc::new(Far::default()), paused);
    let gone = Arc::new(Gone::default());
    let remote: Arc<dyn Source> = Arc::clone(&gone) as _;
    let beside = LocalCopy::open_beside(directory.path(), |_| Ok(remote), None).unwrap().unwrap();
    let asked = || gone.0.load(Ordering::SeqCst);
    let first = 0..CLUSTER_BYTES;
    read(&writer, first.clone());
    writer.shared.persist();
    assert_eq!(read(&beside, first.clone()), expected(first));
    assert_eq!(asked(), 0, "the source was asked for what is here");
    // It comes while it is waited for.
    let second = CLUSTER_BYTES..3 * CLUSTER_BYTES;
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(&beside, second.clone()));
        until("the source is asked twice", || asked() >= 2);
        read(&writer, second.clone());
        writer.shared.persist();
        assert_eq!(reading.join().unwrap(), expected(second.clone()));
    });
    // It never comes: the copy is finished without it.
    writer.set_needed(Arc::new(|range: Range<u64>| range.start < 5 << 20));
    writer.set_hydration_limit(None);
    wait_until_whole(&writer);
    let asked_before = asked();
    assert_eq!(read(&beside, 0..4 << 20), expected(0..4 << 20));
    let error = beside.read(6 << 20, &mut [0; 512]).map(|()| "read").unwrap_err().to_string();
    assert!(error.contains("not copied"), "{error}");
    assert_eq!(asked(), asked_before, "who sees that the copy is whole leaves its source, too");
}

/// A source that leaves once the copy's writer has finished and another reader has seen that.
struct Leaving {
    writer: LocalCopy,
    reader: OnceLock<Weak<Shared>>,
}

impl Source for Leaving {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES
    }

    fn read(&self, _offset: u64, _into: &mut [u8]) -> Result<(), SourceError> {
        self.writer.set_hydration_limit(None);
        wait_until_whole(&self.writer);
        let reader = self.reader.get().unwrap().upgrade().unwrap();
        assert!(reader.map.look_again(0).unwrap());
        Err(SourceError::new("leaving", "it is away"))
    }

    fn describe(&self) -> String {
        "leaving".into()
    }
}

/// Spec: D4
#[test]
fn b62_a_reader_beside_the_writer_gets_what_was_finished_while_the_source_was_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let paused = LocalCopyOptions { background: true, limit_bytes_per_second: Some(0) };
    let writer = copy(directory.path(), &Arc::new(Far::default()), paused);
    let leaving = Arc::new(Leaving { writer, reader: OnceLock::new() });
    let remote: Arc<dyn Source> = Arc::clone(&leaving) as _;
    let beside = LocalCopy::open_beside(directory.path(), |_| Ok(remote), None).unwrap().unwrap();
    leaving.reader.set(Arc::downgrade(&beside.shared)).unwrap();
    assert_eq!(read(&beside, 0..CLUSTER_BYTES), expected(0..CLUSTER_BYTES));
}

/// Spec: D4
#[test]
fn b62_a_reader_beside_the_writer_waits_no_longer_than_its_patience() {
    let directory = tempfile::tempdir().unwrap();
    let _writer = copy(directory.path(), &Arc::new(Far::default()), ON_DEMAND);
    let gone = Arc::new(Gone::default());
    let remote: Arc<dyn Source> = Arc::clone(&gone) as _;
    let patience = Some(LOOK_AGAIN_INTERVAL);
    let beside = LocalCopy::open_beside(directory.path(), |_| Ok(remote), patience).unwrap().unwrap();
    let error = beside.read(0, &mut [0; 512]).map(|()| "read").unwrap_err().to_string();
    assert!(error.contains("it is away"), "{error}");
    assert_eq!(gone.0.load(Ordering::SeqCst), 1);
}
