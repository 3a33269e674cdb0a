//! Looking at a running cluster: the answers for `/status`, `/metrics` and `/healthz`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use onecopy_control::metrics::Metric;
use onecopy_postgres::{ConnectedStandby, Role};
use onecopy_router::{Health, Router, Topology};
use tokio::task::JoinSet;

use crate::http::Observed;
use crate::machines::{machine_metrics, total_footprint};
use crate::membership::{Membership, Seen};
use crate::memory::{self, MemoryService, MemorySummary};
use crate::observed_server::role_name;
use crate::provisioning::slot_name;
use crate::{CloneStatus, ClusterStatus, Directory, MachineStatus, ServerStatus};

impl Seen {
    /// What is known without asking it.
    fn known(&self) -> ServerStatus {
        let (state, problem) = match self {
            Seen::Member { observed, clone, .. } => return ServerStatus { clone: clone.clone(), ..observed.known() },
            Seen::Absent { state, problem } => (state, problem.clone()),
        };
        let name = state.name.clone();
        let (role, word) = (role_name(Role::Follower), if state.leaving { "leaving" } else { "missing" });
        let (role, state) = (role.to_owned(), word.to_owned());
        ServerStatus { name, role, state, problem, ..ServerStatus::default() }
    }
}

/// A cluster that can be looked at.
pub struct Observation {
    /// Its directory.
    pub directory: Directory,
    /// Its servers.
    pub membership: Arc<Membership>,
    /// What looks after its servers' memory.
    pub memory: Arc<MemoryService>,
    /// Where clients connect.
    pub address: SocketAddr,
    /// Its router.
    pub router: Arc<Router>,
}

impl Observation {
    /// All servers, asked at the same time.
    async fn servers(&self) -> Vec<ServerStatus> {
        let mut servers = self.servers_alone().await;
        let mut questions = JoinSet::new();
        for (index, server) in servers.iter().enumerate() {
            if let Some(machine) = self.membership.machine(&server.name) {
                questions.spawn(async move { (index, machine.observe().await) });
            }
        }
        for (index, machine) in questions.join_all().await {
            servers[index].machine = machine;
        }
        servers
    }

    async fn servers_alone(&self) -> Vec<ServerStatus> {
        let followers = self.membership.followers();
        let mut questions = JoinSet::new();
        let asked = followers.iter().map(|seen| match seen {
            Seen::Member { observed, .. } => Some(observed.clone()),
            Seen::Absent { .. } => None,
        });
        for (index, server) in asked.enumerate() {
            if let Some(server) = server {
                questions.spawn(async move { (index, server.ask().await) });
            }
        }
        let ((leader, standbys), answers) = tokio::join!(self.membership.leader().ask(), questions.join_all());
        let mut answers: BTreeMap<usize, _> = answers.into_iter().collect();
        let lost = self.membership.leader().lost_slots().await;
        let router = self.router.status();
        let mut servers = vec![leader];
        for (index, seen) in followers.iter().enumerate() {
            let mut follower = answers.remove(&index).map_or_else(|| seen.known(), |(status, _)| status);
            if let Seen::Member { clone, stays, .. } = seen {
                follower.clone = clone.clone();
                tell_replication(&mut follower, &standbys, &lost);
                if !router.servers.iter().any(|routed| routed.name == follower.name) {
                    tell_out_of_router(&mut follower, *stays);
                }
            }
            servers.push(follower);
        }
        servers
    }

    /// The cluster, now.
    pub async fn status(&self) -> ClusterStatus {
        let servers = self.servers().await;
        let Topology { term, system_identifier, .. } = self.membership.remembered().topology;
        ClusterStatus {
            term,
            system_identifier,
            directory: self.directory.root().to_owned(),
            process_id: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            machines: total_footprint(&machines_of(&servers)),
            servers,
            address: self.address,
            router: self.router.status(),
            memory: Some(MemorySummary::from(&self.memory.status())),
        }
    }
}

impl Observed for Observation {
    async fn metrics(&self) -> String {
        let mut text = self.router.metrics();
        let mut servers = vec![self.membership.leader().known()];
        servers.extend(self.membership.followers().iter().map(Seen::known));
        instance_metrics(&servers, &mut text);
        clone_metrics(&servers, &mut text);
        machine_metrics(&machines_of(&self.servers().await), &mut text);
        text.push_str(&memory::metrics(&self.memory.status().agent));
        text
    }

    async fn status(&self) -> serde_json::Value {
        serde_json::to_value(Observation::status(self).await).expect("a status is strings, numbers and lists")
    }

    async fn health(&self) -> Result<(), String> {
        let leader = self.membership.leader().known();
        match leader.process_id {
            Some(_) => Observed::health(&*self.router).await,
            None => Err(format!("the leader is {}: {}", leader.state, leader.problem.unwrap_or_default())),
        }
    }
}

/// The machines of servers that have one, by the servers' names.
fn machines_of(servers: &[ServerStatus]) -> Vec<(&str, &MachineStatus)> {
    servers.iter().filter_map(|server| Some((server.name.as_str(), server.machine.as_ref()?))).collect()
}

