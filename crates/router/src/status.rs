//! What a router does now, for `status`, metrics and the admin console.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use serde::{Deserialize, Serialize};

use crate::epoch::{Epoch, GateSummary};
use crate::servers::{Health, Server};
use crate::state::RouterState;
use crate::topology::{Role, Topology};
use crate::wire::buffered_bytes;

/// A router's state.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RouterStatus {
    /// Default freshness of sessions.
    pub freshness: String,
    /// Clients connected.
    pub clients: usize,
    /// Clients that logged in so far.
    pub logins: u64,
    /// Clients refused so far.
    pub refused: u64,
    /// Bytes of messages that the router holds, in the buffers of connections to clients and servers and outside.
    #[serde(default)]
    pub buffered_bytes: usize,
    /// Units of work that only read, so far.
    pub reads: u64,
    /// Units of work that may have written, so far.
    pub updates: u64,
    /// Reads that ran again elsewhere, so far.
    pub read_retries: u64,
    /// Autocommit updates that ran again after 40001, so far.
    pub update_retries: u64,
    /// The leader, then the followers.
    pub servers: Vec<ServerStatus>,
    /// Databases that are open.
    pub databases: Vec<DatabaseStatus>,
}

/// One server's state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// Its name.
    pub name: String,
    /// Where it listens.
    pub address: String,
    /// Leader or follower.
    pub role: Role,
    /// Whether it answers.
    pub health: Health,
    /// Reads answered so far.
    pub reads: u64,
    /// In how many of the choices of a server for a read it takes part, from 0 to 1.
    pub read_share: f64,
    /// Reads that run there now.
    pub reads_in_flight: usize,
    /// Bytes of WAL that the leader has written and this server has not replayed, as of the last probes.
    pub replay_lag_bytes: u64,
}

/// One database's state.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DatabaseStatus {
    /// Its name.
    pub name: String,
    /// Clients in it.
    pub clients: usize,
    /// The newest epoch's number; none when no epoch is open.
    pub epoch: Option<u64>,
    /// Since its gate closed, in milliseconds.
    pub epoch_age_ms: Option<u64>,
    /// Commits that it lacks.
    pub epoch_commits_behind: Option<u64>,
    /// Servers on which it is open.
    pub epoch_servers: Vec<String>,
    /// Commits of updates so far.
    pub commits: u64,
    /// How gates went.
    pub gates: GateSummary,
    /// Idle back ends of readers, by server.
    pub idle_readers: Vec<usize>,
    /// Back ends on the leader that no transaction uses.
    pub parked: usize,
}

impl RouterStatus {
    /// The leader's.
    pub fn leader(&self) -> Option<&ServerStatus> {
        self.servers.iter().find(|server| server.role == Role::Leader)
    }

    pub(crate) fn of(state: &RouterState) -> RouterStatus {
        let counters = &state.counters;
        let leader_position = state.servers.leader().wal_position_bytes.load(Relaxed);
        let current = state.servers.current();
        let servers = current.servers().map(|server| ServerStatus {
            name: server.name.clone(),
            address: server.address.to_string(),
            role: server.role,
            health: server.health(),
            reads: server.reads.load(Relaxed),
            read_share: server.read_share.ratio(),
            reads_in_flight: server.reads_in_flight.load(Relaxed),
            replay_lag_bytes: leader_position.saturating_sub(server.wal_position_bytes.load(Relaxed)),
        });
        let mut databases: Vec<DatabaseStatus> =
            state.open_databases().iter().map(|database| database_status(database, &current)).collect();
        databases.sort_by(|one, other| one.name.cmp(&other.name));
        RouterStatus {
            freshness: state.settings().freshness.to_string(),
            clients: state.clients.load(SeqCst),
            logins: counters.logins.load(Relaxed),
            refused: counters.refused.load(Relaxed),
            buffered_bytes: buffered_bytes(),
            reads: counters.reads.load(Relaxed),
            updates: counters.updates.load(Relaxed),
            read_retries: counters.read_retries.load(Relaxed),
            update_retries: counters.update_retries.load(Relaxed),
            servers: servers.collect(),
            databases,
        }
    }
}

fn database_status(database: &crate::database::Database, servers: &Topology<Arc<Server>>) -> DatabaseStatus {
    let epoch = database.epochs.current();
    let commits = database.commit_barrier.commits_begun();
    let open_on = |epoch: &Epoch| {
        let open = servers.servers().filter(|server| epoch.snapshot_on(server).is_some());
        open.map(|server| server.name.clone()).collect()
    };
    DatabaseStatus {
        name: database.name.to_string(),
        clients: database.clients.load(SeqCst),
        epoch: epoch.as_ref().map(|epoch| epoch.id),
        epoch_age_ms: epoch.as_ref().map(|epoch| epoch.closed_at.elapsed().as_millis() as u64),
        epoch_commits_behind: epoch.as_ref().map(|epoch| commits.saturating_sub(epoch.commits)),
        epoch_servers: epoch.as_ref().map(|epoch| open_on(epoch)).unwrap_or_default(),
        commits,
        gates: database.epochs.statistics.summary(),
        idle_readers: servers.servers().map(|server| database.readers.idle_count(server)).collect(),
        parked: database.leader.idle_count(),
    }
}
