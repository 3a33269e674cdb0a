//! Killed while a clone is made whole, or removed.

use std::os::fd::{AsFd, OwnedFd};

use super::super::{cleanup, ending, unfinished};
use super::*;
use crate::ByteRange;
use crate::fill::Layout;
use crate::image::FileNumber;
use crate::killed::{Death, Step, at_every_step, live};
use crate::target;

/// A clone at its end, and its hydrator.
struct Ending {
    harness: Harness,
    keeping: Keeping,
    hydrator: Arc<Hydrator>,
    clone: Arc<CloneJob>,
}

impl Ending {
    /// A clone that runs; filled if it is to be made whole.
    fn of_running(listener: &CountingListener, is_filled: bool) -> Ending {
        let (harness, keeping) = (Harness::new(listener), Keeping::begin(KeptFiles::new()));
        let hydrator = harness.hydrator(&keeping);
        let clone = runtime().block_on(make(&hydrator, &harness)).expect("made");
        if is_filled {
            let filling = Arc::clone(&clone.running().expect("it runs").filling);
            let files = 0..u32::try_from(harness.image.files.len()).unwrap();
            files.for_each(|file| filling.ensure(FileNumber(file), ByteRange::WHOLE).expect("filled"));
        }
        Ending { harness, keeping, hydrator, clone }
    }

    /// One whose directory is made.
    fn of_laid(listener: &CountingListener) -> Ending {
        let (harness, keeping) = (Harness::new(listener), Keeping::begin(KeptFiles::new()));
        let hydrator = harness.hydrator(&keeping);
        let (clone, _) = lay(&hydrator, &harness).expect("laid");
        Ending { harness, keeping, hydrator, clone }
    }

    fn finish(&self) -> Result<(), CloneError> {
        runtime().block_on(ending::finish(Arc::clone(&self.hydrator), Arc::clone(&self.clone)));
        Ok(())
    }

    fn discard(&self) -> Result<(), CloneError> {
        let reason = "as asked for".to_owned();
        runtime().block_on(ending::discard(Arc::clone(&self.hydrator), Arc::clone(&self.clone), reason));
        Ok(())
    }

    /// All that has to happen in its directory.
    fn make_whole(&self) {
        let location = CloneLocation::of(&self.harness.plan).expect("an account");
        target::finish(&location, MAJOR_VERSION).expect("made whole");
    }

    /// What is left when the process with all its threads is gone.
    fn die(self) -> (Harness, KeptFiles) {
        let Ending { harness, keeping, hydrator, clone } = self;
        drop((hydrator, clone));
        (harness, keeping.end())
    }
}

/// That of a clone which is filled. A hydrator that only plays dead would give its own up, in memory that its successor
/// sees.
fn filled_bitmap(image: &Image) -> OwnedFd {
    let (bitmap, layout) = (SharedBitmap::create(image).unwrap(), Layout::new(image));
    for file in (0..u32::try_from(image.files.len()).unwrap()).map(FileNumber) {
        for chunk in layout.chunks(file, ByteRange::WHOLE) {
            bitmap.set(chunk);
        }
    }
    bitmap.as_fd().try_clone_to_owned().unwrap()
}

/// Spec: A3
#[test]
fn k8_a_clone_that_is_filled_becomes_whole_whenever_its_hydrator_is_killed_and_stays_so() {
    let listener = CountingListener::open();
    let judge = |ending: Ending, death: Death| {
        let was_whole = !has_marker(&ending.harness);
        let (harness, mut kept) = ending.die();
        let is_known = !Record::all(&kept).is_empty();
        assert!(is_known || was_whole, "{death}: it is forgotten before it is whole");
        if is_known {
            kept.insert("clone-1-bitmap".to_owned(), filled_bitmap(&harness.image));
        }
        let after = succeed(&harness, kept);
        let expected: &[CloneState] = if is_known { &[CloneState::Whole] } else { &[] };
        assert_eq!(after.states, expected, "{death}");
        assert!(after.kept.is_empty() || !is_known, "{death}: {:?}", after.kept);
        harness.assert_whole(&death);
        assert_eq!(listener.connections(), 0, "{death}: its slot is another's to drop");
    };
    let steps = at_every_step(Step::Any, || Ending::of_running(&listener, true), Ending::finish, judge);
    assert!(steps > 8, "{steps}");
}

