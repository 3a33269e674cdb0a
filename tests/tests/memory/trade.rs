//! Two servers of one host and one budget: memory goes to the one that needs it, and back when the loads change places.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use onecopy_memory::Level;
use onecopy_memory::agent::{Agent, Rhythm};
use onecopy_memory::arbiter::{InstancePolicy, Policy};
use onecopy_memory::engine::{Engine, ExtensionEngine};
use onecopy_memory::pressure::{Host, Source};
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::memory::pages::{self, PAGE_BYTES};
use onecopy_tests::memory::pgbench::{Pgbench, Script, Until};
use onecopy_tests::memory::pool::Pool;
use onecopy_tests::servers::DATABASE;
use tokio::time::Instant;

const CEILING_BYTES: u64 = 192 * MIB;
/// Both together: too little for both loads.
const BUDGET_BYTES: u64 = 256 * MIB;
/// What the busy one reads.
const ROWS: u64 = 160 * MIB / PAGE_BYTES;
/// And what the other one does.
const FEW_ROWS: u64 = 16 * MIB / PAGE_BYTES;
/// By so much the busy one's pool must be the larger one.
const DIFFERENCE_BYTES: u64 = 64 * MIB;
/// What is known of the past minute must have passed.
const DEADLINE: Duration = Duration::from_secs(240);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Longer than any test.
const LONG: Until = Until::Seconds(1000);

struct Pair {
    harnesses: [Harness; 2],
    pools: [Pool; 2],
}

impl Pair {
    /// Loads one server much and the other one little until the pools are so, too; the budget is kept at every look.
    async fn trade(&self, agent: &Agent, busy: usize) -> anyhow::Result<()> {
        let idle = 1 - busy;
        let loads = [
            Pgbench::start(self.harnesses[busy].leader(), &Script::uniform_pages(ROWS), 2, LONG)?,
            Pgbench::start(self.harnesses[idle].leader(), &Script::uniform_pages(FEW_ROWS), 1, LONG)?,
        ];
        let deadline = Instant::now() + DEADLINE;
        let mut looks = 0;
        loop {
            let statuses = (self.pools[busy].status().await?, self.pools[idle].status().await?);
            let used = |status: &onecopy_tests::memory::pool::Status| status.pool_bytes.max(status.target_bytes);
            // Memory that went from one to the other between the two looks is seen twice; a second look at the first
            // one tells.
            let busy_again = self.pools[busy].status().await?;
            let sum = used(&statuses.0).min(used(&busy_again)) + used(&statuses.1);
            ensure!(sum <= BUDGET_BYTES, "{sum} bytes in use: {statuses:?}");
            looks += 1;
            if statuses.0.pool_bytes >= statuses.1.pool_bytes + DIFFERENCE_BYTES {
                break;
            }
            ensure!(Instant::now() < deadline, "{statuses:?} after {looks} looks; {:?}", agent.status());
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        for load in loads {
            load.stop().await?;
        }
        Ok(())
    }
}

/// Two servers trade memory when their loads change places; together they never exceed the budget.
///
/// Spec: A6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m8_two_servers_trade_memory_when_their_loads_change_places() -> anyhow::Result<()> {
    let plan = || Plan::new(Version::Fifteen, CEILING_BYTES).set("onecopy.memory_target", "96MB");
    let harnesses = [Harness::start(plan()).await?, Harness::start(plan()).await?];
    let mut engines: Vec<Arc<dyn Engine>> = Vec::new();
    for (harness, name) in harnesses.iter().zip(["one", "two"]) {
        let leader = harness.leader();
        pages::make(leader, ROWS).await?;
        let connection = leader.server.connection().with_database(DATABASE);
        let directory = Some(leader.server.data_directory().to_owned());
        engines.push(Arc::new(ExtensionEngine::new(name.parse()?, Level::Request, &connection, directory)?));
    }
    let host = Arc::new(Host::new()?);
    let mut policy = Policy::for_host(host.pressure()?.total_bytes);
    policy.budget_bytes = BUDGET_BYTES;
    policy.pace.settle = Duration::from_secs(1);
    policy.pace.reversal = Duration::from_secs(2);
    for engine in &engines {
        policy.instances.insert(engine.instance().clone(), InstancePolicy::default());
    }
    // A busy machine lets a server wait, which is no failure of its.
    let rhythm = Rhythm { interval: Duration::from_millis(500), answer_timeout: Duration::from_secs(60) };
    let agent = Agent::with_rhythm(policy, engines, host, rhythm);
    let pools = [harnesses[0].pool().await?, harnesses[1].pool().await?];
    let running = tokio::spawn({
        let agent = agent.clone();
        async move { agent.run().await }
    });
    let pair = Pair { harnesses, pools };
    pair.trade(&agent, 0).await?;
    pair.trade(&agent, 1).await?;
    agent.stop();
    running.await?;
    let status = agent.status();
    ensure!(status.figures.failures == 0 && status.figures.shrinks > 0, "{status:?}");
    println!("{:?}", status.figures);
    Ok(())
}
