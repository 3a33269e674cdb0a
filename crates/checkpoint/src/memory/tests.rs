//! Pages, epochs, release and taking over against plain vectors, without a kernel in between.

use onecopy_testing::{TestDirectory, WAIT_MAX, seed, until};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::pages::{EPOCHS_MAX, Pages};
use super::shadow::Shadow;
use super::state::{Bits, Slot, State};
use super::store::{MemoryStatistics, SPARE_SLOTS, Store};
use crate::{CheckpointError, PAGE_BYTES};

const PAGES: usize = 96;
const SIZE: u64 = (PAGES * PAGE_BYTES) as u64;

type Content = Vec<[u8; PAGE_BYTES]>;

fn fresh(directory: &TestDirectory, epochs_pages: u64, drops: bool) -> Store {
    let create = |size_bytes| Shadow::create(&directory.join("shadow"), size_bytes);
    let store = Store::fresh(create, SIZE, epochs_pages * PAGE_BYTES as u64).unwrap();
    if !drops {
        store.pages().state.set_keeping();
    }
    store
}

/// What the next server finds.
fn successor(before: &Store, directory: &TestDirectory) -> Store {
    let state = State::open(before.pages().state.descriptor().unwrap()).unwrap();
    let next = Store::kept(state, &directory.join("shadow")).unwrap();
    *next.counters.lock().unwrap() = *before.counters.lock().unwrap();
    next
}

fn check_now(store: &Store, model: &Content) {
    let mut found = [0; PAGE_BYTES];
    for (page, expected) in (0u32..).zip(model) {
        store.read_now(page, &mut found).unwrap();
        assert!(found == *expected, "page {page} now: {} instead of {}", found[0], expected[0]);
    }
}

fn check_epoch(store: &Store, epoch: u64, model: &Content, before: &Content) {
    let (changed, present) = (store.changed_since(epoch - 1, epoch).unwrap(), store.present(epoch).unwrap());
    assert!(changed.is_sorted() && present.is_sorted());
    let pages = store.pages();
    let mut found = [0; PAGE_BYTES];
    for (page, expected) in (0u32..).zip(model) {
        pages.read_at(&store.shadow, epoch, page, &mut found).unwrap();
        assert!(found == *expected, "page {page} of epoch {epoch}: {} instead of {}", found[0], expected[0]);
        let is_changed = before[page as usize] != *expected;
        assert!(!is_changed || changed.binary_search(&page).is_ok(), "page {page} is not told as changed in {epoch}");
        assert!(
            *expected == [0; PAGE_BYTES] || present.binary_search(&page).is_ok(),
            "page {page} is not told as there"
        );
    }
}

/// Spec: D6
#[test]
fn t4_all_ended_epochs_are_let_go_at_once_and_again() {
    let directory = TestDirectory::new().unwrap();
    let store = fresh(&directory, PAGES as u64, false);
    let mut now: Content = vec![[0; PAGE_BYTES]; PAGES];
    store.release_all().unwrap();
    for byte in 1..4 {
        store.write(0, &[byte; PAGE_BYTES]).unwrap();
        store.pages().cut().unwrap();
    }
    now[0] = [3; PAGE_BYTES];
    assert_eq!(store.pages().kept(), 3);
    for _ in 0..2 {
        store.release_all().unwrap();
        assert_eq!(store.pages().kept(), 0);
        check_now(&store, &now);
    }
    let (epoch, _) = store.pages().cut().unwrap();
    assert!(store.present(epoch).is_ok(), "those that follow are kept");
}

