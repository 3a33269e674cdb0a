//! What the gatekeeper does between gates: when it tries one, what it lets go, whom it takes in.

use std::task::Poll;

use super::harness::*;
use super::*;
use crate::config::ServerConfiguration;
use crate::epoch::model_server::ModelServers;
use crate::epoch::{Demand, NoEpoch};

/// Commits without an answer are resolved although nobody asks for a gate, but no leader is asked who does not answer.
#[tokio::test]
async fn commits_in_doubt_are_resolved_also_while_nobody_reads() {
    let Harness { models, mut gatekeeper, barrier, .. } = harness(0, |_| {}).await;
    barrier.note_in_doubt(process(77));
    gatekeeper.members.leader.server.set_health(Health::Down);
    gatekeeper.resolve_unasked().await;
    assert_eq!((barrier.in_doubt(), models.when(LEADER, END_PROCESSES)), (vec![process(77)], None));
    gatekeeper.members.leader.server.set_health(Health::Up);
    gatekeeper.resolve_unasked().await;
    assert!(barrier.in_doubt().is_empty());
    assert!(models.when(LEADER, "IN ((77, 77000))").is_some());
}

/// While DDL goes on no gate is tried, snapshots are let go, and readers are told of the DDL barrier; afterwards there
/// are epochs again.
#[tokio::test]
async fn behind_a_barrier_snapshots_are_let_go_and_no_gate_is_tried() {
    let Harness { models, mut gatekeeper, barrier, epochs, .. } =
        harness(1, |settings| settings.epoch_interval_ms = 1).await;
    gatekeeper.attempt().await.unwrap();
    let ddl_barrier = epochs.begin_ddl_barrier();
    models.forget();
    let running = tokio::spawn(gatekeeper.run());
    models.hears(LEADER, "ROLLBACK", 1).await;
    models.hears(FOLLOWER, "ROLLBACK", 1).await;
    let taken = epochs.take(Demand::Commits(0), &barrier, Duration::from_millis(LONG_MS)).await;
    assert_eq!(taken.map(|epoch| epoch.id), Err(NoEpoch::DdlBarrier));
    assert_eq!(models.when(LEADER, MARK), None);
    drop(ddl_barrier);
    let taken = epochs.take(Demand::Commits(0), &barrier, Duration::from_millis(LONG_MS)).await;
    assert_eq!(taken.map(|epoch| epoch.id), Ok(2));
    running.abort();
}

/// A reader's wish for a gate that comes with a wish to let snapshots go is not forgotten: nobody waits for ever.
#[tokio::test]
async fn a_reader_that_asks_while_snapshots_are_let_go_gets_its_epoch() {
    let Harness { models: _models, gatekeeper, barrier, epochs, .. } = harness(1, |_| {}).await;
    epochs.ask_for_release();
    let mut reader = std::pin::pin!(epochs.take(Demand::Commits(0), &barrier, Duration::from_millis(LONG_MS)));
    let begins = std::future::poll_fn(|context| Poll::Ready(reader.as_mut().poll(context).is_pending()));
    assert!(begins.await, "there is no epoch yet");
    let running = tokio::spawn(gatekeeper.run());
    assert_eq!(reader.await.map(|epoch| epoch.id), Ok(1));
    running.abort();
}

/// A pause that was set far too long ends when it is set anew.
///
/// Spec: L3
#[tokio::test]
async fn a_pause_between_gates_that_is_changed_holds_at_once() {
    let Harness { models: _models, gatekeeper, barrier, epochs, settings, .. } =
        harness(1, |settings| settings.gate_interval_min_ms = 10 * LONG_MS).await;
    let running = tokio::spawn(gatekeeper.run());
    let take = |commits| epochs.take(Demand::Commits(commits), &barrier, Duration::from_millis(LONG_MS));
    assert_eq!(take(0).await.map(|epoch| epoch.id), Ok(1));
    let mut reader = std::pin::pin!(take(commit(&barrier).await));
    let waits = std::future::poll_fn(|context| Poll::Ready(reader.as_mut().poll(context).is_pending()));
    assert!(waits.await, "there is no such epoch yet");
    settings.send_modify(|settings| Arc::make_mut(settings).gate_interval_min_ms = 10);
    assert_eq!(reader.await.map(|epoch| epoch.id), Ok(2));
    running.abort();
}

