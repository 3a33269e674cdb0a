//! One call after another, and what two threads do to each other.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use super::*;

#[test]
fn what_is_asked_for_is_there_and_nothing_else() {
    let harness = Harness::new(vec![content(1, 10 * CHUNK + 100), content(2, 3 * CHUNK)]);
    let filling = harness.filling();
    assert!(!filling.is_filled(FIRST, ByteRange::WHOLE));
    filling.ensure(FIRST, ByteRange::new(CHUNK_BYTES + 10, CHUNK_BYTES)).unwrap();

    let mut expected = vec![0; 10 * CHUNK + 100];
    expected[CHUNK..3 * CHUNK].copy_from_slice(&harness.frozen[0][CHUNK..3 * CHUNK]);
    assert_eq!(harness.cloned(FIRST), expected);
    assert!(filling.is_filled(FIRST, ByteRange::new(CHUNK_BYTES, 2 * CHUNK_BYTES)));
    assert!(!filling.is_filled(FIRST, ByteRange::new(CHUNK_BYTES, 2 * CHUNK_BYTES + 1)));
    let progress = filling.progress();
    assert_eq!((progress.total_bytes, progress.filled_bytes), ((13 * CHUNK + 100) as u64, 2 * CHUNK_BYTES));
    assert_eq!((progress.demand_faults, progress.demand_bytes, progress.files_left), (1, 2 * CHUNK_BYTES, 2));
    // As if the last chunk, which is short, were a whole one.
    assert_eq!([FIRST, FileNumber(1)].map(|file| filling.missing_bytes(file)), [9 * CHUNK_BYTES, 3 * CHUNK_BYTES]);

    // The last chunk is short; beyond the end there is nothing to do.
    filling.ensure(FIRST, ByteRange::WHOLE).unwrap();
    filling.ensure(FIRST, ByteRange::new(1 << 40, 1)).unwrap();
    assert_eq!(harness.cloned(FIRST), harness.frozen[0]);
    assert!(filling.is_file_filled(FIRST) && !filling.is_file_filled(FileNumber(1)));
    assert_eq!(filling.missing_bytes(FIRST), 0);
    assert_eq!(harness.origin.read_bytes.load(Ordering::SeqCst), (10 * CHUNK + 100) as u64, "no chunk was read twice");
    assert_eq!(filling.progress().demand_faults, 2);
}

#[test]
fn zeros_stay_holes() {
    let mut frozen = vec![0; 64 * CHUNK];
    frozen[10 * CHUNK..12 * CHUNK].fill(7);
    frozen[40 * CHUNK - 1] = 7;
    let harness = Harness::new(vec![frozen, Vec::new()]);
    let filling = harness.filling();
    filling.ensure(FIRST, ByteRange::WHOLE).unwrap();
    assert_eq!(harness.cloned(FIRST), harness.frozen[0]);
    let blocks = fs::metadata(harness.path("clone", FIRST)).unwrap().blocks();
    assert!(blocks * 512 <= 3 * CHUNK_BYTES, "{blocks}");
    assert!(filling.is_file_filled(FIRST));
}

#[test]
fn nobody_waits_who_must_not() {
    let harness = Harness::new(vec![content(1, 200 * CHUNK)]);
    let filling = harness.filling();
    assert!(filling.try_ensure_now(FIRST, ByteRange::new(0, CHUNK_BYTES)).unwrap());
    assert!(!filling.try_ensure_now(FIRST, ByteRange::WHOLE).unwrap(), "too much for one who must not wait");
    harness.origin.never_now();
    assert!(filling.try_ensure_now(FIRST, ByteRange::new(0, CHUNK_BYTES)).unwrap(), "it is there already");
    assert!(!filling.try_ensure_now(FIRST, ByteRange::new(0, 2 * CHUNK_BYTES)).unwrap());
    assert!(!filling.is_filled(FIRST, ByteRange::new(CHUNK_BYTES, 1)));
    filling.ensure(FIRST, ByteRange::WHOLE).unwrap();
    assert_eq!(harness.cloned(FIRST), harness.frozen[0]);
}

