//! Looking at a running cluster: the answers for `/status`, `/metrics` and `/healthz`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use onecopy_postgres::{ConnectedStandby, ReplicationState, Role, Server, Supervisor, SupervisorState};
use onecopy_router::{Health, Router};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::http::Observed;
use crate::{ClusterStatus, Directory, ServerStatus};

/// How long one server may take to answer; one that is stopped never does.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// One server, as far as it can be looked at without stopping it.
#[derive(Debug, Clone)]
pub struct ObservedServer {
    /// Its name.
    pub name: String,
    /// What it is in the cluster.
    pub role: Role,
    /// The server.
    pub server: Arc<Server>,
    /// What its supervisor does.
    pub state: watch::Receiver<SupervisorState>,
}

impl ObservedServer {
    /// What `supervisor` keeps running.
    pub fn new(name: &str, role: Role, supervisor: &Supervisor) -> ObservedServer {
        ObservedServer {
            name: name.to_owned(),
            role,
            server: Arc::clone(supervisor.server()),
            state: supervisor.state(),
        }
    }

    /// What is known without asking it.
    fn known(&self) -> ServerStatus {
        let (state, process_id, restarts, problem) = match &*self.state.borrow() {
            SupervisorState::Starting => ("starting", None, None, None),
            SupervisorState::Running { process_id, restarts } => ("running", Some(*process_id), Some(*restarts), None),
            SupervisorState::BackingOff { reason, .. } => ("backing off", None, None, Some(reason.clone())),
            SupervisorState::Stopping => ("stopping", None, None, None),
            SupervisorState::Stopped { error } => ("stopped", None, None, error.clone()),
        };
        ServerStatus {
            name: self.name.clone(),
            role: role_name(self.role).to_owned(),
            state: state.to_owned(),
            process_id,
            restarts,
            position: None,
            replay_lag_bytes: None,
            replication: None,
            problem,
        }
    }

    /// Asks it for its part in replication, when it runs.
    async fn ask(&self) -> (ServerStatus, Vec<ConnectedStandby>) {
        let mut status = self.known();
        if status.process_id.is_none() {
            return (status, Vec::new());
        }
        match tokio::time::timeout(ANSWER_TIMEOUT, self.server.replication_state()).await {
            Ok(Ok(ReplicationState::Primary { current, standbys, .. })) => {
                status.position = Some(current);
                return (status, standbys);
            }
            Ok(Ok(ReplicationState::Standby { replayed, .. })) => status.position = replayed,
            Ok(Err(error)) => status.problem = Some(error.to_string()),
            Err(_) => {
                status.state = "silent".to_owned();
                status.problem = Some(format!("it runs and did not answer within {} s", ANSWER_TIMEOUT.as_secs()));
            }
        }
        (status, Vec::new())
    }
}

/// A cluster that can be looked at.
pub struct Observation {
    /// Its directory.
    pub directory: Directory,
    /// Its servers, the leader first.
    pub servers: Vec<ObservedServer>,
    /// Where clients connect.
    pub address: SocketAddr,
    /// Its router.
    pub router: Arc<Router>,
}

impl Observation {
    /// All servers, asked at the same time.
    async fn servers(&self) -> Vec<ServerStatus> {
        let mut questions = JoinSet::new();
        for (index, server) in self.servers.iter().cloned().enumerate() {
            questions.spawn(async move { (index, server.ask().await) });
        }
        let answers: BTreeMap<usize, _> = questions.join_all().await.into_iter().collect();
        let standbys: Vec<ConnectedStandby> =
            answers.values().flat_map(|(_, standbys)| standbys.iter().cloned()).collect();
        let mut servers: Vec<ServerStatus> = answers.into_values().map(|(status, _)| status).collect();
        for follower in servers.iter_mut().skip(1) {
            match standbys.iter().find(|standby| standby.name == follower.name) {
                Some(standby) => {
                    follower.replication = Some(standby.state.clone());
                    // Before its first report it has replayed nothing that is known, which is not the same as nothing.
                    follower.replay_lag_bytes = standby.replayed.map(|_| standby.lag_bytes);
                }
                None => follower.replication = Some("not connected".to_owned()),
            }
        }
        servers
    }

    /// The cluster, now.
    pub async fn status(&self) -> ClusterStatus {
        ClusterStatus {
            directory: self.directory.root().to_owned(),
            process_id: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            servers: self.servers().await,
            address: self.address,
            router: self.router.status(),
        }
    }
}

impl Observed for Observation {
    async fn metrics(&self) -> String {
        let mut text = self.router.metrics();
        let servers: Vec<ServerStatus> = self.servers.iter().map(ObservedServer::known).collect();
        instance_metrics(&servers, &mut text);
        text
    }

    async fn status(&self) -> serde_json::Value {
        serde_json::to_value(Observation::status(self).await).expect("a status is strings, numbers and lists")
    }

    async fn health(&self) -> Result<(), String> {
        let leader = self.servers.first().expect("a cluster has a leader").known();
        match leader.process_id {
            Some(_) => Observed::health(&*self.router).await,
            None => Err(format!("the leader is {}: {}", leader.state, leader.problem.unwrap_or_default())),
        }
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Leader => "leader",
        Role::Follower => "follower",
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
        let leader = status.servers.first().expect("a router has a leader");
        match leader.health {
            // Not asked yet is the first moment of a router, which has found it fit when it started.
            Health::Up | Health::Unknown => Ok(()),
            health => Err(format!("{} is {}", leader.name, format!("{health:?}").to_lowercase())),
        }
    }
}

/// What the host adds to the router's metrics: the processes that it watches.
fn instance_metrics(servers: &[ServerStatus], text: &mut String) {
    let mut family = |name: &str, kind: &str, help: &str, value: &dyn Fn(&ServerStatus) -> Option<u64>| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for server in servers {
            if let Some(value) = value(server) {
                let _ = writeln!(text, "{name}{{server=\"{}\",role=\"{}\"}} {value}", server.name, server.role);
            }
        }
    };
    family("onecopy_instance_running_count", "gauge", "1 when the server's process runs.", &|server| {
        Some(u64::from(server.process_id.is_some()))
    });
    family("onecopy_instance_restarts_total", "counter", "Starts after the first.", &|server| server.restarts);
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
        };
        let mut text = String::new();
        let servers = [server("leader", Role::Leader, Some(2)), server("follower-1", Role::Follower, None)];
        instance_metrics(&servers, &mut text);
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            samples,
            [
                "onecopy_instance_running_count{server=\"leader\",role=\"leader\"} 1",
                "onecopy_instance_running_count{server=\"follower-1\",role=\"follower\"} 0",
                "onecopy_instance_restarts_total{server=\"leader\",role=\"leader\"} 2",
            ]
        );
    }
}