/// Random writes, zeros, cuts, deaths and, where there is room for epochs, releases.
fn run(random: &mut StdRng, epochs_pages: u64) -> MemoryStatistics {
    let is_released = epochs_pages > 0;
    let directory = TestDirectory::new().unwrap();
    let mut store = fresh(&directory, epochs_pages, false);
    let mut now: Content = vec![[0; PAGE_BYTES]; PAGES];
    // Of each epoch, what it showed at its end.
    let mut ended: Vec<(u64, Content)> = vec![(0, now.clone())];
    for step in 0..400 {
        match random.random_range(0..100) {
            0..70 => {
                let (from, length) = (random.random_range(0..SIZE), random.random_range(1..20_000));
                let end = (from + length).min(SIZE);
                // Whole pages as a page cache writes them, or any bytes.
                let (from, end) = match random.random_bool(0.8) {
                    true => (from & !4095, end.next_multiple_of(4096)),
                    false => (from, end),
                };
                let byte = random.random_range(0..4u8);
                let data = vec![byte; usize::try_from(end - from).unwrap()];
                store.write(from, &data).unwrap();
                now.as_flattened_mut()[from as usize..end as usize].fill(byte);
            }
            70..78 => {
                let (first, count) = (random.random_range(0..PAGES), random.random_range(1..8));
                let count = count.min(PAGES - first);
                store.zero((first * PAGE_BYTES) as u64, (count * PAGE_BYTES) as u64).unwrap();
                now[first..first + count].fill([0; PAGE_BYTES]);
            }
            78..88 if ended.len() < EPOCHS => {
                let (epoch, _) = store.pages().cut().unwrap();
                ended.push((epoch, now.clone()));
            }
            88..93 => {
                let kept = store.pages().kept();
                if is_released && kept > 0 {
                    let upto = store.pages().state.released() + random.random_range(1..=kept);
                    store.release(upto).unwrap();
                }
            }
            93..97 => store = successor(&store, &directory),
            _ => {
                // Half way: what is released is not in the shadow yet.
                if is_released && store.pages().release_oldest() && random.random_bool(0.5) {
                    store.fold_some().unwrap();
                }
                store = successor(&store, &directory);
            }
        }
        if step % 20 == 0 {
            check_now(&store, &now);
            let released = store.pages().state.released();
            let first_kept = ended.iter().position(|(epoch, _)| *epoch > released).unwrap_or(ended.len());
            ended.drain(..first_kept.saturating_sub(1));
            for pair in ended.windows(2).filter(|pair| pair[1].0 > released) {
                check_epoch(&store, pair[1].0, &pair[1].1, &pair[0].1);
            }
        }
    }
    // In the end the shadow alone has all.
    let (last, _) = store.pages().cut().unwrap();
    store.release(last).unwrap();
    let mut found = [0; PAGE_BYTES];
    for (page, expected) in (0u32..).zip(&now) {
        store.shadow.read(page, &mut found).unwrap();
        assert!(found == *expected, "page {page} of the shadow");
        assert!(store.pages().state.bit(Bits::Held, page) || *expected == [0; PAGE_BYTES]);
    }
    assert!(store.pages().has_room());
    *store.counters.lock().unwrap()
}

const EPOCHS: usize = 12;

/// An epoch of a memory shows what was written before its end and nothing later, until it is released, whoever serves
/// it; where room is scarce the oldest epochs go and nothing else.
///
/// Spec: D6
#[test]
fn t1_every_epoch_shows_what_was_written_before_its_end_also_to_the_next_server() {
    let mut random = StdRng::seed_from_u64(seed());
    for _ in 0..6 {
        let statistics = run(&mut random, (EPOCHS * PAGES) as u64);
        assert_eq!(statistics.forced_releases, 0);
    }
}

/// Spec: D6
#[test]
fn t1_where_room_is_scarce_the_oldest_epochs_go_and_nothing_else_is_lost() {
    let mut random = StdRng::seed_from_u64(seed());
    let forced: u64 = (0..6).map(|_| run(&mut random, 0).forced_releases).sum();
    assert!(forced > 0, "room was never scarce");
}

