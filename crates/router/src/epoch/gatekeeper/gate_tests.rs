//! One gate before model servers: what is said to whom, in which order, and while the commit barrier is closed.

use super::harness::*;
use super::*;
use crate::epoch::{Demand, NoEpoch};

/// No commit is admitted from before the marker until the snapshots of all servers are open and the epoch is published,
/// and no reader has the epoch before.
#[tokio::test]
async fn the_barrier_is_closed_from_the_marker_to_the_last_snapshot() {
    let Harness { models, mut gatekeeper, barrier, epochs, .. } = harness(1, |_| {}).await;
    let steps = [
        (LEADER, MARK),
        (LEADER, CANARY),
        (LEADER, EXPORT),
        (FOLLOWER, REPLAYED),
        (FOLLOWER, BEGIN_SNAPSHOT),
        (FOLLOWER, EXPORT),
    ];
    let mut before = None;
    for (server, step) in steps {
        let commits = commit(&barrier).await;
        models.hold(server, step);
        let looking = async {
            models.hears(server, step, 1).await;
            assert!(is_closed(&barrier), "{server}: {step}");
            assert_eq!(current(&epochs), before, "{server}: {step}");
            models.let_go(server);
        };
        let (made, ()) = tokio::join!(gatekeeper.attempt(), looking);
        made.unwrap();
        assert!(!is_closed(&barrier));
        let now = current(&epochs).expect("a gate was closed");
        assert_eq!(now, (before.map_or(1, |(id, _)| id + 1), commits), "{server}: {step}");
        assert_eq!(open_on(&epochs), [LEADER, FOLLOWER]);
        before = Some(now);
        models.forget();
    }
}

/// The canary's snapshot is the epoch's or older, so no conflict with what the epoch shows escapes it; a follower is
/// asked for the position of this gate's marker, and opens its snapshot behind it.
#[tokio::test]
async fn the_canary_precedes_the_snapshot_and_the_marker_the_followers() {
    let Harness { models, mut gatekeeper, epochs, canaries, .. } = harness(2, |_| {}).await;
    for gate in 1..=3 {
        models.forget();
        gatekeeper.attempt().await.unwrap();
        let when = |server, part: &str| models.when(server, part).unwrap_or_else(|| panic!("{server}: no {part}"));
        assert!(when(LEADER, CANARY) < when(LEADER, BEGIN_SNAPSHOT), "gate {gate}");
        assert!(when(LEADER, BEGIN_SNAPSHOT) < when(LEADER, EXPORT), "gate {gate}");
        for follower in [FOLLOWER, "follower-2"] {
            let replayed = format!("{REPLAYED}() >= '0/{gate}'");
            assert!(when(LEADER, MARK) < when(follower, &replayed), "gate {gate}");
            assert!(when(follower, &replayed) < when(follower, BEGIN_SNAPSHOT), "gate {gate}");
            assert!(when(follower, BEGIN_SNAPSHOT) < when(follower, EXPORT), "gate {gate}");
            assert_eq!(models.when(follower, CANARY), None, "followers never run SERIALIZABLE");
        }
        let epoch = epochs.current().unwrap();
        for snapshot in &epoch.snapshots {
            assert!(snapshot.snapshot.starts_with(&format!("{}-", snapshot.server.name)), "{}", snapshot.snapshot);
        }
        assert_eq!(canaries.load(SeqCst), gate, "each counts against the pool of serializable transactions");
    }
}

/// A reader never gets a server that has not replayed the epoch's position: the gate waits for it.
#[tokio::test]
async fn a_follower_opens_no_snapshot_before_it_has_replayed_the_marker() {
    let Harness { models, mut gatekeeper, barrier, epochs, .. } = harness(1, |_| {}).await;
    models.set_replayed(FOLLOWER, 0);
    let looking = async {
        models.hears(FOLLOWER, REPLAYED, 1).await;
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert_eq!(models.when(FOLLOWER, BEGIN_SNAPSHOT), None);
        }
        assert!(is_closed(&barrier) && current(&epochs).is_none());
        models.set_replayed(FOLLOWER, 1);
    };
    let (made, ()) = tokio::join!(gatekeeper.attempt(), looking);
    made.unwrap();
    assert_eq!(open_on(&epochs), [LEADER, FOLLOWER]);
}