/// A clone that was made whole by a hydrator which was killed before it had forgotten it.
fn whole_and_kept(listener: &CountingListener) -> (Harness, KeptFiles) {
    let ending = Ending::of_running(listener, true);
    ending.make_whole();
    let (harness, mut kept) = ending.die();
    kept.insert("clone-1-bitmap".to_owned(), filled_bitmap(&harness.image));
    (harness, kept)
}

/// A clone that was made whole keeps its directory and its slot, and waits for nothing of us, whoever takes over,
/// buries or discards what was kept of it.
///
/// Spec: A3
#[test]
fn k27_a_clone_that_was_made_whole_keeps_directory_and_slot_whoever_comes_next() {
    let listener = CountingListener::open();
    // It cannot be gone on with: what it was filled from is away.
    let (harness, kept) = whole_and_kept(&listener);
    let (source, away) = (&harness.plan.source.data_directory, harness.directory.path().join("away"));
    fs::rename(source, &away).unwrap();
    let after = succeed(&harness, kept);
    assert_eq!(after.states, [CloneState::Whole]);
    assert!(after.kept.is_empty(), "{:?}", after.kept);
    fs::rename(&away, source).unwrap();
    // This reads its files: a mark that is left would have nobody who answers.
    harness.assert_whole(&"taken over");

    let (harness, kept) = whole_and_kept(&listener);
    let rendezvous = Rendezvous::at(harness.directory.path().join("service"));
    let left = runtime().block_on(cleanup::clean_up_records(&rendezvous, &kept));
    assert!(left.is_empty(), "let go of: {left:?}");
    harness.assert_whole(&"cleaned up");

    // Whoever discards it saw it a moment before.
    let ending = Ending::of_running(&listener, true);
    ending.make_whole();
    ending.discard().unwrap();
    assert_eq!(ending.clone.progress().state, CloneState::Whole);
    let (harness, kept) = ending.die();
    assert!(kept.is_empty(), "{kept:?}");
    harness.assert_whole(&"discarded");
    assert_eq!(listener.connections(), 0, "its slot is its own");
}

/// Spec: A3
#[test]
fn k9_without_a_keeper_a_clone_is_whole_or_gone_whenever_its_hydrator_is_killed() {
    let listener = CountingListener::open();
    let judge = |ending: Ending, death: Death| {
        let was_whole = !has_marker(&ending.harness);
        let (harness, kept) = ending.die();
        drop(kept);
        let after = succeed(&harness, KeptFiles::new());
        assert!(after.states.is_empty(), "{death}");
        match was_whole {
            true => harness.assert_whole(&death),
            false => assert!(harness.left().is_empty(), "{death}: {:?}", harness.left()),
        }
        assert!(was_whole || !death.is_end());
    };
    at_every_step(Step::Any, || Ending::of_running(&listener, true), Ending::finish, judge);
}

/// Spec: A3
#[test]
fn k9_a_removal_that_is_killed_at_any_step_is_done_by_the_next_service() {
    let listener = CountingListener::open();
    let judge = |ending: Ending, death: Death| {
        let (harness, kept) = ending.die();
        drop(kept);
        harness.assert_not_whole(&death);
        succeed(&harness, KeptFiles::new());
        assert!(harness.left().is_empty(), "{death}: {:?}", harness.left());
    };
    let steps = at_every_step(Step::Any, || Ending::of_laid(&listener), Ending::discard, judge);
    assert!(steps > 20, "{steps}: there are more directories");
}