/// A page whose content is in the page cache at most is never shown as something older, and no epoch is cut while there
/// is one.
///
/// Spec: D6
#[test]
fn t2_what_is_not_kept_is_never_shown_and_keeps_every_cut_from_being_made() {
    let directory = TestDirectory::new().unwrap();
    let store = fresh(&directory, 0, true);
    let mut found = [0; PAGE_BYTES];
    store.write(4096, &[5; 2 * PAGE_BYTES]).unwrap();
    store.zero(8192, 4096).unwrap();
    store.read_now(0, &mut found).unwrap();
    store.read_now(2, &mut found).unwrap();
    assert_eq!(found, [0; PAGE_BYTES]);
    assert!(matches!(store.read_now(1, &mut found), Err(CheckpointError::PageNotKept { page: 1 })));
    // A part of a page needs the rest of it.
    assert_eq!(store.write(4096, &[6; 100]), Err(libc::EIO));
    assert!(matches!(store.pages().cut(), Err(CheckpointError::NotKept { pages: 1 })));
    store.pages().state.set_keeping();
    assert!(matches!(store.pages().cut(), Err(CheckpointError::NotKept { pages: 1 })));
    let store = successor(&store, &directory);
    assert!(matches!(store.read_now(1, &mut found), Err(CheckpointError::PageNotKept { page: 1 })));
    store.write(4096, &[7; PAGE_BYTES]).unwrap();
    assert_eq!(store.pages().cut().unwrap(), (1, 2));
}

/// Spec: D6
#[test]
fn t2_a_shadow_that_cannot_be_written_loses_no_page_silently() {
    let directory = TestDirectory::new().unwrap();
    let mut store = fresh(&directory, 0, false);
    store.write(0, &[1; PAGES * PAGE_BYTES]).unwrap();
    let (first, _) = store.pages().cut().unwrap();
    // Read only from now on.
    std::fs::remove_file(directory.join("shadow")).unwrap();
    let broken = Shadow::broken(&directory.join("shadow"), SIZE);
    let sound = std::mem::replace(&mut store.shadow, broken);
    // The kernel merges pages into one request, and takes all of them for clean when that has failed.
    assert_eq!(store.write(0, &[2; PAGES * PAGE_BYTES]), Err(libc::EIO));
    let dropped = store.pages().dropped();
    assert_eq!(dropped, PAGES as u64 - SPARE_SLOTS);
    assert!(matches!(store.pages().cut(), Err(CheckpointError::NotKept { pages }) if pages == dropped));
    assert!(matches!(store.read_now(95, &mut [0; PAGE_BYTES]), Err(CheckpointError::PageNotKept { page: 95 })));
    // It is written again: the epoch whose room was needed is gone, and all that is written back counts.
    store.shadow = sound;
    store.write(0, &[2; PAGES * PAGE_BYTES]).unwrap();
    assert!(matches!(store.pages().changed(first), Err(CheckpointError::UnknownEpoch { .. })));
    store.pages().cut().unwrap();
    check_now(&store, &vec![[2; PAGE_BYTES]; PAGES]);
}

/// Spec: D6
#[test]
fn t4_what_is_written_back_while_it_is_copied_is_kept_as_it_was_written() {
    let directory = TestDirectory::new().unwrap();
    let store = fresh(&directory, 0, true);
    store.write(0, &[1; 2 * PAGE_BYTES]).unwrap();
    store.pages().state.set_keeping();
    // Both were read as they were; then one is written back.
    store.write(0, &[2; PAGE_BYTES]).unwrap();
    assert!(!store.copy_out(0, &[1; PAGE_BYTES], 0).unwrap());
    assert!(store.copy_out(1, &[1; PAGE_BYTES], 0).unwrap());
    let mut model = vec![[0; PAGE_BYTES]; PAGES];
    (model[0], model[1]) = ([2; PAGE_BYTES], [1; PAGE_BYTES]);
    check_now(&store, &model);
}