/// A follower that is late, refuses, or has gone is not in the epoch, and the others go on without it.
#[tokio::test]
async fn a_follower_that_fails_in_a_gate_is_not_in_its_epoch() {
    for refused in [REPLAYED, BEGIN_SNAPSHOT, EXPORT] {
        let Harness { models, mut gatekeeper, barrier, epochs, .. } = harness(2, |_| {}).await;
        let commits = commit(&barrier).await;
        models.refuse(FOLLOWER, Some(refused));
        gatekeeper.attempt().await.unwrap();
        assert_eq!(open_on(&epochs), [LEADER, "follower-2"], "{refused}");
        assert_eq!(current(&epochs), Some((1, commits)));
        assert!(!gatekeeper.members.followers[0].is_in());
        models.refuse(FOLLOWER, None);
        join(&mut gatekeeper).await;
        gatekeeper.attempt().await.unwrap();
        assert_eq!(open_on(&epochs), [LEADER, FOLLOWER, "follower-2"], "{refused}");
    }
    let Harness { models, mut gatekeeper, epochs, .. } = harness(1, |settings| settings.follower_timeout_ms = 20).await;
    models.set_replayed(FOLLOWER, 0);
    gatekeeper.attempt().await.unwrap();
    assert_eq!(open_on(&epochs), [LEADER]);
    assert_eq!(models.when(FOLLOWER, BEGIN_SNAPSHOT), None);
    assert!(!gatekeeper.members.followers[0].is_in());
}

/// Without marker, canary or snapshot of the leader there is no epoch; the commit barrier opens again, and nobody
/// passes a tripwire that no canary guards.
#[tokio::test]
async fn a_gate_that_the_leader_fails_makes_no_epoch_and_opens_the_barrier() {
    for refused in [MARK, CANARY, BEGIN_SNAPSHOT, EXPORT] {
        let Harness { models, mut gatekeeper, barrier, epochs, .. } = harness(1, |_| {}).await;
        let commits = commit(&barrier).await;
        models.refuse(LEADER, Some(refused));
        let failed = gatekeeper.attempt().await;
        assert!(matches!(failed, Err(GateError::Backend(BackendError::Sql { .. }))), "{refused}: {failed:?}");
        let summary = epochs.statistics.summary();
        assert!(summary.closed_microseconds > 0 && summary.epoch_microseconds == 0, "{refused}: {summary:?}");
        assert!(current(&epochs).is_none() && !is_closed(&barrier), "{refused}");
        assert!(!epochs.needs_tripwire(0), "{refused}");
        assert_eq!(models.when(FOLLOWER, EXPORT), None, "{refused}");
        assert!(matches!(gatekeeper.attempt().await, Err(GateError::NoLeader)), "{refused}: it is out");
        models.refuse(LEADER, None);
        join(&mut gatekeeper).await;
        gatekeeper.attempt().await.unwrap();
        assert_eq!(current(&epochs), Some((2, commits)), "{refused}");
        assert!(epochs.needs_tripwire(0) && !epochs.needs_tripwire(commits), "{refused}");
    }
}

/// While it is not known whether a commit has happened there is no epoch: its process is told to end until it has. The
/// barrier stays open meanwhile.
#[tokio::test]
async fn a_commit_in_doubt_keeps_its_place_until_its_process_has_ended() {
    let Harness { models, mut gatekeeper, barrier, epochs, .. } = harness(0, |_| {}).await;
    drop(barrier.enter(1, process(77), None).await);
    models.set_running(1);
    let looking = async {
        models.hears(LEADER, END_PROCESSES, 1).await;
        assert!(!is_closed(&barrier));
    };
    let (failed, ()) = tokio::join!(gatekeeper.attempt(), looking);
    assert!(matches!(failed, Err(GateError::InDoubt)), "{failed:?}");
    assert!(models.when(LEADER, "IN ((77, 77000))").is_some(), "{:?}", models.heard());
    assert_eq!((models.when(LEADER, MARK), models.when(LEADER, CANARY)), (None, None));
    assert_eq!((barrier.in_doubt(), current(&epochs)), (vec![process(77)], None));
    models.set_running(0);
    gatekeeper.attempt().await.unwrap();
    assert_eq!((barrier.in_doubt(), current(&epochs)), (vec![], Some((1, 1))));
    assert_eq!(barrier.commits_done(), 1);
}

/// The same for a commit that is lost while the gate already waits for it.
#[tokio::test]
async fn a_commit_lost_under_a_waiting_gate_keeps_it_from_counting() {
    let Harness { models, mut gatekeeper, barrier, epochs, .. } = harness(1, |_| {}).await;
    let lost = barrier.enter(1, process(77), None).await;
    let losing = async {
        while !is_closed(&barrier) {
            tokio::task::yield_now().await;
        }
        drop(lost);
    };
    let (failed, ()) = tokio::join!(gatekeeper.attempt(), losing);
    assert!(matches!(failed, Err(GateError::InDoubt)), "{failed:?}");
    assert_eq!((models.when(LEADER, MARK), models.when(LEADER, CANARY)), (None, None));
    assert!(!is_closed(&barrier) && current(&epochs).is_none());
    gatekeeper.attempt().await.unwrap();
    assert_eq!(current(&epochs), Some((1, 1)));
}

