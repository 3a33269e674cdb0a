//! What `onecopy status` tells about a cluster.

use std::net::SocketAddr;
use std::path::PathBuf;

use onecopy_postgres::Lsn;
use onecopy_router::RouterStatus;
use serde::{Deserialize, Serialize};

/// A cluster, now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// Its directory.
    pub directory: PathBuf,
    /// The daemon.
    pub process_id: u32,
    /// The daemon's version.
    pub version: String,
    /// The servers, the leader first.
    pub servers: Vec<ServerStatus>,
    /// Where clients connect.
    pub address: SocketAddr,
    /// The router.
    pub router: RouterStatus,
}

/// One server, now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// Its name.
    pub name: String,
    /// `leader` or `follower`.
    pub role: String,
    /// `running`, `starting`, `backing off`, `stopping` or `stopped`; `silent` when it runs and does not answer.
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
}