/// Spec: D6
#[test]
fn t2_a_page_that_there_is_no_memory_for_is_not_kept_and_nothing_else_is_lost() {
    let directory = TestDirectory::new().unwrap();
    let store = fresh(&directory, 2, false);
    store.write(0, &[1; 2 * PAGE_BYTES]).unwrap();
    let (epoch, _) = store.pages().cut().unwrap();
    store.write(0, &[2; PAGE_BYTES]).unwrap();
    let state = store.pages().state.descriptor().unwrap();
    store.pages().state.exhaust();
    // One that has a frame in this epoch, one that needs one, and one that needs none.
    assert_eq!(store.write(0, &[3; 2 * PAGE_BYTES]), Err(libc::EIO));
    store.write(8192, &[0; PAGE_BYTES]).unwrap();
    let mut found = [0; PAGE_BYTES];
    for page in 0..2 {
        assert!(matches!(store.read_now(page, &mut found), Err(CheckpointError::PageNotKept { .. })));
        store.pages().read_at(&store.shadow, epoch, page, &mut found).unwrap();
        assert_eq!(found, [1; PAGE_BYTES]);
    }
    assert!(matches!(store.pages().cut(), Err(CheckpointError::NotKept { pages: 2 })));
    let store = Store::kept(State::open(state).unwrap(), &directory.join("shadow")).unwrap();
    store.write(0, &[4; 2 * PAGE_BYTES]).unwrap();
    store.pages().cut().unwrap();
    let mut model = vec![[0; PAGE_BYTES]; PAGES];
    model[..2].fill([4; PAGE_BYTES]);
    check_now(&store, &model);
}

/// Spec: D6
#[test]
fn t4_what_could_not_be_written_back_while_it_was_copied_is_copied_again() {
    let directory = TestDirectory::new().unwrap();
    let mut store = fresh(&directory, 0, false);
    store.write(0, &[1; PAGES * PAGE_BYTES]).unwrap();
    store.pages().cut().unwrap();
    std::fs::remove_file(directory.join("shadow")).unwrap();
    let broken = Shadow::broken(&directory.join("shadow"), SIZE);
    let sound = std::mem::replace(&mut store.shadow, broken);
    assert_eq!(store.write(0, &[2; PAGES * PAGE_BYTES]), Err(libc::EIO));
    // 2 was read out of the page cache; then 3 is written back, and cannot be kept.
    let (last, failures) = (PAGES as u32 - 1, store.pages().failures());
    assert_eq!(store.write(u64::from(last) * 4096, &[3; PAGE_BYTES]), Err(libc::EIO));
    store.shadow = sound;
    assert!(!store.copy_out(last, &[2; PAGE_BYTES], failures).unwrap());
    assert!(matches!(store.read_now(last, &mut [0; PAGE_BYTES]), Err(CheckpointError::PageNotKept { .. })));
    let failures = store.pages().failures();
    assert!(store.copy_out(last, &[3; PAGE_BYTES], failures).unwrap());
}

/// Spec: D6
#[test]
fn t1_what_is_written_back_waits_for_no_whole_release() {
    let directory = TestDirectory::new().unwrap();
    let store = fresh(&directory, 0, false);
    store.write(0, &[1; PAGES * PAGE_BYTES]).unwrap();
    let (epoch, _) = store.pages().cut().unwrap();
    let releasing = store.folding();
    store.pages().release(epoch).unwrap();
    let (written, is_written) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| written.send(store.write(0, &[2; PAGES * PAGE_BYTES])).unwrap());
        until("there is no more room", || store.pages().pending() == SPARE_SLOTS);
        assert!(store.fold_some().unwrap());
        let written = is_written.recv_timeout(WAIT_MAX);
        drop(releasing);
        assert_eq!(written.expect("it waits for more than it needs"), Ok(()));
    });
    check_now(&store, &vec![[2; PAGE_BYTES]; PAGES]);
}

/// Spec: D6
#[test]
fn t2_a_memory_goes_on_with_its_own_shadow_alone() {
    let directory = TestDirectory::new().unwrap();
    let store = fresh(&directory, 0, false);
    let path = directory.join("shadow");
    let state = || State::open(store.pages().state.descriptor().unwrap()).unwrap();
    std::fs::rename(&path, directory.join("other")).unwrap();
    assert!(matches!(Store::kept(state(), &path), Err(CheckpointError::Io { action: "open", .. })));
    assert!(!path.exists(), "it was made anew");
    for length in [0, SIZE - 4096, SIZE] {
        std::fs::File::create(&path).unwrap().set_len(length).unwrap();
        assert!(matches!(Store::kept(state(), &path), Err(CheckpointError::Damaged { .. })), "{length}");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), length);
    }
    std::fs::rename(directory.join("other"), &path).unwrap();
    Store::kept(state(), &path).unwrap();
    // Nor is a longer one cut short to begin with.
    assert!(matches!(Shadow::create(&path, SIZE - 4096), Err(CheckpointError::Damaged { .. })));
}