/// A gate gives up rather than let one commit hold everybody, says who it was, and lets in who came meanwhile.
#[tokio::test]
async fn a_gate_gives_up_on_a_long_commit_and_names_it() {
    let Harness { models, mut gatekeeper, barrier, epochs, blocked, .. } =
        harness(0, |settings| settings.gate_timeout_ms = 1).await;
    let long = barrier.enter(5, process(10), Some(42)).await;
    let failed = gatekeeper.attempt().await;
    assert!(matches!(&failed, Err(GateError::Blocked(sessions)) if *sessions == [5]), "{failed:?}");
    assert!(epochs.statistics.summary().closed_microseconds > 0, "it held commits meanwhile");
    assert_eq!(*blocked.lock().unwrap(), [(5, Some(42))]);
    assert!(!is_closed(&barrier) && current(&epochs).is_none());
    assert_eq!((models.when(LEADER, MARK), models.when(LEADER, CANARY)), (None, None));
    long.resolve();
    gatekeeper.attempt().await.unwrap();
    assert_eq!(current(&epochs), Some((1, 1)));
}

/// The snapshot of the epoch before stays open behind a gate, for readers that are about to open it, until the next
/// gate; where none comes so soon it ends without one.
#[tokio::test]
async fn the_snapshot_of_the_epoch_before_stays_until_the_next_gate() {
    let Harness { models, mut gatekeeper, epochs, .. } = harness(1, |_| {}).await;
    for gate in 1..=4 {
        models.forget();
        gatekeeper.attempt().await.unwrap();
        for (server, before) in [(LEADER, CANARY), (FOLLOWER, REPLAYED)] {
            let ended = models.when(server, "ROLLBACK");
            assert_eq!(ended.is_some(), gate > 2, "there is none before the epoch before");
            assert!(ended < models.when(server, before), "{server}");
        }
    }
    let now = epochs.current().unwrap();
    for resolved in [1, 0] {
        models.forget();
        gatekeeper.let_lapse().await;
        for server in [LEADER, FOLLOWER] {
            let ended = models.heard().iter().filter(|said| **said == format!("{server}: ROLLBACK")).count();
            assert_eq!(ended, resolved, "{server}");
        }
        assert!(Arc::ptr_eq(&now, &epochs.current().unwrap()));
    }
}

/// DDL that commits while a gate is under way dooms the epoch that comes of it, and nobody takes it, neither behind the
/// barrier nor after.
#[tokio::test]
async fn ddl_under_a_gate_dooms_the_epoch_that_comes_of_it() {
    let Harness { models, mut gatekeeper, barrier, epochs, .. } = harness(1, |_| {}).await;
    models.hold(FOLLOWER, EXPORT);
    let ddl = async {
        models.hears(FOLLOWER, EXPORT, 1).await;
        let ddl_barrier = epochs.begin_ddl_barrier();
        let dooming = epochs.begin_dooming();
        models.let_go(FOLLOWER);
        (ddl_barrier, dooming)
    };
    let (made, (ddl_barrier, dooming)) = tokio::join!(gatekeeper.attempt(), ddl);
    made.unwrap();
    let epoch = epochs.current().expect("the gate has published it");
    assert!(epoch.is_doomed(), "its snapshots may be older than what the commit leaves");
    let taken = epochs.take(Demand::Commits(0), &barrier, Duration::ZERO).await;
    assert_eq!(taken.map(|epoch| epoch.id), Err(NoEpoch::DdlBarrier));
    drop(dooming);
    assert!(epoch.is_doomed() && epochs.current().is_none());
    drop(ddl_barrier);
    gatekeeper.attempt().await.unwrap();
    let taken = epochs.take(Demand::Commits(0), &barrier, Duration::ZERO).await;
    assert_eq!(taken.map(|epoch| epoch.id), Ok(2));
}

/// The tripwire is emptied now and then, before the gate's marker and so outside of the canary's transaction.
#[tokio::test]
async fn the_tripwire_is_emptied_when_it_is_full_and_before_the_marker() {
    const TRUNCATE: &str = "TRUNCATE onecopy_router.tripwire";
    let Harness { models, mut gatekeeper, epochs, .. } = harness(0, |_| {}).await;
    (0..TRIPWIRES_KEPT_MAX).for_each(|_| epochs.statistics.note_tripwire(false));
    gatekeeper.attempt().await.unwrap();
    assert_eq!(models.when(LEADER, TRUNCATE), None);
    epochs.statistics.note_tripwire(true);
    models.refuse(LEADER, Some(TRUNCATE));
    models.forget();
    // It may be locked just now; that is no reason to make no epoch.
    gatekeeper.attempt().await.unwrap();
    assert!(models.when(LEADER, TRUNCATE) < models.when(LEADER, MARK) && models.when(LEADER, TRUNCATE).is_some());
    models.forget();
    gatekeeper.attempt().await.unwrap();
    assert_eq!(models.when(LEADER, TRUNCATE), None, "it is not tried at each gate");
}
