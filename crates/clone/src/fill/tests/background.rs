//! A clone that becomes whole by itself.

use std::os::fd::AsFd;

use super::*;

fn start(
    filling: &Arc<Filling>,
    hot: Vec<(FileNumber, ByteRange)>,
    limiter: &Arc<Limiter>,
) -> (Background, Arc<Mutex<Vec<FileNumber>>>) {
    let whole = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&whole);
    let on_file_whole = move |file| told.lock().unwrap().push(file);
    (Background::start(Arc::clone(filling), hot, Arc::clone(limiter), on_file_whole).unwrap(), whole)
}

#[test]
fn the_background_makes_every_file_whole_and_tells_of_each_once() {
    let harness = Harness::new((0..100).map(|number| content(number, usize::from(number) * 3000)).collect());
    let filling = harness.filling();
    filling.ensure(FileNumber(50), ByteRange::WHOLE).unwrap();
    let (background, whole) = start(&filling, Vec::new(), &Arc::new(Limiter::new(None)));
    background.wait();

    assert!(filling.whole());
    let mut told = whole.lock().unwrap().clone();
    assert_eq!(told[..2], [FileNumber(0), FileNumber(1)], "small ones first");
    told.sort();
    assert_eq!(told, (0..100).map(FileNumber).collect::<Vec<_>>());
    for (number, frozen) in harness.frozen.iter().enumerate() {
        assert_eq!(harness.cloned(FileNumber(number as u32)), *frozen, "{number}");
    }
    let progress = filling.progress();
    assert_eq!((progress.files_left, progress.filled_bytes), (0, progress.total_bytes));
    assert_eq!(progress.background_bytes + progress.demand_bytes, progress.total_bytes);
    assert_eq!(progress.demand_bytes, 150_000);
}

#[test]
fn files_about_which_the_source_is_asked_most_for_what_they_lack_come_before_the_smallest() {
    let harness = Harness::new([1, 2, 3, 40].map(|chunks| content(chunks, usize::from(chunks) * CHUNK)).to_vec());
    let filling = harness.filling();
    // 10 accesses a missing chunk, 1, and none: the first file lacks nothing.
    for (file, accesses) in [(3, 400), (2, 3), (0, 1000)] {
        (0..accesses).for_each(|_| filling.note_access(FileNumber(file)));
    }
    filling.ensure(FIRST, ByteRange::WHOLE).unwrap();
    let (background, whole) = start(&filling, Vec::new(), &Arc::new(Limiter::new(None)));
    background.wait();
    assert_eq!(*whole.lock().unwrap(), [3, 2, 0, 1].map(FileNumber));
}

#[test]
fn what_the_source_begins_to_access_comes_after_the_files_that_are_written_back_together() {
    let harness = Harness::new((1..=70).map(|number| content(number, usize::from(number))).collect());
    let filling = harness.filling();
    let whole = Arc::new(Mutex::new(Vec::new()));
    let (told, asked) = (Arc::clone(&whole), Arc::clone(&filling));
    let on_file_whole = move |file| {
        told.lock().unwrap().push(file);
        [68, 69, 69, 69].map(FileNumber).into_iter().for_each(|busy| asked.note_access(busy));
    };
    let limiter = Arc::new(Limiter::new(None));
    Background::start(Arc::clone(&filling), Vec::new(), limiter, on_file_whole).unwrap().wait();
    assert!(filling.whole());
    let expected: Vec<_> = (0..32).chain([69, 68]).chain(32..68).map(FileNumber).collect();
    assert_eq!(*whole.lock().unwrap(), expected);
}