#[test]
fn epochs_are_bounded_and_those_that_are_not_kept_are_unknown() {
    let directory = TestDirectory::new().unwrap();
    let store = fresh(&directory, 0, false);
    for epoch in 1..=EPOCHS_MAX as u64 {
        assert_eq!(store.pages().cut().unwrap(), (epoch, 0));
    }
    assert!(matches!(store.pages().cut(), Err(CheckpointError::TooManyEpochs { kept: EPOCHS_MAX })));
    for (before, until) in [(5, 4), (5, 5), (u64::MAX, 0), (0, 0)] {
        assert!(matches!(
            store.changed_since(before, until),
            Err(CheckpointError::UnknownEpoch { epoch }) if epoch == before
        ));
    }
    let open = EPOCHS_MAX as u64 + 1;
    for unknown in [0, open, open + 1, u64::MAX] {
        assert!(matches!(store.pages().changed(unknown), Err(CheckpointError::UnknownEpoch { .. })), "{unknown}");
        assert!(matches!(store.pages().release(unknown), Err(CheckpointError::UnknownEpoch { .. })), "{unknown}");
    }
    let store = successor(&store, &directory);
    store.release(3).unwrap();
    assert!(store.pages().changed(3).is_err() && store.pages().changed(4).is_ok());
    assert_eq!(store.pages().cut().unwrap(), (open, 0));
}

#[test]
fn what_is_asked_for_past_the_end_changes_nothing_and_what_lies_before_it_is_kept() {
    let directory = TestDirectory::new().unwrap();
    let store = fresh(&directory, 0, false);
    for (offset, length) in [(SIZE, 1), (SIZE - 1, 2), (u64::MAX, 4096)] {
        assert_eq!(store.zero(offset, length as u64), Err(libc::EINVAL));
    }
    assert_eq!(store.zero(1, 4096), Err(libc::EOPNOTSUPP));
    for (offset, length) in [(SIZE, 1), (u64::MAX, 4096)] {
        assert_eq!(store.write(offset, &vec![1; length]), Err(libc::EFBIG));
    }
    assert_eq!(store.pages().pending(), 0);
    // Merged with what somebody has written behind the end.
    assert_eq!(store.write(SIZE - 8192, &[1; 3 * PAGE_BYTES]), Err(libc::EFBIG));
    let mut model = vec![[0; PAGE_BYTES]; PAGES];
    model[PAGES - 2..].fill([1; PAGE_BYTES]);
    check_now(&store, &model);
}

#[test]
fn a_state_that_contradicts_itself_is_refused() {
    let slot = |epoch, page| Some(Slot { epoch, page, is_zero: false });
    let damages: [&dyn Fn(&State); 6] = [
        &|state| state.set_slot(0, slot(1, 96)),
        &|state| state.set_slot(0, slot(2, 0)),
        &|state| state.set_slot(0, slot(0, 1)),
        &|state| [0, 1].into_iter().for_each(|at| state.set_slot(at, slot(1, 5))),
        &|state| state.set_current(1000),
        &|state| state.set_released(1),
    ];
    for (number, damage) in damages.iter().enumerate() {
        let state = State::create(PAGES as u64, PAGES as u64 + 1).unwrap();
        damage(&state);
        assert!(matches!(Pages::new(state), Err(CheckpointError::State { .. })), "damage {number}");
    }
}

/// Where nothing is mounted there is the host's own file: nothing of a memory is in it.
///
/// Spec: D6
#[test]
fn t5_a_file_of_the_host_is_no_memory() {
    let directory = TestDirectory::new().unwrap();
    let place = directory.join("memory");
    std::fs::write(&place, b"").unwrap();
    let refused = super::synchronize(&place).unwrap_err();
    assert!(matches!(refused, CheckpointError::NotMounted { .. }), "{refused}");
    assert!(super::fuse::allow_dirty_pages(&place).is_err(), "that would be the host's disk");
}
