//! Rounds: the order of changes, servers that hang or refuse, a host that cannot be read.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::fake::{ANSWER_TIMEOUT, FakeEngine, MIB, agent, change, pins_only};
use crate::agent::{Mode, Outcome};
use crate::arbiter::{ArbiterState, Decision, Policy};
use crate::engine::Engine;
use crate::{BindingLimit, Bytes, HostPressure, Level, Observation};

/// More than a busy machine could hold up by itself.
const ROUNDS: u32 = 300;

/// Wants to give all of "taker"'s wish from "giver", in the wrong order and without asking whether there is room.
fn trade(
    _policy: &Policy,
    _pressure: &HostPressure,
    observations: &[Observation],
    _elapsed: Duration,
    _state: &mut ArbiterState,
) -> Vec<Decision> {
    let mut decisions = Vec::new();
    for (name, wish) in [("taker", 700 * MIB), ("giver", 300 * MIB)] {
        let observation = observations.iter().find(|observation| observation.instance.as_str() == name);
        let wanted = observation.filter(|observation| observation.target_bytes != wish);
        decisions.extend(wanted.map(|observation| change(observation, wish)));
    }
    decisions
}

#[tokio::test]
async fn growth_waits_until_the_memory_has_come_back() {
    let (giver, taker) = (FakeEngine::new("giver", 600), FakeEngine::new("taker", 300));
    let (agent, _) = agent(trade, 1000, &[&giver, &taker]);
    for _ in 0..3 {
        agent.round().await;
        assert!(taker.calls().is_empty(), "the giver has its memory still");
    }
    assert_eq!(giver.calls(), ["set 300"]);
    let status = agent.status();
    let waits = status.instances[1].decision.as_ref().expect("a decision");
    assert_eq!((&waits.outcome, waits.times), (&Outcome::Postponed, 3));
    giver.arrive();
    agent.round().await;
    assert_eq!(taker.calls(), ["set 700"]);
    let figures = agent.status().figures;
    assert_eq!((figures.shrinks, figures.shrunk_bytes), (1, 300 * MIB));
    assert_eq!((figures.growths, figures.grown_bytes, figures.postponed), (1, 400 * MIB, 3));
}

#[tokio::test]
async fn a_server_that_hangs_is_counted_as_it_was_and_holds_nobody_up() {
    let (giver, taker) = (FakeEngine::new("giver", 600), FakeEngine::new("taker", 300));
    let (agent, _) = agent(pins_only, 1000, &[&giver, &taker]);
    agent.round().await;
    giver.lock().hangs = true;
    agent.round().await;
    let status = agent.status();
    let hung = &status.instances[0];
    let observation = hung.observation.as_ref().expect("the old one");
    assert!(!observation.answered && hung.failure.as_ref().is_some_and(|why| why.contains("100 ms")), "{hung:?}");
    assert_eq!((status.committed_bytes, status.figures.unanswered), (900 * MIB, 1));
    let error = agent.set(&"taker".parse().expect("a name"), 500 * MIB).await.expect_err("no room");
    assert!(error.to_string().contains("others keep 600MB"), "{error}");
    let rounds = agent.status().figures.rounds;
    // It is asked beside the rounds from now on: many of them end within one of its answers' time, however busy the
    // machine is.
    let begin = std::time::Instant::now();
    for _ in 0..ROUNDS {
        agent.round().await;
    }
    assert_eq!(agent.status().figures.rounds, rounds + u64::from(ROUNDS));
    assert!(
        begin.elapsed() < ANSWER_TIMEOUT * ROUNDS,
        "each round has waited for a hung server: {:?}",
        begin.elapsed()
    );
    giver.lock().hangs = false;
    while agent.status().instances.iter().any(|instance| instance.failure.is_some()) {
        tokio::time::sleep(Duration::from_millis(10)).await;
        agent.round().await;
    }
}

/// It may grow all the same: nobody else gets the memory.
#[tokio::test]
async fn what_a_server_was_told_to_grow_to_counts_also_when_it_does_not_answer() {
    let (giver, taker) = (FakeEngine::new("giver", 300), FakeEngine::new("taker", 300));
    let (agent, _) = agent(trade, 2000, &[&giver, &taker]);
    taker.lock().is_silent = true;
    agent.round().await;
    assert_eq!((taker.calls(), agent.status().figures.failures), (vec!["set 700".to_owned()], 1));
    assert_eq!(agent.status().committed_bytes, 1000 * MIB);
    taker.lock().hangs = true;
    agent.round().await;
    assert_eq!(agent.status().committed_bytes, 1000 * MIB, "it hangs");
}

#[tokio::test]
async fn nothing_is_decided_while_the_host_cannot_be_read() {
    let (giver, taker) = (FakeEngine::new("giver", 600), FakeEngine::new("taker", 300));
    let (agent, host) = agent(trade, 1000, &[&giver, &taker]);
    host.unreadable.store(true, Ordering::Relaxed);
    agent.round().await;
    assert!(giver.calls().is_empty() && agent.status().pressure.is_none());
    assert_eq!(agent.status().figures.blind_rounds, 1);
    host.unreadable.store(false, Ordering::Relaxed);
    agent.round().await;
    assert_eq!(giver.calls(), ["set 300"]);
}