#[test]
fn a_chunk_in_flight_is_waited_for_and_read_once() {
    let harness = Harness::new(vec![content(1, 4 * CHUNK)]);
    let filling = harness.filling();
    harness.origin.gate.close();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| filling.ensure(FIRST, ByteRange::new(0, 2 * CHUNK_BYTES)));
        harness.origin.gate.wait_for(1);
        let second = scope.spawn(|| filling.ensure(FIRST, ByteRange::WHOLE));
        let cut = scope.spawn(|| filling.forget_from(FIRST, 0));
        harness.origin.now_every.store(1, Ordering::SeqCst);
        assert!(!filling.try_ensure_now(FIRST, ByteRange::new(CHUNK_BYTES, 1)).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!first.is_finished() && !second.is_finished() && !cut.is_finished());
        harness.origin.gate.open();
        for thread in [first, second, cut] {
            thread.join().unwrap().unwrap();
        }
    });
    assert!(harness.origin.read_bytes.load(Ordering::SeqCst) <= 4 * CHUNK_BYTES);
    assert_eq!(harness.cloned(FIRST)[..2 * CHUNK], harness.frozen[0][..2 * CHUNK]);
    assert!(filling.is_file_filled(FIRST));
}

#[test]
fn what_is_cut_off_is_never_filled() {
    let harness = Harness::new(vec![content(1, 8 * CHUNK)]);
    let filling = harness.filling();
    let cut = 2 * CHUNK_BYTES + 4096;
    filling.forget_from(FIRST, cut).unwrap();
    open(&harness.path("clone", FIRST)).set_len(cut).unwrap();
    filling.ensure(FIRST, ByteRange::WHOLE).unwrap();
    assert_eq!(harness.cloned(FIRST), harness.frozen[0][..cut as usize]);
    assert_eq!(filling.progress().filled_bytes, filling.progress().total_bytes);
    assert_eq!(harness.origin.read_bytes.load(Ordering::SeqCst), 3 * CHUNK_BYTES);
}

#[test]
fn a_later_filling_goes_on_with_the_bitmap() {
    let harness = Harness::new(vec![content(1, 70 * CHUNK + 1), content(2, 3 * CHUNK)]);
    let bitmap = {
        let filling = harness.filling();
        filling.ensure(FIRST, ByteRange::new(60 * CHUNK_BYTES, 20 * CHUNK_BYTES)).unwrap();
        filling.bitmap().as_fd().try_clone_to_owned().unwrap()
    };
    let before = harness.origin.read_bytes.load(Ordering::SeqCst);
    let filling = harness.filling_with(SharedBitmap::open(bitmap).unwrap());
    assert_eq!(filling.progress().filled_bytes, 10 * CHUNK_BYTES + 1);
    for file in [FIRST, FileNumber(1)] {
        filling.ensure(file, ByteRange::WHOLE).unwrap();
        assert_eq!(harness.cloned(file), harness.frozen[file.0 as usize]);
    }
    assert_eq!(harness.origin.read_bytes.load(Ordering::SeqCst) - before, 63 * CHUNK_BYTES);
    assert_eq!(filling.progress().filled_bytes, filling.progress().total_bytes);
}

#[test]
fn a_failure_reaches_everybody_and_stays() {
    let harness = Harness::new(vec![content(1, 4 * CHUNK)]);
    let filling = harness.filling();
    filling.ensure(FIRST, ByteRange::new(0, 1)).unwrap();
    harness.origin.gate.close();
    let expected = "cannot read the frozen content of 0: the frozen content is lost: it was only a test";
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| filling.ensure(FIRST, ByteRange::WHOLE));
        harness.origin.gate.wait_for(1);
        let waiting = scope.spawn(|| filling.ensure(FIRST, ByteRange::WHOLE));
        harness.origin.lost.store(true, Ordering::SeqCst);
        harness.origin.gate.open();
        for thread in [reading, waiting] {
            assert_eq!(thread.join().unwrap(), Err(FillError::Discarded(expected.into())));
        }
    });
    filling.fail("another reason");
    assert_eq!(filling.failure().as_deref(), Some(expected));
    // Also for what is there: nobody shall trust this clone any more.
    assert!(filling.ensure(FIRST, ByteRange::new(0, 1)).is_err());
    assert!(filling.try_ensure_now(FIRST, ByteRange::new(0, 1)).is_err());
    assert!(filling.forget_from(FIRST, 0).is_err());
}