/// A gate is worth its price when there are readers, or one asks, and something is newer than the epoch; never for
/// commits that nobody reads, nor for readers when nothing has changed.
#[tokio::test]
async fn a_gate_is_due_when_readers_gain_by_it() {
    let Harness { models: _models, mut gatekeeper, barrier, epochs, servers, .. } = harness(1, |_| {}).await;
    assert_eq!((gatekeeper.is_due(false), gatekeeper.is_due(true)), (false, true), "there is no epoch");
    gatekeeper.attempt().await.unwrap();
    let mut table = Vec::new();
    for has_newer in [false, true] {
        if has_newer {
            commit(&barrier).await;
        }
        for readers in [0, 1] {
            epochs.readers.store(readers, SeqCst);
            for asked in [false, true] {
                table.push((has_newer, readers, asked, gatekeeper.is_due(asked)));
            }
        }
    }
    let due = table.iter().filter(|row| row.3).map(|row| (row.0, row.1, row.2)).collect::<Vec<_>>();
    let newer_and_read: [(bool, usize, bool); 3] = [(true, 0, true), (true, 1, false), (true, 1, true)];
    assert_eq!(due, newer_and_read);
    // One that DDL has doomed is none.
    epochs.doomed_up_to.store(epochs.current().unwrap().id, SeqCst);
    assert!(gatekeeper.is_due(true));
    // A server that has joined since is something new as well.
    gatekeeper.attempt().await.unwrap();
    assert_eq!(epochs.readers.load(SeqCst), 0, "counted anew since the gate");
    epochs.readers.store(1, SeqCst);
    assert!(!gatekeeper.is_due(false));
    let left = servers.remove(FOLLOWER).unwrap();
    let configuration = ServerConfiguration { name: "again".to_owned(), ..configuration_of(&left) };
    servers.add(servers.prepare(&configuration).unwrap()).unwrap();
    gatekeeper.follow_servers();
    assert!(!gatekeeper.is_due(false), "it has not joined yet");
    join(&mut gatekeeper).await;
    assert!(gatekeeper.is_due(false));
}

/// An epoch is let go when it lacks commits and is old, or is very old: a database in which nothing is written holds
/// vacuum back as others do. Without the leader it is all that readers have.
///
/// No epoch holds vacuum back for longer than ten times `epoch_age_max_ms` while the leader is there, whether or not
/// anything is written; a snapshot that is lost with its server's connection is offered to no reader any more.
///
/// Spec: L3
#[tokio::test]
async fn an_old_epoch_lapses_only_when_another_can_follow() {
    const AGE_MAX: Duration = Duration::from_secs(10);
    let age_max_ms = u64::try_from(AGE_MAX.as_millis()).unwrap();
    let Harness { models, mut gatekeeper, barrier, epochs, .. } =
        harness(1, |settings| settings.epoch_age_max_ms = age_max_ms).await;
    let leader = gatekeeper.members.leader.server.clone();
    let (old, very_old) = (AGE_MAX * 2, AGE_MAX * (UNCHANGED_AGE_FACTOR + 1));
    let mut lapsed = Vec::new();
    for health in [Health::Unresponsive, Health::Up] {
        leader.set_health(health);
        for lacks_commits in [false, true] {
            for age in [Duration::ZERO, old, very_old] {
                gatekeeper.attempt().await.unwrap();
                // Ends the snapshots of the epoch before.
                gatekeeper.let_lapse().await;
                if lacks_commits {
                    commit(&barrier).await;
                }
                let epoch = epochs.current().unwrap();
                let closed_at = epoch.closed_at.checked_sub(age).unwrap();
                epochs.publish(Arc::new(Epoch::new(
                    epoch.id,
                    epoch.commits,
                    closed_at,
                    epoch.snapshots.clone(),
                    &epochs,
                )));
                models.forget();
                gatekeeper.let_lapse().await;
                let is_closed = [LEADER, FOLLOWER].map(|server| models.when(server, "ROLLBACK").is_some());
                assert_eq!(is_closed, [epochs.current().is_none(); 2]);
                if is_closed[0] {
                    lapsed.push((health, lacks_commits, age));
                }
                epochs.readers.store(1, SeqCst);
                assert!(
                    age == Duration::ZERO
                        || is_closed[0]
                        || gatekeeper.is_due(false) == (age == very_old || lacks_commits)
                );
            }
        }
    }
    assert_eq!(lapsed, [(Health::Up, false, very_old), (Health::Up, true, old), (Health::Up, true, very_old)]);
}

