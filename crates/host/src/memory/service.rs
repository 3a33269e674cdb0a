//! The agent of this process: which servers are in its care, and what it was told of them.
//!
//! ```text
//!   [membership] ── servers that come and go ──┐
//!                                              ├──> MemoryService ──> onecopy_memory::agent::Agent
//!   onecopy.toml ── [[memory.instance]] ───────┘          ▲
//!                                                         └── GET /memory, POST /memory/set, POST /memory/auto
//! ```

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onecopy_memory::agent::{Agent, Status};
use onecopy_memory::arbiter::{InstancePolicy, Policy};
use onecopy_memory::engine::{Change, Progress};
use onecopy_memory::pressure::Host;
use onecopy_memory::{InstanceName, MemoryError, Size};
use onecopy_postgres::Server;
use tokio::task::JoinHandle;

use super::engines;
use super::starting::{ServersMemory, host_bytes};
use super::{MemoryConfiguration, MemoryStatus};
use crate::HostError;
use crate::membership::{Membership, Seen};
use crate::observed_server::ObservedServer;

/// How often it is looked whether followers have come or gone.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(500);

/// How long a round that is under way may take when the agent ends; its servers keep what they have.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The agent, and the tasks that it works in; they end with it.
pub(crate) struct MemoryService {
    agent: Agent,
    memory: Arc<ServersMemory>,
    /// Servers of the cluster that are in its care.
    servers: Mutex<BTreeMap<InstanceName, Arc<Server>>>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl MemoryService {
    /// Looks after the servers of `[[memory.instance]]`.
    ///
    /// # Errors
    /// [`HostError::Memory`] when the kernel does not tell of memory, [`HostError::InstanceUnreachable`].
    pub fn start(memory: Arc<ServersMemory>) -> Result<Arc<Self>, HostError> {
        let source = Arc::new(Host::new()?);
        let configuration = memory.configuration();
        let policy = policy(configuration, &source)?;
        let agent = Agent::new(policy, Vec::new(), source);
        agent.set_auto(None, configuration.auto)?;
        let host_bytes = memory.host_bytes();
        for instance in &configuration.instances {
            let share = |size: Option<Size>| size.map(|size| size.of(host_bytes));
            let policy = InstancePolicy {
                floor_bytes: share(instance.floor).unwrap_or(0),
                ceiling_bytes: share(instance.ceiling),
                weight: instance.weight.unwrap_or(1.0),
                pinned_bytes: None,
            };
            agent.add(engines::of_instance(instance, configuration, host_bytes)?, policy);
        }
        let service = Arc::new(MemoryService { agent, memory, servers: Mutex::default(), tasks: Mutex::default() });
        let agent = service.agent.clone();
        service.lock_tasks().push(tokio::spawn(async move { agent.run().await }));
        Ok(service)
    }

    /// Looks after the servers of a cluster, too, as they come and go.
    pub fn follow_cluster(self: &Arc<Self>, membership: &Arc<Membership>) {
        self.follow(membership);
        // Neither is kept alive by this: a cluster that is dropped leaves nothing behind that works on.
        let (service, membership) = (Arc::downgrade(self), Arc::downgrade(membership));
        self.lock_tasks().push(tokio::spawn(async move {
            loop {
                tokio::time::sleep(FOLLOW_INTERVAL).await;
                let (Some(service), Some(membership)) = (service.upgrade(), membership.upgrade()) else { return };
                service.follow(&membership);
                drop(membership);
                let servers = service.servers.lock().unwrap_or_else(PoisonError::into_inner).clone();
                service.memory.follow_groups(&servers).await;
            }
        }));
    }

    /// Ends the agent; the servers keep what they have.
    pub async fn end(&self) {
        self.agent.stop();
        let tasks = std::mem::take(&mut *self.lock_tasks());
        for (index, mut task) in tasks.into_iter().enumerate() {
            // The first one is the agent's own, which ends by itself.
            if index > 0 || tokio::time::timeout(END_TIMEOUT, &mut task).await.is_err() {
                task.abort();
            }
        }
    }

    /// What is known, now.
    pub fn status(&self) -> MemoryStatus {
        MemoryStatus { agent: self.agent.status(), notice: self.memory.missing_notice() }
    }

    /// Gives a server a size by hand; a share is one of its ceiling. Returns when it was told.
    ///
    /// # Errors
    /// [`HostError::Memory`] when it cannot have it; nothing has changed then.
    pub async fn set(&self, instance: &InstanceName, size: Size) -> Result<Change, HostError> {
        // Also says which servers there are.
        self.agent.engine(instance)?;
        let status = self.agent.status();
        let bytes = match size {
            Size::Bytes(bytes) => bytes,
            Size::Millionths(_) => size.of(ceiling_bytes(&status, instance)?),
        };
        Ok(self.agent.set(instance, bytes).await?)
    }

    /// Waits until a server that was set by hand has its size.
    ///
    /// # Errors
    /// [`HostError::Memory`] when somebody has set another size meanwhile, or the server has left.
    pub async fn reach(
        &self,
        instance: &InstanceName,
        told: &Change,
        report: &(dyn Fn(&Progress) + Send + Sync),
    ) -> Result<Change, HostError> {
        let reached = self.agent.reach(instance, told.target_bytes, report).await?;
        Ok(Change { from_bytes: told.from_bytes, ..reached })
    }

    /// Switches the automatic for one server, or for all and those to come.
    ///
    /// # Errors
    /// [`HostError::Memory`] when there is no such server.
    pub fn set_auto(&self, instance: Option<&InstanceName>, automatic: bool) -> Result<(), HostError> {
        Ok(self.agent.set_auto(instance, automatic)?)
    }

    /// Takes servers that have come into care, and leaves those alone that have gone.
    fn follow(&self, membership: &Membership) {
        let leader = membership.leader();
        let mut there: BTreeMap<String, Arc<Server>> = BTreeMap::new();
        // What runs in a machine of its own has the memory that the machine has.
        let mut add = |observed: &ObservedServer| {
            if let Some(server) = Arc::clone(&observed.instance).into_process() {
                there.insert(observed.name.clone(), server);
            }
        };
        add(leader);
        for seen in membership.followers() {
            if let Seen::Member { observed, .. } = seen {
                add(&observed);
            }
        }
        let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        servers.retain(|name, server| {
            let stays = there.get(name.as_str()).is_some_and(|now| Arc::ptr_eq(now, server));
            if !stays {
                self.agent.remove(name);
            }
            stays
        });
        for (name, server) in there {
            if let Err(error) = self.take_in(&mut servers, &name, server) {
                tracing::error!(server = name, %error, "its memory is not looked after");
            }
        }
    }

    fn take_in(
        &self,
        servers: &mut BTreeMap<InstanceName, Arc<Server>>,
        name: &str,
        server: Arc<Server>,
    ) -> Result<(), HostError> {
        if let Entry::Vacant(place) = servers.entry(name.parse().map_err(MemoryError::from)?) {
            let engine = engines::of_server(place.key(), &server, &self.memory)?;
            self.agent.add(engine, self.memory.policy_of(name, server.data_directory()));
            place.insert(server);
        }
        Ok(())
    }

    fn lock_tasks(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for MemoryService {
    fn drop(&mut self) {
        self.lock_tasks().iter().for_each(JoinHandle::abort);
    }
}

fn policy(configuration: &MemoryConfiguration, source: &Host) -> Result<Policy, MemoryError> {
    let host_bytes = host_bytes(source)?;
    Ok(Policy {
        budget_bytes: configuration.budget.of(host_bytes),
        reserve_bytes: configuration.keep_available.of(host_bytes),
        ..Policy::for_host(host_bytes)
    })
}

fn ceiling_bytes(status: &Status, instance: &InstanceName) -> Result<u64, MemoryError> {
    let known = status.instances.iter().find(|known| known.instance == *instance);
    let observed = known.and_then(|known| known.observation.as_ref()).map(|observation| observation.ceiling_bytes);
    observed.ok_or_else(|| MemoryError::Statement {
        instance: instance.clone(),
        action: "tell its ceiling",
        reason: known.and_then(|known| known.failure.clone()).unwrap_or_else(|| "it has not answered yet".to_owned()),
    })
}
