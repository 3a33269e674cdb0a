//! Processes that die at every step.

use onecopy_clone::keeper::DEATHS_MAX;
use onecopy_clone::service::{CloneState, HYDRATOR_COMMAND, KEEPER_COMMAND};
use onecopy_postgres::StopMode;
use onecopy_testing::process::{arguments, send};
use rustix::process::Signal;

use crate::primary::{
    ClonedPrimary, Load, assert_ordinary, begin_clone, connect, end_clone, processes, signal, wait_gone, watch,
};

/// A hydrator that dies or hangs, at any moment, is succeeded by one that goes on; one that dies again and again is
/// given up and its clones are removed.
///
/// Spec: A3
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_hydrator_is_succeeded_by_one_that_goes_on() {
    let primary = ClonedPrimary::start(100_000).await;
    let load = Load::start(&primary).await;
    let service = primary.service().await;
    let plan = primary.plan("clone", Some(0));
    let ready = primary.make(&service, vec![plan.clone()]).await.remove(0);
    let clone = primary.run(ready).await;
    // As often as would be too often if none of them brought anything, on a machine that is as fast as may be. What
    // each is asked for nobody has asked for before, and the load does not change it.
    for round in 0..2 * DEATHS_MAX {
        let hydrator = signal(&service, HYDRATOR_COMMAND, Signal::KILL).await;
        let client = connect(&clone).await;
        let (begin, end) = (500 + 80 * round, 580 + 80 * round);
        let pages = format!("SELECT count(*) FROM item WHERE ctid >= '({begin},0)' AND ctid < '({end},0)'");
        let rows: i64 = client.query_one(&pages, &[]).await.expect("it waits and answers").get(0);
        assert!(rows > 80, "{rows} in pages {begin} to {end}");
        assert_eq!(service.list().await.expect("listed").len(), 1);
        assert_ne!(processes(&service, HYDRATOR_COMMAND), [hydrator]);
    }
    service.set_limit(&plan.target, None).await.expect("no limit");
    assert_ordinary(&watch(&service, &plan.target).await);
    assert!(load.end().await > 0);
    primary.assert_same(&clone).await;
    wait_gone(&service).await;
}