/// Whose its directory is cannot be told while its marker is none: it may be whole, and its slot its server's.
///
/// Spec: A3
#[test]
fn k9_what_a_service_cannot_remove_the_next_one_tries_again() {
    let listener = CountingListener::open();
    let (harness, kept) = Ending::of_laid(&listener).die();
    drop(kept);
    let marker = harness.plan.target.join(MARKER_FILE);
    let text = fs::read(&marker).unwrap();
    fs::write(&marker, "nonsense").unwrap();
    for _ in 0..2 {
        succeed(&harness, KeptFiles::new());
        assert!(harness.plan.target.exists());
        assert_eq!(listener.connections(), 0, "its slot is dropped, and it is not");
    }
    fs::write(&marker, text).unwrap();
    succeed(&harness, KeptFiles::new());
    assert!(harness.left().is_empty(), "{:?}", harness.left());
    assert!(listener.connections() > 0, "its slot is not dropped");
}

/// The same of one that is given up: another clone may have its slot's name, and its directory, by then.
///
/// Spec: A3
#[test]
fn k9_what_cannot_be_removed_is_left_with_its_slot_until_that_is_anothers() {
    let listener = CountingListener::open();
    let ending = Ending::of_laid(&listener);
    fs::write(ending.harness.plan.target.join(MARKER_FILE), "nonsense").unwrap();
    ending.discard().unwrap();
    let hydrator = &ending.hydrator;
    assert_eq!(listener.connections(), 0, "its slot is dropped, and it is not");
    let slots = |listed: Vec<unfinished::Unfinished>| listed.into_iter().map(|left| left.slot).collect::<Vec<_>>();
    assert_eq!(slots(unfinished::read_targets(hydrator.rendezvous())), [Some("clone".to_owned())]);
    let plan = Plan { target: ending.harness.plan.target.with_file_name("other"), ..ending.harness.plan.clone() };
    hydrator.add(Arc::new(CloneJob::new(7, plan, None)));
    assert_eq!(slots(super::super::lock(&hydrator.left).clone()), [None], "another clone has it");
    hydrator.add(Arc::new(CloneJob::new(8, ending.harness.plan.clone(), None)));
    assert!(super::super::lock(&hydrator.left).is_empty(), "another clone is there");
}

/// The source may have changed what a clone lacks that is given up.
///
/// Spec: A3
#[test]
fn k8_a_clone_whose_removal_has_begun_is_never_gone_on_with() {
    let listener = CountingListener::open();
    // From before the first step until its directory is almost gone.
    for steps in [0, 1, 5, 10, 20, 30] {
        let ending = Ending::of_running(&listener, false);
        let (death, _) = live(Step::Any, steps, || ending.discard());
        assert!(!death.is_end(), "{death}");
        let (harness, kept) = ending.die();
        let after = succeed(&harness, kept);
        assert!(matches!(after.states.as_slice(), [CloneState::Discarded { .. }]), "{death}: {:?}", after.states);
        assert!(harness.left().is_empty() && after.kept.is_empty(), "{death}: {:?}", harness.left());
    }
}

/// Spec: A3
#[test]
fn k8_a_removed_clone_stays_removed_whichever_part_of_it_is_still_kept() {
    let listener = CountingListener::open();
    let judge = |ending: Ending, death: Death| {
        let (harness, kept) = ending.die();
        assert!(harness.left().is_empty(), "{death}: {:?}", harness.left());
        let is_known = !Record::all(&kept).is_empty();
        // It would be that of the next clone with this number.
        assert!(is_known || !kept.contains_key("clone-1-limit"), "{death}");
        let after = succeed(&harness, kept);
        let is_discarded = matches!(after.states.as_slice(), [CloneState::Discarded { .. }]);
        assert_eq!((is_discarded, after.states.is_empty()), (is_known, !is_known), "{death}: {:?}", after.states);
        assert!(harness.left().is_empty(), "{death}");
    };
    let begin = || {
        let ending = Ending::of_running(&listener, false);
        let limit = to_memory(&super::super::record::Limit { bytes_per_second: Some(1) }).unwrap();
        ending.hydrator.keep(ending.clone.number, "limit", limit);
        ending
    };
    // One for each part.
    assert_eq!(at_every_step(Step::Message, begin, Ending::discard, judge), 5);
}