#[test]
fn a_full_disk_is_named_with_the_file() {
    let harness = Harness::new(vec![content(1, CHUNK)]);
    let bitmap = SharedBitmap::create(&harness.image).unwrap();
    let files = vec![open(std::path::Path::new("/dev/full"))];
    let filling = Filling::new(Arc::clone(&harness.image), files, harness.origin.clone(), bitmap).unwrap();
    filling.ensure(FIRST, ByteRange::WHOLE).unwrap_err();
    assert_eq!(filling.failure().as_deref(), Some("cannot write 0: No space left on device (os error 28)"));
    assert!(!filling.is_filled(FIRST, ByteRange::WHOLE));
}

#[test]
fn files_that_are_not_the_images_are_refused() {
    let harness = Harness::new(vec![content(1, CHUNK), content(2, CHUNK)]);
    let other = Harness::new(vec![content(1, CHUNK)]);
    let too_few = Filling::new(
        Arc::clone(&harness.image),
        other.files(),
        other.origin.clone(),
        SharedBitmap::create(&harness.image).unwrap(),
    );
    let too_small = Filling::new(
        Arc::clone(&harness.image),
        harness.files(),
        harness.origin.clone(),
        SharedBitmap::create(&other.image).unwrap(),
    );
    assert!(too_few.is_err() && too_small.is_err());
}

/// A source that goes on without the clone just while it is read.
struct Overtaking {
    content: Vec<u8>,
    filling: std::sync::OnceLock<std::sync::Weak<Filling>>,
}

impl Overtaking {
    fn give_up(&self) {
        self.filling.get().and_then(std::sync::Weak::upgrade).unwrap().fail("the source goes on without it");
    }
}

impl Origin for Overtaking {
    fn read(&self, _file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), OriginError> {
        buffer.copy_from_slice(&self.content[offset_bytes as usize..][..buffer.len()]);
        self.give_up();
        Ok(())
    }

    fn read_now(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<bool, OriginError> {
        self.read(file, offset_bytes, buffer).map(|()| true)
    }
}

#[test]
fn what_was_read_while_the_clone_was_given_up_counts_for_nobody() {
    for now in [true, false] {
        let harness = Harness::new(vec![content(1, 4 * CHUNK)]);
        let origin = Overtaking { content: content(2, 4 * CHUNK), filling: std::sync::OnceLock::new() };
        let origin = Arc::new(origin);
        let bitmap = SharedBitmap::create(&harness.image).unwrap();
        let filling = Filling::new(Arc::clone(&harness.image), harness.files(), Arc::clone(&origin) as _, bitmap);
        let filling = Arc::new(filling.unwrap());
        origin.filling.set(Arc::downgrade(&filling)).unwrap();
        let range = ByteRange::new(0, CHUNK_BYTES);
        match now {
            true => filling.try_ensure_now(FIRST, range).map(drop),
            false => filling.ensure(FIRST, range),
        }
        .expect_err("it may be too new");
        assert!(!filling.is_filled(FIRST, range));
    }
}

#[test]
fn a_successor_does_not_go_on_with_what_was_given_up() {
    let harness = Harness::new(vec![content(1, 4 * CHUNK)]);
    let filling = harness.filling();
    let copy = || SharedBitmap::open(filling.bitmap().as_fd().try_clone_to_owned().unwrap()).unwrap();
    assert_eq!(harness.filling_with(copy()).failure(), None);
    filling.fail("the source goes on without it");
    let successor = harness.filling_with(copy());
    assert!(successor.failure().is_some());
    successor.ensure(FIRST, ByteRange::WHOLE).expect_err("the source has gone on");
}