/// What the leader says of a follower.
fn tell_replication(follower: &mut ServerStatus, standbys: &[ConnectedStandby], lost: &[String]) {
    match standbys.iter().find(|standby| standby.name == follower.name) {
        Some(standby) => {
            follower.replication = Some(standby.state.clone());
            // Before its first report it has replayed nothing that is known, which is not the same as nothing.
            follower.replay_lag_bytes = standby.replayed.map(|_| standby.lag_bytes);
        }
        None => follower.replication = Some("not connected".to_owned()),
    }
    if lost.contains(&slot_name(&follower.name)) {
        let name = &follower.name;
        let problem =
            format!("it was away for too long: the leader has removed log that it needs; onecopy reinit {name}");
        follower.problem = Some(problem);
    }
}

/// Clients cannot read there: not yet, or not any more.
fn tell_out_of_router(follower: &mut ServerStatus, stays: bool) {
    if follower.state == "running" {
        follower.state = if stays { "starting" } else { "stopping" }.to_owned();
    }
}

impl Observed for Router {
    async fn metrics(&self) -> String {
        Router::metrics(self)
    }

    async fn status(&self) -> serde_json::Value {
        serde_json::to_value(Router::status(self)).expect("a status is strings, numbers and lists")
    }

    async fn health(&self) -> Result<(), String> {
        let status = Router::status(self);
        let leader = status.leader().expect("a router has a leader");
        match leader.health {
            // Not asked yet is the first moment of a router, which has found it fit when it started.
            Health::Up | Health::Unknown => Ok(()),
            health => Err(format!("{} is {}", leader.name, format!("{health:?}").to_lowercase())),
        }
    }
}

/// What the host adds to the router's metrics: the processes that it watches.
fn instance_metrics(servers: &[ServerStatus], text: &mut String) {
    let mut add = |name, kind, help, value: &dyn Fn(&ServerStatus) -> Option<u64>| {
        family(text, servers, (name, kind, help), by_name_and_role, value);
    };
    add("onecopy_instance_running", "gauge", "1 when the server's process runs.", &|server| {
        Some(u64::from(server.process_id.is_some()))
    });
    add("onecopy_instance_restarts_total", "counter", "Starts after the first.", &|server| server.restarts);
}

/// How far the followers are that were cloned.
fn clone_metrics(servers: &[ServerStatus], text: &mut String) {
    let mut add = |name, kind, help, value: &dyn Fn(&CloneStatus) -> Option<u64>| {
        family(text, servers, (name, kind, help), by_name, |server| value(server.clone.as_ref()?));
    };
    add("onecopy_clone_whole", "gauge", "1 when all data of the clone is there.", &|clone| {
        Some(u64::from(clone.whole))
    });
    add("onecopy_clone_filled_bytes", "gauge", "Bytes of the clone that are there.", &|clone| Some(clone.filled_bytes));
    add("onecopy_clone_size_bytes", "gauge", "Bytes that the clone will have.", &|clone| Some(clone.total_bytes));
    add("onecopy_clone_rate_bytes_per_second", "gauge", "How fast the clone is filled.", &|clone| {
        Some(clone.rate_bytes_per_second)
    });
    add("onecopy_clone_left_seconds", "gauge", "Until the clone is whole.", &|clone| clone.left_seconds);
    add("onecopy_clone_demand_faults_total", "counter", "Accesses that had to wait for data.", &|clone| {
        Some(clone.demand_faults)
    });
}

/// One metric (name, kind, help) with a sample for each server that has a value.
fn family(
    text: &mut String,
    servers: &[ServerStatus],
    (name, kind, help): (&str, &str, &str),
    labels: impl Fn(&ServerStatus) -> Vec<(&str, &str)>,
    value: impl Fn(&ServerStatus) -> Option<u64>,
) {
    let mut metric = Metric::new(text, name, kind, help);
    for server in servers {
        if let Some(value) = value(server) {
            metric.sample(&labels(server), value);
        }
    }
}

fn by_name(server: &ServerStatus) -> Vec<(&str, &str)> {
    vec![("server", &server.name)]
}

fn by_name_and_role(server: &ServerStatus) -> Vec<(&str, &str)> {
    vec![("server", &server.name), ("role", &server.role)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_one_line_a_known_value() {
        let server = |name: &str, role, restarts: Option<u64>| ServerStatus {
            name: name.to_owned(),
            role: role_name(role).to_owned(),
            state: "running".to_owned(),
            process_id: restarts.map(|_| 1),
            restarts,
            position: None,
            replay_lag_bytes: None,
            replication: None,
            problem: None,
            machine: None,
            clone: None,
        };
        let mut text = String::new();
        let servers = [server("leader", Role::Leader, Some(2)), server("follower-1", Role::Follower, None)];
        instance_metrics(&servers, &mut text);
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            samples,
            [
                "onecopy_instance_running{server=\"leader\",role=\"leader\"} 1",
                "onecopy_instance_running{server=\"follower-1\",role=\"follower\"} 0",
                "onecopy_instance_restarts_total{server=\"leader\",role=\"leader\"} 2",
            ]
        );
    }
}
