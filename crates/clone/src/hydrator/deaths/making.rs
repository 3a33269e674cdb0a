//! Killed while a clone is made.

use std::sync::Mutex;

use super::super::images::ImageRecord;
use super::super::lock;
use super::super::spare::tablespaces_of;
use super::*;
use crate::killed::{Death, Step, at_every_step};
use crate::network::image_store::ImageStore;
use crate::network::protocol::SessionId;
use crate::service::SpareWanted;

/// A hydrator that makes a clone and dies with all its threads.
fn make_and_die((harness, keeping): &(Harness, Keeping)) -> Result<(), CloneError> {
    runtime().block_on(async {
        let hydrator = harness.hydrator(keeping);
        make(&hydrator, harness).await.map(drop)
    })
}

fn begin(listener: &CountingListener) -> (Harness, Keeping) {
    (Harness::new(listener), Keeping::begin(KeptFiles::new()))
}

/// Spec: A3
#[test]
fn k9_whatever_a_maker_leaves_that_is_killed_with_its_keeper_the_next_service_removes() {
    let listener = CountingListener::open();
    let judge = |(harness, keeping): (Harness, Keeping), death: Death| {
        drop(keeping.end());
        harness.assert_not_whole(&death);
        let (was_begun, connections) = (harness.plan.target.exists(), listener.connections());
        let after = succeed(&harness, KeptFiles::new());
        assert!(after.states.is_empty() && after.kept.is_empty(), "{death}");
        assert!(harness.left().is_empty(), "{death}: {:?} is left", harness.left());
        // Its slot is made while its directory is.
        assert!(!was_begun || listener.connections() > connections, "{death}: its slot is not dropped");
        CloneLocation::of(&harness.plan).unwrap().check_free().unwrap();
    };
    let steps = at_every_step(Step::Any, || begin(&listener), make_and_die, judge);
    assert!(steps > 80, "{steps}: directories alone are more");
}

/// Spec: A3
#[test]
fn k8_a_maker_that_is_killed_is_succeeded_by_one_that_goes_on_only_if_all_of_the_clone_was_kept() {
    let listener = CountingListener::open();
    let judge = |(harness, keeping): (Harness, Keeping), death: Death| {
        let kept = keeping.end();
        harness.assert_not_whole(&death);
        let is_made = Record::all(&kept).iter().any(|record| record.made.is_some());
        assert_eq!(is_made, death.is_end(), "{death}");
        let connections = listener.connections();
        let after = succeed(&harness, kept);
        assert!(after.kept.is_empty(), "{death}: {:?}", after.kept);
        match after.states.as_slice() {
            // Nothing is made before its plan is kept.
            [] => assert_eq!(death.steps, 0),
            [CloneState::Discarded { reason }] => assert!(reason.contains("while it was being made"), "{reason}"),
            [CloneState::Whole] => assert!(death.is_end(), "{death}"),
            other => panic!("{death}: {other:?}"),
        }
        match death.is_end() {
            true => harness.assert_whole(&death),
            false => assert!(harness.left().is_empty(), "{death}: {:?}", harness.left()),
        }
        // Its slot is dropped with what is removed, and with nothing else.
        let is_discarded = matches!(after.states.as_slice(), [CloneState::Discarded { .. }]);
        assert_eq!(listener.connections() > connections, is_discarded, "{death}");
    };
    // Its plan; its group, its bitmap, its version; what there is of it.
    assert_eq!(at_every_step(Step::Message, || begin(&listener), make_and_die, judge), 5);
}

/// A directory that was prepared, and a hydrator that is about to use it.
struct Prepared {
    harness: Harness,
    keeping: Keeping,
    hydrator: Arc<Hydrator>,
    skeleton: Mutex<Option<Skeleton>>,
}

