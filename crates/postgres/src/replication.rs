//! What a server says about replication.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Lsn;

/// A server's part in replication, now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplicationState {
    /// The server takes updates.
    Primary {
        /// End of the write-ahead log that is written.
        current: Lsn,
        /// The timeline that it writes.
        timeline: u32,
        /// Standbys that are connected, in order of their names.
        standbys: Vec<ConnectedStandby>,
    },
    /// The server is in recovery and follows another one.
    Standby {
        /// Received from the primary and flushed; none when nothing was received since the start.
        received: Option<Lsn>,
        /// Replayed; readers see everything up to here.
        replayed: Option<Lsn>,
        /// Received and not yet replayed, in bytes.
        lag_bytes: u64,
        /// Age of the last replayed commit; none before the first. Grows when the primary is idle.
        replayed_commit_age: Option<Duration>,
        /// `pg_stat_wal_receiver.status`; none when no receiver runs.
        receiver_status: Option<String>,
    },
}

/// A row of `pg_stat_replication`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectedStandby {
    /// `application_name` of the standby.
    pub name: String,
    /// `startup`, `catchup`, `streaming`, `backup` or `stopping`.
    pub state: String,
    /// `async`, `potential`, `sync` or `quorum`.
    pub sync_state: String,
    /// Sent to it.
    pub sent: Option<Lsn>,
    /// Flushed by it.
    pub flushed: Option<Lsn>,
    /// Replayed by it.
    pub replayed: Option<Lsn>,
    /// Written by the primary and not yet replayed there, in bytes.
    pub lag_bytes: u64,
}