/// A snapshot that is lost with its connection is offered to nobody any more, while the others of its epoch are; a
/// server that has lost it joins anew.
///
/// Spec: L3
#[tokio::test]
async fn a_server_that_has_lost_its_snapshot_is_taken_out_of_the_epoch() {
    let Harness { models, mut gatekeeper, epochs, .. } = harness(2, |_| {}).await;
    gatekeeper.attempt().await.unwrap();
    let before = epochs.current().unwrap();
    gatekeeper.take_out_lost();
    assert!(Arc::ptr_eq(&before, &epochs.current().unwrap()), "nothing is lost");
    models.cut_off(FOLLOWER);
    while gatekeeper.members.followers[0].check().is_ok() {
        tokio::task::yield_now().await;
    }
    gatekeeper.take_out_lost();
    assert_eq!(open_on(&epochs), [LEADER, "follower-2"]);
    assert_eq!(current(&epochs), Some((before.id, before.commits)), "it is the same prefix");
    epochs.readers.store(1, SeqCst);
    assert!(!gatekeeper.is_due(false));
    join(&mut gatekeeper).await;
    assert!(gatekeeper.is_due(false));
    gatekeeper.attempt().await.unwrap();
    assert_eq!(open_on(&epochs), [LEADER, FOLLOWER, "follower-2"]);
    for server in [LEADER, FOLLOWER, "follower-2"] {
        models.cut_off(server);
    }
    while gatekeeper.members.servers_mut().any(|member| member.check().is_ok()) {
        tokio::task::yield_now().await;
    }
    gatekeeper.take_out_lost();
    assert!(epochs.current().is_none(), "nobody has it any more");
}

/// A server that does not close the snapshot of before leaves, and with it goes the one of the newest epoch.
#[tokio::test]
async fn a_server_that_leaves_behind_a_gate_is_not_in_its_epoch() {
    let Harness { models, mut gatekeeper, epochs, .. } = harness(1, |_| {}).await;
    gatekeeper.attempt().await.unwrap();
    gatekeeper.attempt().await.unwrap();
    assert_eq!(open_on(&epochs), [LEADER, FOLLOWER]);
    models.refuse(FOLLOWER, Some("ROLLBACK"));
    gatekeeper.let_lapse().await;
    assert_eq!(open_on(&epochs), [LEADER]);
    assert!(!gatekeeper.members.followers[0].is_in());
}

/// Readers who have asked for a gate while one was under way have that one: no other follows for them.
#[expect(clippy::async_yields_async, reason = "the reader is heard after the gate has been noted")]
#[tokio::test]
async fn one_gate_serves_all_who_ask_until_it_is_over() {
    let Harness { models, mut gatekeeper, barrier, epochs, .. } = harness(1, |_| {}).await;
    let mut last = 0;
    for gate in 1..=2 {
        last = commit(&barrier).await;
        models.hold(FOLLOWER, EXPORT);
        models.forget();
        let asking = async {
            models.hears(FOLLOWER, EXPORT, 1).await;
            let reader = tokio::spawn({
                let (epochs, barrier) = (epochs.clone(), barrier.clone());
                async move { epochs.take(Demand::Commits(last), &barrier, Duration::from_millis(LONG_MS)).await }
            });
            while epochs.readers.load(SeqCst) == 0 {
                tokio::task::yield_now().await;
            }
            models.let_go(FOLLOWER);
            reader
        };
        let (made, reader) = tokio::join!(gatekeeper.attempt(), asking);
        made.unwrap();
        epochs.note_attempt(false);
        assert_eq!(reader.await.unwrap().map(|epoch| epoch.id), Ok(gate));
        let wish = tokio::time::timeout(Duration::ZERO, epochs.wanted.notified()).await;
        assert!(wish.is_err(), "nobody waits");
    }
    assert_eq!(current(&epochs), Some((2, last)));
}

/// A follower that comes later joins only when it has replayed what the leader had written and the newest gate; until
/// then no gate waits for it.
#[tokio::test]
async fn a_follower_joins_only_when_it_has_replayed_the_newest_gate() {
    let models = ModelServers::start(1).await;
    // With a time-out of nothing no gate of before is new enough.
    let Harness { models, mut gatekeeper, epochs, servers, .. } =
        with(models, 0, |settings| settings.follower_timeout_ms = 0);
    join(&mut gatekeeper).await;
    gatekeeper.attempt().await.unwrap();
    models.set_replayed(FOLLOWER, 0);
    servers.leader().wal_position_bytes.store(2, SeqCst);
    servers.add(servers.prepare(&models.configurations()[1]).unwrap()).unwrap();
    gatekeeper.follow_servers();
    gatekeeper.members.followers[0].advance().await;
    models.hears(FOLLOWER, ">= 2", 2).await;
    assert_eq!(models.when(FOLLOWER, ">= '0/"), None);
    models.hold(FOLLOWER, ">= '0/1'");
    models.set_replayed(FOLLOWER, 2);
    models.hears(FOLLOWER, ">= '0/1'", 1).await;
    gatekeeper.attempt().await.unwrap();
    gatekeeper.attempt().await.unwrap();
    assert_eq!(open_on(&epochs), [LEADER]);
    // It is asked for the gate that is the newest by now, not for the one of before only.
    models.let_go(FOLLOWER);
    models.hears(FOLLOWER, ">= '0/3'", 2).await;
    gatekeeper.members.followers[0].advance().await;
    assert!(!gatekeeper.members.followers[0].is_in() && !gatekeeper.members.followers[0].server.has_caught_up());
    models.set_replayed(FOLLOWER, 3);
    gatekeeper.members.followers[0].joined().await;
    assert!(gatekeeper.members.followers[0].is_in() && gatekeeper.members.followers[0].server.has_caught_up());
}

