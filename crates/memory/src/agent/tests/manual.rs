//! What is set by hand, and who is automatic.

use std::sync::Mutex;

use super::fake::{FakeEngine, MIB, agent, pins_only};
use crate::agent::Mode;
use crate::arbiter::InstancePolicy;
use crate::{BindingLimit, InstanceName, MemoryError};

fn name(text: &str) -> InstanceName {
    text.parse().expect("a name")
}

#[tokio::test]
async fn impossible_sizes_are_refused_with_figures_and_change_nothing() {
    let (one, other) = (FakeEngine::new("one", 300), FakeEngine::new("other", 300));
    let (agent, _) = agent(pins_only, 900, &[&one, &other]);
    let error = agent.set(&name("none"), 100 * MIB).await.expect_err("unknown");
    assert!(error.to_string().contains("one, other"), "{error}");
    let error = agent.set(&name("one"), 63 * MIB).await.expect_err("too small");
    assert!(matches!(error, MemoryError::BelowFloor { floor_bytes, .. } if floor_bytes == 64 * MIB), "{error}");
    let error = agent.set(&name("one"), 1001 * MIB).await.expect_err("too large");
    assert!(matches!(error, MemoryError::AboveCeiling { ceiling_bytes, .. } if ceiling_bytes == 1000 * MIB), "{error}");
    let error = agent.set(&name("one"), 900 * MIB).await.expect_err("the other needs its floor");
    assert!(matches!(error, MemoryError::OverBudget { others_bytes, .. } if others_bytes == 64 * MIB), "{error}");
    one.lock().refuses = true;
    let error = agent.set(&name("one"), 200 * MIB).await.expect_err("ill");
    assert!(error.to_string().contains("it is ill"), "{error}");
    one.lock().hangs = true;
    let error = agent.set(&name("one"), 200 * MIB).await.expect_err("hangs");
    assert!(error.to_string().contains("within 100 ms"), "{error}");
    assert!(agent.status().instances.iter().all(|instance| instance.mode == Mode::Automatic));
    assert!(other.calls().is_empty());
}

#[tokio::test]
async fn a_size_that_a_cgroup_does_not_allow_is_refused_and_less_is_not() {
    let one = FakeEngine::new("one", 300);
    let limit = |name: &str, mib: u64| BindingLimit {
        cgroup: name.to_owned(),
        limit_bytes: Some(mib * MIB),
        high_bytes: None,
        usage_bytes: 0,
        reclaimable_bytes: 0,
        swap_bytes: None,
        oom_kills: 0,
        psi_some_avg10: None,
    };
    one.lock().limits = vec![limit("/pod/one", 600), limit("/pod", 400)];
    let (agent, _) = agent(pins_only, 2000, &[&one]);
    let error = agent.set(&name("one"), 390 * MIB).await.expect_err("a twentieth stays free");
    assert!(
        matches!(
            &error,
            MemoryError::AboveLimit { cgroup, most_bytes, .. } if cgroup == "/pod" && *most_bytes == 380 * MIB
        ),
        "{error}"
    );
    assert_eq!(one.calls(), Vec::<String>::new());
    assert_eq!(agent.set(&name("one"), 380 * MIB).await.expect("just so").target_bytes, 380 * MIB);
    one.arrive();
    // It has more than it could get: to shrink is right all the same.
    one.lock().limits = vec![limit("/pod", 100)];
    assert_eq!(agent.set(&name("one"), 200 * MIB).await.expect("less than now").target_bytes, 200 * MIB);
}

#[tokio::test]
async fn the_owners_floor_and_ceiling_count_too() {
    let one = FakeEngine::new("one", 300);
    let (agent, _) = agent(pins_only, 900, &[]);
    let policy = InstancePolicy { floor_bytes: 200 * MIB, ceiling_bytes: Some(400 * MIB), ..InstancePolicy::default() };
    agent.add(one.clone(), policy);
    assert!(matches!(agent.set(&name("one"), 199 * MIB).await, Err(MemoryError::BelowFloor { .. })));
    assert!(matches!(agent.set(&name("one"), 401 * MIB).await, Err(MemoryError::AboveCeiling { .. })));
    assert_eq!(agent.set(&name("one"), 400 * MIB).await.expect("allowed").target_bytes, 400 * MIB);
    assert!(agent.remove(&name("one")) && !agent.remove(&name("one")));
}

