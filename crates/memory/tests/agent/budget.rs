//! The agent over real servers: one budget, sizes set by hand, agents and servers that end and come again.

use std::sync::Arc;
use std::time::Duration;

use onecopy_memory::agent::{Agent, Mode, Outcome, Rhythm};
use onecopy_memory::arbiter::Policy;
use onecopy_memory::engine::{Engine, ExtensionEngine};
use onecopy_memory::pressure::{Host, Source};
use onecopy_memory::{HostPressure, Level, MemoryError};
use onecopy_postgres::{Server, StopMode};
use onecopy_testing::TestDirectory;

use crate::servers::{self, CEILING, MIB, client, engine, fill, name};

/// A host that always has enough: this machine may be short of memory for other reasons.
struct Roomy;

impl Source for Roomy {
    fn pressure(&self) -> Result<HostPressure, MemoryError> {
        Ok(HostPressure { available_bytes: 64 << 30, total_bytes: 64 << 30, ..HostPressure::default() })
    }
}

fn agent(servers: &[&Arc<Server>], budget_bytes: u64) -> Agent {
    let engines: Vec<Arc<dyn Engine>> = servers
        .iter()
        .zip(["one", "other"])
        .map(|(server, name)| Arc::new(engine(server, name)) as Arc<dyn Engine>)
        .collect();
    let policy = Policy { budget_bytes, ..Policy::for_host(64 << 30) };
    let rhythm = Rhythm { interval: Duration::from_millis(200), answer_timeout: Duration::from_secs(60) };
    Agent::with_rhythm(policy, engines, Arc::new(Roomy), rhythm)
}

/// Rounds until it holds, of those in which all servers have answered; three minutes are for ever.
async fn rounds_until(agent: &Agent, what: &str, holds: impl Fn() -> bool) {
    for _ in 0..900 {
        agent.round().await;
        if agent.status().instances.iter().all(|instance| instance.failure.is_none()) && holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    panic!("{what} did not come: {:#?}", agent.status());
}

fn pools(agent: &Agent) -> Vec<u64> {
    let pool = |instance: onecopy_memory::agent::InstanceStatus| instance.observation.expect("an answer").pool_bytes;
    agent.status().instances.into_iter().map(pool).collect()
}

#[tokio::test]
async fn all_pools_together_come_into_the_budget_and_stay_there() {
    let directory = TestDirectory::new().expect("a directory");
    let (one, other) = tokio::join!(servers::server(&directory, "one"), servers::server(&directory, "other"));
    fill(&one).await;
    let budget = 300 * MIB;
    let agent = agent(&[&one, &other], budget);
    rounds_until(&agent, "the budget", || pools(&agent).iter().sum::<u64>() <= budget).await;
    assert!(agent.status().committed_bytes <= budget);

    let error = agent.set(&name("one"), CEILING + 1).await.expect_err("above the ceiling");
    assert!(matches!(error, MemoryError::AboveCeiling { .. }), "{error}");
    let change = agent.set(&name("one"), 224 * MIB).await.expect("the other can make room");
    assert_eq!(change.target_bytes, 224 * MIB);
    rounds_until(&agent, "the size set by hand", || {
        let pools = pools(&agent);
        assert!(pools.iter().sum::<u64>() <= budget, "{pools:?}");
        pools[0] == 224 * MIB
    })
    .await;
    let refused = agent.set(&name("other"), 200 * MIB).await.expect_err("there is no room for it");
    assert!(matches!(refused, MemoryError::OverBudget { .. }), "{refused}");
    let status = serde_json::to_value(agent.status()).expect("it can be written");
    assert_eq!(status["instances"][0]["mode"], "pinned", "{status}");
}

#[tokio::test]
async fn what_was_set_by_hand_is_asked_for_again_after_a_crash() {
    let directory = TestDirectory::new().expect("a directory");
    let server = servers::server(&directory, "one").await;
    let agent = agent(&[&server], CEILING);
    let told = agent.set(&name("one"), 63 * MIB - 1).await.expect("taken");
    assert_eq!(told.target_bytes, 64 * MIB, "sizes are whole chunks");
    agent.reach(&name("one"), 64 * MIB, &|_| {}).await.expect("reached");
    server.stop(StopMode::Immediate).await.expect("stopped");
    agent.round().await;
    let status = agent.status();
    assert!(status.instances[0].failure.is_some());
    assert_eq!(status.committed_bytes, 64 * MIB, "it is counted as it was");
    server.start().await.expect("started");
    rounds_until(&agent, "the size", || {
        let status = agent.status();
        status.instances[0].failure.is_none() && pools(&agent) == [64 * MIB]
    })
    .await;
}

#[tokio::test]
async fn the_next_agent_begins_with_what_is() {
    let directory = TestDirectory::new().expect("a directory");
    let server = servers::server(&directory, "one").await;
    let first = agent(&[&server], 128 * MIB);
    rounds_until(&first, "the budget", || pools(&first) == [128 * MIB]).await;
    drop(first);
    let second = agent(&[&server], 128 * MIB);
    second.round().await;
    let status = second.status();
    assert_eq!((pools(&second), status.committed_bytes), (vec![128 * MIB], 128 * MIB));
    assert!(!status.decisions.iter().any(|logged| logged.outcome == Outcome::Told), "{:#?}", status.decisions);
    assert_eq!(status.instances[0].mode, Mode::Automatic);
}

#[tokio::test]
async fn what_is_published_is_taken_first() {
    let directory = TestDirectory::new().expect("a directory");
    let server = servers::server(&directory, "one").await;
    fill(&server).await;
    // Only now: what has never been used has no memory that could be taken.
    let client = client(&server).await;
    client.batch_execute("ALTER SYSTEM SET onecopy.memory_reserve = '48MB'").await.expect("set");
    client.batch_execute("SELECT pg_reload_conf()").await.expect("told");
    let directory = Some(server.data_directory().to_owned());
    let engine = ExtensionEngine::new(name("one"), Level::Publish, &server.socket_connection(), directory);
    let policy = Policy { budget_bytes: CEILING, ..Policy::for_host(64 << 30) };
    let rhythm = Rhythm { interval: Duration::from_millis(200), answer_timeout: Duration::from_secs(60) };
    let agent =
        Agent::with_rhythm(policy.clone(), vec![Arc::new(engine.expect("a good level"))], Arc::new(Roomy), rhythm);
    let published =
        || agent.status().instances[0].observation.as_ref().map_or(0, |observation| observation.published_bytes);
    rounds_until(&agent, "the reserve", || published() == 48 * MIB).await;
    assert_eq!(pools(&agent), [CEILING], "what is published is memory of the server still");
    agent.set_policy(Policy { budget_bytes: 160 * MIB, ..policy });
    rounds_until(&agent, "the budget", || pools(&agent) == [160 * MIB]).await;
    assert!(agent.status().figures.taken_bytes >= 20 * MIB, "{:?}", agent.status().figures);
    rounds_until(&agent, "the reserve again", || published() == 48 * MIB).await;
    agent.set_policy(Policy { budget_bytes: CEILING, ..Policy::for_host(64 << 30) });
    agent.set(&name("one"), CEILING).await.expect("there is room");
    rounds_until(&agent, "all of it", || pools(&agent) == [CEILING]).await;
    rounds_until(&agent, "the reserve after growing", || published() == 48 * MIB).await;
}

#[tokio::test]
async fn this_host_can_be_asked() {
    let pressure = Host::new().expect("Linux").pressure().expect("its figures");
    assert!(pressure.total_bytes > pressure.available_bytes && pressure.available_bytes > 0, "{pressure:?}");
}