impl Prepared {
    fn new(listener: &CountingListener) -> Prepared {
        let (harness, keeping) = begin(listener);
        let (hydrator, plan) = (harness.hydrator(&keeping), &harness.plan);
        let directory = plan.target.with_file_name("spare");
        let location = CloneLocation {
            tablespaces: tablespaces_of(&directory),
            directory: directory.clone(),
            user: ServiceUser::resolve(None).unwrap(),
        };
        let marker = Marker {
            slot: None,
            tablespaces: location.tablespaces.clone(),
            ..Marker::of(plan, hydrator.rendezvous().directory())
        };
        let skeleton = Skeleton::make(location, Arc::clone(&harness.image), &marker).expect("prepared");
        let wanted = SpareWanted { directory, user_name: plan.user_name.clone(), source: plan.source.clone() };
        lock(&hydrator.spare).set_wanted(Some(wanted));
        hydrator.write_targets();
        Prepared { harness, keeping, hydrator, skeleton: Mutex::new(Some(skeleton)) }
    }

    /// As for an order that gets it.
    fn use_it(&self) -> Result<(), CloneError> {
        let (hydrator, plan) = (&self.hydrator, &self.harness.plan);
        hydrator.add(Arc::new(CloneJob::new(1, plan.clone(), None)));
        hydrator.write_targets();
        let mut skeleton = lock(&self.skeleton).take().expect("prepared");
        skeleton.move_to(&plan.target, &plan.tablespaces)?;
        Marker::of(plan, hydrator.rendezvous().directory()).write(skeleton.location())
    }
}

/// Spec: A3
#[test]
fn k9_a_prepared_directory_is_removed_wherever_it_is_when_its_service_is_killed() {
    let listener = CountingListener::open();
    let judge = |prepared: Prepared, death: Death| {
        let Prepared { harness, keeping, hydrator, .. } = prepared;
        drop((hydrator, keeping.end()));
        harness.assert_not_whole(&death);
        succeed(&harness, KeptFiles::new());
        assert!(harness.left().is_empty(), "{death}: {:?}", harness.left());
    };
    let steps = at_every_step(Step::Any, || Prepared::new(&listener), Prepared::use_it, judge);
    // The list, two names, the link, the marker.
    assert!(steps > 3 + 2 + 3, "{steps}");
}

/// An image for a clone on another host.
fn keep_image((harness, keeping): &(Harness, Keeping)) -> Result<(), CloneError> {
    let Harness { directory, plan, image } = harness;
    let hydrator = harness.hydrator(keeping);
    let session = SessionId::generate().expect("random numbers");
    let record = ImageRecord { number: 1, session, plan: plan.clone(), image: None };
    let frozen = ImageRecord { image: Some(Image::clone(image)), ..record.clone() };
    runtime().block_on(async {
        record.keep(&hydrator, None).await?;
        let origin = Arc::new(SourceFiles::reopen(&plan.source.data_directory, image, |_| true)?);
        let image_store = ImageStore::create(Arc::clone(image), origin, directory.path())?;
        frozen.keep(&hydrator, Some(&image_store)).await
    })
}

/// Spec: A3
#[test]
fn k8_an_image_is_gone_on_with_only_if_all_of_it_was_kept() {
    let listener = CountingListener::open();
    let judge = |(_harness, keeping): (Harness, Keeping), death: Death| {
        let kept = keeping.end();
        let reopen = |record: ImageRecord| runtime().block_on(record.reopen(&kept)).is_ok();
        let goes_on: Vec<bool> = ImageRecord::all(&kept).into_iter().map(reopen).collect();
        // Nothing is frozen before its plan, whose slot somebody must drop, is kept.
        let expected: &[bool] = if death.steps == 0 { &[] } else { &[death.is_end()] };
        assert_eq!(goes_on, expected, "{death}");
    };
    // Its plan; its store, what is saved, what is delivered; what is frozen.
    assert_eq!(at_every_step(Step::Message, || begin(&listener), keep_image, judge), 5);
}