#[tokio::test]
async fn a_size_set_by_hand_survives_a_restart_of_the_server() {
    let one = FakeEngine::new("one", 300);
    let (agent, _) = agent(pins_only, 900, &[&one]);
    agent.set(&name("one"), 200 * MIB).await.expect("taken");
    one.arrive();
    agent.round().await;
    assert_eq!(one.calls(), ["set 200"]);
    {
        let mut state = one.lock();
        (state.pool, state.target) = (800, 800);
    }
    agent.round().await;
    assert_eq!(one.calls(), ["set 200"]);
    agent.set_auto(None, true).expect("all");
    one.lock().target = 800;
    agent.round().await;
    assert!(one.calls().is_empty(), "the automatic does not know of the old size");
}

#[tokio::test]
async fn a_size_is_held_as_the_server_rounds_it() {
    let one = FakeEngine::new("one", 300);
    one.lock().granule = 128;
    let (agent, _) = agent(pins_only, 900, &[&one]);
    let change = agent.set(&name("one"), 200 * MIB).await.expect("taken");
    assert_eq!(change.target_bytes, 256 * MIB);
    agent.round().await;
    assert_eq!(one.calls(), ["set 256"], "it is not told the same for ever");
    one.arrive();
    agent.reach(&name("one"), change.target_bytes, &|_| {}).await.expect("reached");
    let change = agent.set(&name("one"), 250 * MIB).await.expect("it has that already");
    assert_eq!(change.target_bytes, 256 * MIB);
    agent.reach(&name("one"), change.target_bytes, &|_| {}).await.expect("reached");
    assert!(one.calls().is_empty());
    assert_eq!(
        agent.set(&name("one"), 999 * MIB).await.expect_err("the budget").to_string().matches("900MB").count(),
        1
    );
}

#[tokio::test]
async fn who_waits_is_told_how_far_it_is() {
    let one = FakeEngine::new("one", 300);
    let (agent, _) = agent(pins_only, 900, &[&one]);
    agent.set(&name("one"), 200 * MIB).await.expect("taken");
    let seen = Mutex::new(Vec::new());
    let change = agent
        .reach(&name("one"), 200 * MIB, &|progress| {
            let mut seen = seen.lock().expect("no panic");
            seen.push(progress.pool_bytes / MIB);
            let next = if seen.len() == 1 { 250 } else { 200 };
            one.lock().pool = next;
        })
        .await
        .expect("reached");
    assert_eq!(*seen.lock().expect("no panic"), [300, 250, 200]);
    assert_eq!((change.from_bytes, change.pool_bytes), (300 * MIB, 200 * MIB));
    let error = agent.reach(&name("one"), 250 * MIB, &|_| {}).await.expect_err("another size was set");
    assert!(matches!(error, MemoryError::Unable { .. }), "{error}");
}

#[tokio::test]
async fn a_server_that_is_watched_is_left_alone() {
    let (one, other) = (FakeEngine::new("one", 300), FakeEngine::new("other", 300));
    let (agent, _) = agent(pins_only, 900, &[&one, &other]);
    agent.set(&name("other"), 200 * MIB).await.expect("taken");
    agent.set_auto(None, false).expect("all");
    agent.set_auto(Some(&name("none")), false).expect_err("unknown");
    let modes: Vec<Mode> = agent.status().instances.iter().map(|instance| instance.mode).collect();
    assert_eq!(modes, [Mode::Watched, Mode::Pinned { target_bytes: 200 * MIB }]);
    assert!(!agent.status().automatic);
    agent.round().await;
    one.lock().target = 100;
    agent.round().await;
    assert!(one.calls().is_empty());
    agent.add(FakeEngine::new("third", 100), InstancePolicy::default());
    assert_eq!(agent.status().instances[2].mode, Mode::Watched);
    agent.set_auto(Some(&name("one")), true).expect("known");
    assert_eq!(agent.status().instances[0].mode, Mode::Automatic);
}
