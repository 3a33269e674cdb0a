//! What `onecopy status` tells about a cluster.

use std::net::SocketAddr;
use std::path::PathBuf;

use onecopy_machine::{MachineStatus, TotalFootprint};
use onecopy_postgres::Lsn;
use onecopy_router::RouterStatus;
use serde::{Deserialize, Serialize};

use crate::memory::MemorySummary;

/// A cluster, now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// Its directory.
    pub directory: PathBuf,
    /// The daemon.
    pub process_id: u32,
    /// The daemon's version.
    pub version: String,
    /// Which leadership this is: 1 for the cluster's first leader, one more with each other leader.
    #[serde(default)]
    pub term: u64,
    /// The database system that all servers are copies of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_identifier: Option<String>,
    /// The leader, then the followers.
    pub servers: Vec<ServerStatus>,
    /// Where clients connect.
    pub address: SocketAddr,
    /// The router.
    pub router: RouterStatus,
    /// Its servers' memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemorySummary>,
    /// What its servers' machines take together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machines: Option<TotalFootprint>,
}

/// One server, now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// Its name.
    pub name: String,
    /// `leader` or `follower`.
    pub role: String,
    /// `running`, `starting`, `backing off`, `stopping` or `stopped`; `unresponsive` when it runs and does not answer;
    /// `missing` while it is not made yet, `leaving` while it is removed. A follower that runs is `starting` until the
    /// router knows it, and `stopping` as soon as the router has let it go.
    pub state: String,
    /// Its postmaster, while it runs.
    pub process_id: Option<u32>,
    /// How often it had to be started again since the daemon's start; none while it is not running.
    pub restarts: Option<u64>,
    /// Leader: end of its log. Follower: replayed up to here.
    pub position: Option<Lsn>,
    /// Follower: written by the leader and not yet replayed here, in bytes.
    pub replay_lag_bytes: Option<u64>,
    /// Follower: `streaming`, or what the leader says else.
    pub replication: Option<String>,
    /// Why it is not well.
    pub problem: Option<String>,
    /// The machine that it runs in, where it does not run as a process of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineStatus>,
    /// Follower that was cloned from the running leader: how, and how far it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clone: Option<CloneStatus>,
}

/// How far a clone is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CloneStatus {
    /// `lazy`, `reflink` or `copy`.
    pub way: String,
    /// All its data is there, and it needs nobody any more.
    pub whole: bool,
    /// Bytes that are there.
    pub filled_bytes: u64,
    /// Bytes that it will have; 0 while that is not known.
    pub total_bytes: u64,
    /// How fast it is filled now.
    pub rate_bytes_per_second: u64,
    /// Until it is whole; none while that is not known.
    pub left_seconds: Option<u64>,
    /// Accesses that had to wait for data so far.
    pub demand_faults: u64,
}

impl CloneStatus {
    /// One that has all its data.
    pub fn whole(way: &str) -> CloneStatus {
        CloneStatus { way: way.to_owned(), whole: true, ..CloneStatus::default() }
    }

    /// The part that is there, from 0 to 1.
    pub fn filled_ratio(&self) -> f64 {
        match (self.whole, self.total_bytes) {
            (true, _) => 1.0,
            (false, 0) => 0.0,
            (false, total) => (self.filled_bytes as f64 / total as f64).min(1.0),
        }
    }
}