#[tokio::test]
async fn a_server_that_refuses_is_noted_and_the_others_go_on() {
    let (giver, taker) = (FakeEngine::new("giver", 600), FakeEngine::new("taker", 300));
    let (agent, _) = agent(trade, 2000, &[&giver, &taker]);
    giver.lock().refuses = true;
    agent.round().await;
    assert_eq!(taker.calls(), ["set 700"]);
    let status = agent.status();
    let outcome = &status.instances[0].decision.as_ref().expect("a decision").outcome;
    assert!(matches!(outcome, Outcome::Failed { reason } if reason.contains("it is ill")), "{outcome:?}");
    assert_eq!(status.figures.failures, 1);
    assert_eq!(status.committed_bytes, 1300 * MIB);
}

#[tokio::test]
async fn what_a_server_publishes_is_taken_before_it_is_asked() {
    let giver = FakeEngine::at_level("giver", 600, Level::Publish);
    let (agent, _) = agent(trade, 1000, &[&giver]);
    agent.round().await;
    assert_eq!(giver.calls(), ["take 300", "set 300"]);
    assert_eq!(agent.status().figures.taken_bytes, 150 * MIB);
}

#[tokio::test]
async fn what_is_published_is_taken_from_a_server_that_hangs_while_memory_is_short() {
    let server = FakeEngine::at_level("server", 600, Level::Publish);
    let (agent, host) = agent(pins_only, 1000, &[&server]);
    agent.round().await;
    host.is_short.store(true, Ordering::Relaxed);
    agent.round().await;
    assert!(server.calls().is_empty(), "it answers: the arbiter decides");
    server.lock().hangs = true;
    host.is_short.store(false, Ordering::Relaxed);
    agent.round().await;
    assert!(server.calls().is_empty(), "nothing is short");
    host.is_short.store(true, Ordering::Relaxed);
    agent.round().await;
    assert_eq!(server.calls(), ["take 100"]);
    assert_eq!(agent.status().figures.taken_bytes, 50 * MIB);
}

/// Each is waited for as long as an answer may take, at the same time.
#[tokio::test]
async fn servers_that_hang_are_taken_from_beside_each_other() {
    let names: Vec<String> = (0..8).map(|number| format!("server{number}")).collect();
    let servers: Vec<_> = names.iter().map(|name| FakeEngine::at_level(name, 100, Level::Publish)).collect();
    let (agent, host) = agent(pins_only, 1000, &servers.iter().collect::<Vec<_>>());
    agent.round().await;
    for (number, server) in servers.iter().enumerate() {
        let mut state = server.lock();
        (state.hangs, state.is_unclear) = (true, number < 7);
    }
    agent.round().await;
    host.is_short.store(true, Ordering::Relaxed);
    let begin = std::time::Instant::now();
    agent.round().await;
    assert!(begin.elapsed() < ANSWER_TIMEOUT * 6, "{:?}", begin.elapsed());
    assert_eq!(servers[7].calls(), ["take 36"], "who is seen at once gives first");
}

/// A cgroup of 1000 MiB of which so many are available.
fn group_with(available: Bytes) -> BindingLimit {
    BindingLimit {
        cgroup: "/pod".to_owned(),
        limit_bytes: Some(1000 * MIB),
        high_bytes: None,
        usage_bytes: (1000 - available) * MIB,
        reclaimable_bytes: 0,
        swap_bytes: None,
        oom_kills: 0,
        psi_some_avg10: None,
    }
}

#[tokio::test]
async fn what_is_taken_unasked_respects_floors_and_hands_and_sees_the_servers_own_cgroup() {
    let server = FakeEngine::at_level("server", 100, Level::Publish);
    let (agent, host) = agent(pins_only, 1000, &[&server]);
    agent.round().await;
    server.lock().hangs = true;
    // The reserve is a twentieth of the host, and of the cgroup.
    server.lock().limits = vec![group_with(20)];
    agent.round().await;
    assert_eq!(server.calls(), ["take 30"], "the cgroup is short by that, the host is not");
    host.is_short.store(true, Ordering::Relaxed);
    for expected in [&["take 6"][..], &[]] {
        agent.round().await;
        assert_eq!(
            server.calls(),
            expected,
            "its chunks are gone, though half of them held no memory; the floor is 64"
        );
    }
    agent.lock().members.get_mut(server.instance()).expect("a server").mode = Mode::Pinned { target_bytes: 100 * MIB };
    agent.round().await;
    assert!(server.calls().is_empty(), "somebody has set its size by hand");
}

#[tokio::test]
async fn nobody_grows_while_a_server_has_never_answered_that_is_there() {
    let (silent, other) = (FakeEngine::new("silent", 600), FakeEngine::new("other", 300));
    silent.lock().hangs = true;
    let (agent, _) = agent(pins_only, 1000, &[&silent, &other]);
    agent.round().await;
    agent.set(other.instance(), 900 * MIB).await.expect("it may come");
    assert!(other.calls().is_empty(), "the silent one may have most of the budget");
    assert!(agent.status().figures.postponed > 0);
    silent.lock().hangs = false;
    while agent.status().instances.iter().any(|instance| instance.failure.is_some()) {
        tokio::time::sleep(Duration::from_millis(10)).await;
        agent.round().await;
    }
    agent.round().await;
    assert!(other.calls().is_empty(), "the 600 that are known now leave no room for 900");
    agent.set(other.instance(), 400 * MIB).await.expect("there is room");
    assert_eq!(other.calls(), ["set 400"]);
}

#[tokio::test]
async fn it_runs_until_it_is_stopped() {
    let server = FakeEngine::new("server", 600);
    let (agent, _) = agent(pins_only, 1000, &[&server]);
    let running = tokio::spawn({
        let agent = agent.clone();
        async move { agent.run().await }
    });
    while agent.status().figures.rounds < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    agent.stop();
    tokio::time::timeout(Duration::from_secs(60), running).await.expect("it ends").expect("without a panic");
    agent.run().await;
}