/// Spec: A3
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_hydrator_is_killed_and_succeeded() {
    let (primary, service, plan, clone) = begin_clone(20_000).await;
    let hydrator = signal(&service, HYDRATOR_COMMAND, Signal::STOP).await;
    let client = primary.client().await;
    client.batch_execute("UPDATE item SET filler = 'changed'; CHECKPOINT").await.expect("the primary goes on");
    assert_ne!(processes(&service, HYDRATOR_COMMAND), [hydrator]);
    end_clone(&primary, &service, &plan, &clone).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_keeper_a_hydrator_goes_on() {
    let (primary, service, plan, clone) = begin_clone(20_000).await;
    signal(&service, KEEPER_COMMAND, Signal::KILL).await;
    end_clone(&primary, &service, &plan, &clone).await;
}

/// Without keeper and hydrator the source goes on, the clone shows no zeros, and the next command clears away.
///
/// Spec: A3, nightly
#[tokio::test(flavor = "multi_thread")]
async fn when_both_are_killed_the_source_runs_and_the_next_service_clears_away() {
    let (primary, service, plan, clone) = begin_clone(20_000).await;
    for command in [KEEPER_COMMAND, HYDRATOR_COMMAND] {
        signal(&service, command, Signal::KILL).await;
    }
    let client = primary.client().await;
    client.batch_execute("UPDATE item SET filler = 'changed'; CHECKPOINT").await.expect("the primary goes on");
    let progress = watch(&service, &plan.target).await;
    assert!(matches!(&progress.state, CloneState::Discarded { .. }), "{progress:?}");
    let service = primary.service().await;
    wait_gone(&service).await;
    assert!(!clone.is_running() && !plan.target.exists());
    let again = primary.make(&primary.service().await, vec![plan.clone()]).await.remove(0);
    let clone = primary.run(again).await;
    primary.service().await.set_limit(&plan.target, None).await.expect("no limit");
    assert_ordinary(&watch(&service, &plan.target).await);
    primary.assert_same(&clone).await;
    wait_gone(&service).await;
}

/// Nobody but us can start a clone before it is whole, also after a crash of the host.
///
/// Spec: C6
#[tokio::test(flavor = "multi_thread")]
async fn a_clone_cannot_be_started_without_its_service_before_it_is_whole() {
    let (primary, service, plan, clone) = begin_clone(20_000).await;
    clone.stop(StopMode::Immediate).await.expect("stopped");
    clone.set_inherited(Vec::new());
    let refused = clone.start().await.expect_err("nobody else can start it").to_string();
    assert!(refused.contains("PG_VERSION"), "{refused}");
    let descriptors = service.descriptors(&plan.target).await.expect("its descriptors again");
    clone.set_inherited(descriptors.into_inherited());
    clone.start().await.expect("started");
    end_clone(&primary, &service, &plan, &clone).await;
}

/// The clone's and the source's server may crash while it is filled.
///
/// Spec: A5
#[tokio::test(flavor = "multi_thread")]
async fn a_clone_and_its_source_may_crash_while_it_is_filled() {
    let (primary, service, plan, clone) = begin_clone(20_000).await;
    clone.crash_stop().await.expect("crashed");
    let descriptors = service.descriptors(&plan.target).await.expect("its descriptors again");
    clone.set_inherited(descriptors.into_inherited());
    clone.start().await.expect("started again");
    primary.server.crash_stop().await.expect("crashed");
    primary.server.start().await.expect("started again");
    let client = primary.client().await;
    client.batch_execute("UPDATE item SET filler = 'changed'; CHECKPOINT").await.expect("the primary goes on");
    end_clone(&primary, &service, &plan, &clone).await;
}

/// Spec: A3
#[tokio::test(flavor = "multi_thread")]
async fn a_hydrator_that_dies_while_clones_are_made_leaves_nothing() {
    hydrators_die_after(&[50, 200]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hydrator_that_dies_at_any_time_while_clones_are_made_leaves_nothing() {
    hydrators_die_after(&[0, 20, 100, 400]).await;
}

/// Kills the hydrator so many milliseconds after a clone was asked for.
async fn hydrators_die_after(pauses_ms: &[u64]) {
    let primary = ClonedPrimary::start(20_000).await;
    for pause_ms in pauses_ms {
        let service = primary.service().await;
        let plan = primary.plan(&format!("clone_{pause_ms}"), Some(0));
        let mut making = service.clone_all(vec![plan.clone()]).await.expect("accepted");
        let mut log = primary.open_log(&service);
        tokio::time::sleep(std::time::Duration::from_millis(*pause_ms)).await;
        for process in processes(&service, HYDRATOR_COMMAND) {
            send(process, Signal::KILL);
        }
        while let Ok(Some(_)) = making.next().await {}
        let clones = service.list().await.expect("listed");
        let is_made = clones.iter().any(|clone| clone.state == CloneState::Filling);
        if is_made {
            service.discard(&plan.target).await.expect("discarded");
        }
        wait_gone(&service).await;
        let mut said =
            |what: &str| format!("{what} after {pause_ms} ms of {clones:?}; it said:\n{}", read_all(&mut log));
        let left: Vec<_> = walk(&plan.target);
        assert!(left.is_empty(), "{}", said(&format!("{left:?} is left")));
        let client = primary.client().await;
        let slots = client.query("SELECT slot_name FROM pg_replication_slots", &[]).await.expect("slots");
        assert!(slots.is_empty(), "{}", said("a slot is left"));
        client.batch_execute("UPDATE item SET filler = 'changed'; CHECKPOINT").await.expect("the primary goes on");
    }
}

/// Spec: A3
#[tokio::test(flavor = "multi_thread")]
async fn one_that_dies_again_and_again_is_given_up_and_its_clones_are_buried() {
    let (primary, service, plan, clone) = begin_clone(20_000).await;
    let watched = tokio::spawn({
        let (service, target) = (service.clone(), plan.target.clone());
        async move { watch(&service, &target).await }
    });
    let mut killed = Vec::new();
    while service.rendezvous().is_held() {
        for hydrator in processes(&service, HYDRATOR_COMMAND) {
            // The last one is started to clean up.
            let cleans_up = arguments(hydrator).iter().any(|word| word == "--clean-up");
            if !cleans_up && !killed.contains(&hydrator) && send(hydrator, Signal::KILL) {
                killed.push(hydrator);
            }
        }
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    assert!(killed.len() >= 3, "{killed:?}");
    let progress = watched.await.expect("watched");
    assert!(matches!(&progress.state, CloneState::Discarded { .. }), "{progress:?}");
    assert!(!clone.is_running() && !plan.target.exists());
    let client = primary.client().await;
    client.batch_execute("UPDATE item SET filler = 'changed'; CHECKPOINT").await.expect("the primary goes on");
    let slots = client.query("SELECT slot_name FROM pg_replication_slots", &[]).await.expect("slots");
    assert!(slots.is_empty());
    wait_gone(&service).await;
}

/// A directory and what lies directly in it; nothing when it is not there.
fn walk(directory: &std::path::Path) -> Vec<std::path::PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    std::iter::once(directory.to_owned()).chain(entries.flatten().map(|entry| entry.path())).collect()
}

fn read_all(file: &mut std::fs::File) -> String {
    let mut text = String::new();
    std::io::Read::read_to_string(file, &mut text).map(|_| text).unwrap_or_default()
}