/// A follower that the router has given up is in no later epoch, and one of its name that comes later is another.
#[tokio::test]
async fn a_removed_follower_is_in_no_later_epoch() {
    let Harness { models, mut gatekeeper, epochs, servers, .. } = harness(2, |_| {}).await;
    gatekeeper.attempt().await.unwrap();
    let before = epochs.current().unwrap();
    let removed = servers.remove(FOLLOWER).unwrap();
    gatekeeper.follow_servers();
    models.forget();
    gatekeeper.attempt().await.unwrap();
    assert_eq!(open_on(&epochs), [LEADER, "follower-2"]);
    assert_eq!(models.when(FOLLOWER, REPLAYED), None, "it is not asked any more");
    assert!(before.snapshot_on(&removed).is_some(), "readers of before find it there still");
    servers.add(servers.prepare(&configuration_of(&removed)).unwrap()).unwrap();
    gatekeeper.follow_servers();
    join(&mut gatekeeper).await;
    gatekeeper.attempt().await.unwrap();
    let now = epochs.current().unwrap();
    assert_eq!(open_on(&epochs), [LEADER, "follower-2", FOLLOWER]);
    assert_eq!(now.snapshot_on(&removed), None, "a number is never given twice");
}

/// Whose positions in the WAL mean something else than the leader's never serves a read, however far it has replayed.
///
/// No read runs on a server that is no standby of the leader's system and timeline, however far it has replayed; the
/// log says why.
///
/// Spec: I1
#[tokio::test]
async fn a_server_of_another_history_does_not_join() {
    for timeline in ["f 1 00000001", "t 2 00000001", "t 1 00000002", ""] {
        let models = ModelServers::start(1).await;
        models.set_lineage(FOLLOWER, timeline);
        let Harness { models, mut gatekeeper, epochs, .. } = with(models, 1, |_| {});
        for member in gatekeeper.members.servers_mut() {
            member.advance().await;
            member.joined().await;
        }
        let is_in = gatekeeper.members.map(Member::is_in);
        assert!(is_in.leader && !is_in.followers[0], "{timeline:?}");
        gatekeeper.attempt().await.unwrap();
        assert_eq!(open_on(&epochs), [LEADER], "{timeline:?}");
        assert_eq!(models.when(FOLLOWER, EXPORT), None, "{timeline:?}");
        models.set_lineage(FOLLOWER, "t 1 00000001");
        join(&mut gatekeeper).await;
        gatekeeper.attempt().await.unwrap();
        assert_eq!(open_on(&epochs), [LEADER, FOLLOWER]);
    }
}

/// A leader that comes back with another history leaves those behind that follow the one of before.
///
/// Spec: I1
#[tokio::test]
async fn who_follows_a_leader_of_before_leaves() {
    let Harness { models, mut gatekeeper, epochs, .. } = harness(2, |_| {}).await;
    gatekeeper.attempt().await.unwrap();
    models.set_lineage(LEADER, "f 1 00000002");
    models.set_lineage("follower-2", "t 1 00000002");
    models.cut_off(LEADER);
    models.cut_off("follower-2");
    let Topology { leader, followers, .. } = &mut gatekeeper.members;
    for member in [leader, &mut followers[1]] {
        while member.check().is_ok() {
            tokio::task::yield_now().await;
        }
    }
    gatekeeper.take_out_lost();
    let Topology { leader, followers, .. } = &mut gatekeeper.members;
    for member in [leader, &mut followers[1]] {
        while !member.is_in() {
            member.advance().await;
            member.joined().await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    gatekeeper.attempt().await.unwrap();
    assert_eq!(open_on(&epochs), [LEADER, "follower-2"]);
}
