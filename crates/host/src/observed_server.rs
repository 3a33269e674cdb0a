//! One server, looked at without stopping it.

use std::sync::Arc;
use std::time::Duration;

use onecopy_postgres::{
    ConnectedStandby, Instance, PostgresError, ReplicationState, Role, Supervisor, SupervisorState,
};
use tokio::sync::watch;

use crate::{HostError, ServerStatus};

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
    pub instance: Arc<dyn Instance>,
    /// What its supervisor does.
    pub state: watch::Receiver<SupervisorState>,
}

impl ObservedServer {
    /// What `supervisor` keeps running.
    pub fn new(name: &str, role: Role, supervisor: &Supervisor) -> ObservedServer {
        ObservedServer {
            name: name.to_owned(),
            role,
            instance: Arc::clone(supervisor.instance()),
            state: supervisor.state(),
        }
    }

    /// Waits until it runs.
    ///
    /// # Errors
    /// [`HostError::Server`] when it does not start; its supervisor goes on trying.
    pub async fn wait_running(&self) -> Result<(), HostError> {
        let mut state = self.state.clone();
        let settled =
            state.wait_for(|state| !matches!(state, SupervisorState::Starting | SupervisorState::Stopping)).await;
        let failed = match settled.as_deref() {
            Ok(SupervisorState::Running { .. }) => return Ok(()),
            Ok(SupervisorState::BackingOff { reason, .. }) => PostgresError::Down { reason: reason.clone() },
            _ => PostgresError::SupervisorGone,
        };
        Err(HostError::server(&self.name)(failed))
    }

    /// What is known without asking it.
    pub(crate) fn known(&self) -> ServerStatus {
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
            problem,
            ..ServerStatus::default()
        }
    }

    /// Slots whose log is gone; none that are known when it does not answer.
    pub(crate) async fn lost_slots(&self) -> Vec<String> {
        const LOST: &str = "SELECT slot_name::text FROM pg_catalog.pg_replication_slots WHERE wal_status = 'lost'";
        let ask = async {
            let client = self.instance.administration().connect().await?;
            let rows = client.query(LOST, &[]).await.map_err(PostgresError::sql("read the replication slots"))?;
            Ok::<_, PostgresError>(rows.iter().map(|row| row.get(0)).collect())
        };
        if self.known().process_id.is_none() {
            return Vec::new();
        }
        // What stands in the way is told as the leader's own problem.
        tokio::time::timeout(ANSWER_TIMEOUT, ask).await.ok().and_then(Result::ok).unwrap_or_default()
    }

    /// Asks it for its part in replication, when it runs.
    pub(crate) async fn ask(&self) -> (ServerStatus, Vec<ConnectedStandby>) {
        let mut status = self.known();
        if status.process_id.is_none() {
            return (status, Vec::new());
        }
        match tokio::time::timeout(ANSWER_TIMEOUT, self.instance.replication_state()).await {
            Ok(Ok(ReplicationState::Primary { current, standbys, .. })) => {
                status.position = Some(current);
                return (status, standbys);
            }
            Ok(Ok(ReplicationState::Standby { replayed, .. })) => status.position = replayed,
            Ok(Err(error)) => status.problem = Some(error.to_string()),
            Err(_) => {
                status.state = "unresponsive".to_owned();
                status.problem = Some(format!("it runs and did not answer within {} s", ANSWER_TIMEOUT.as_secs()));
            }
        }
        (status, Vec::new())
    }
}

pub(crate) fn role_name(role: Role) -> &'static str {
    match role {
        Role::Leader => "leader",
        Role::Follower => "follower",
    }
}
