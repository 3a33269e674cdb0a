//! Looking at a running cluster: the answers for `/status`, `/metrics` and `/healthz`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use onecopy_postgres::{ConnectedStandby, ReplicationState, Role, Server, Supervisor, SupervisorState};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::front::Front;
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
#[derive(Debug)]
pub struct Observation {
    /// Its directory.
    pub directory: Directory,
    /// Its servers, the leader first.
    pub servers: Vec<ObservedServer>,
    /// Its router.
    pub front: Arc<Front>,
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
            router: self.front.status().await,
        }
    }
}

impl Observed for Observation {
    async fn metrics(&self) -> String {
        let mut text = self.front.metrics().await;
        server_metrics(&self.servers().await, &mut text);
        text
    }

    async fn status(&self) -> serde_json::Value {
        serde_json::to_value(Observation::status(self).await).expect("a status is strings, numbers and lists")
    }

    async fn health(&self) -> Result<(), String> {
        let leader = self.servers.first().expect("a cluster has a leader").known();
        match leader.process_id {
            Some(_) => Ok(()),
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

/// The servers' part of the metrics.
fn server_metrics(servers: &[ServerStatus], text: &mut String) {
    let mut family = |name: &str, kind: &str, help: &str, value: &dyn Fn(&ServerStatus) -> Option<u64>| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for server in servers {
            if let Some(value) = value(server) {
                let _ = writeln!(text, "{name}{{server=\"{}\",role=\"{}\"}} {value}", server.name, server.role);
            }
        }
    };
    family("onecopy_server_up", "gauge", "1 when the server runs and answers.", &|server| {
        Some(u64::from(server.state == "running" && server.problem.is_none()))
    });
    family("onecopy_server_restarts_total", "counter", "Starts after the first.", &|server| server.restarts);
    family("onecopy_server_replay_lag_bytes", "gauge", "Written by the leader and not yet replayed.", &|server| {
        server.replay_lag_bytes
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_one_line_a_known_value() {
        let server = |name: &str, role, lag| ServerStatus {
            name: name.to_owned(),
            role: role_name(role).to_owned(),
            state: "running".to_owned(),
            process_id: Some(1),
            restarts: Some(2),
            position: None,
            replay_lag_bytes: lag,
            replication: None,
            problem: None,
        };
        let mut text = String::new();
        server_metrics(
            &[server("leader", Role::Leader, None), server("follower-1", Role::Follower, Some(7))],
            &mut text,
        );
        assert!(text.contains("onecopy_server_up{server=\"leader\",role=\"leader\"} 1\n"));
        assert!(text.contains("onecopy_server_restarts_total{server=\"follower-1\",role=\"follower\"} 2\n"));
        let lags: Vec<&str> = text.lines().filter(|line| line.starts_with("onecopy_server_replay_lag_bytes")).collect();
        assert_eq!(lags, ["onecopy_server_replay_lag_bytes{server=\"follower-1\",role=\"follower\"} 7"]);
    }
}