#[test]
fn hot_ranges_come_first_and_a_stopped_background_ends() {
    let harness = Harness::new(vec![content(1, 100 * CHUNK), content(2, CHUNK)]);
    let filling = harness.filling();
    let hot = ByteRange::new(90 * CHUNK_BYTES, CHUNK_BYTES);
    harness.origin.gate.close();
    let limiter = Arc::new(Limiter::new(None));
    let (background, whole) = start(&filling, vec![(FIRST, hot)], &limiter);
    harness.origin.gate.wait_for(1);
    // Nothing else may pass once the hot range is there.
    limiter.set_bytes_per_second(Some(0));
    harness.origin.gate.open();
    filling.ensure(FIRST, hot).unwrap();
    assert_eq!(filling.progress().filled_bytes, CHUNK_BYTES);
    assert!(!background.is_finished());
    drop(background);
    assert_eq!(filling.progress().filled_bytes, CHUNK_BYTES);
    assert!(whole.lock().unwrap().is_empty() && !filling.whole() && filling.failure().is_none());
    assert_eq!(harness.cloned(FIRST)[90 * CHUNK..91 * CHUNK], harness.frozen[0][90 * CHUNK..91 * CHUNK]);
}

/// On another host a range that is brought ahead travels, whoever has it already.
#[test]
fn what_came_while_the_background_waited_for_its_turn_is_not_brought_again() {
    let harness = Harness::new(vec![content(1, 40 * CHUNK)]);
    let filling = harness.filling();
    let limiter = Arc::new(Limiter::new(Some(0)));
    let (background, _) = start(&filling, Vec::new(), &limiter);
    // It has chosen its first range then, were it to keep it.
    onecopy_testing::until("it waits for its turn", || limiter.waits() > 0);
    filling.ensure(FIRST, ByteRange::new(0, 20 * CHUNK_BYTES)).unwrap();
    limiter.set_bytes_per_second(None);
    background.wait();
    assert!(filling.whole() && harness.cloned(FIRST) == harness.frozen[0]);
    assert_eq!(harness.origin.prefetched_bytes.load(Ordering::SeqCst), 20 * CHUNK_BYTES);
}

#[test]
fn a_file_without_a_name_is_not_filled() {
    let harness = Harness::new(vec![content(1, 100 * CHUNK), content(2, CHUNK)]);
    let filling = harness.filling();
    fs::remove_file(harness.path("clone", FIRST)).unwrap();
    let (background, whole) = start(&filling, Vec::new(), &Arc::new(Limiter::new(None)));
    background.wait();
    assert!(filling.whole() && filling.is_file_filled(FIRST));
    assert_eq!(*whole.lock().unwrap(), [FileNumber(1), FIRST]);
    assert_eq!(filling.progress().background_bytes, CHUNK_BYTES);
}

#[test]
fn a_failure_ends_the_background() {
    let harness = Harness::new(vec![content(1, CHUNK)]);
    harness.origin.lost.store(true, Ordering::SeqCst);
    let filling = harness.filling();
    let (background, whole) = start(&filling, Vec::new(), &Arc::new(Limiter::new(None)));
    background.wait();
    assert!(filling.failure().is_some() && !filling.whole() && whole.lock().unwrap().is_empty());
}

#[test]
fn a_file_that_cannot_be_brought_to_disk_fails_the_clone() {
    let harness = Harness::new(vec![vec![0; CHUNK]]);
    // A pipe takes nothing and has no disk: sync_file_range(2) says ESPIPE.
    let (_reader, writer) = std::io::pipe().unwrap();
    let files = vec![File::from(writer.as_fd().try_clone_to_owned().unwrap())];
    let bitmap = SharedBitmap::create(&harness.image).unwrap();
    let filling = Filling::new(Arc::clone(&harness.image), files, harness.origin.clone(), bitmap).unwrap();
    let filling = Arc::new(filling);
    let (background, whole) = start(&filling, Vec::new(), &Arc::new(Limiter::new(None)));
    background.wait();
    let reason = filling.failure().unwrap();
    assert!(reason.starts_with("cannot bring to disk 0: "), "{reason}");
    assert!(whole.lock().unwrap().is_empty() && !filling.whole());
}
