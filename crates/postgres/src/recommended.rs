//! Settings for a server of a cluster on one machine.

use serde::{Deserialize, Serialize};

use crate::Settings;

/// Connections that a server takes; the router's own bounds stay far below it. PostgreSQL's pool of serializable
/// transactions has ten places for each, and the router ends an update transaction (40001) that could outlive the pool:
/// with this many, after about 8000 others.
const CONNECTIONS_MAX: u32 = 1000;
/// Standbys, base backups and slots that a leader serves at once.
const REPLICATION_MAX: u32 = 16;
/// Predicate locks a connection: with so many connections, 130 000 together, so that certification rarely falls back to
/// whole relations.
const PREDICATE_LOCKS_PER_TRANSACTION: u32 = 128;
/// A follower that is away keeps no more of the log than this; further behind it is made anew.
const SLOT_WAL_KEEP_SIZE_MAX: &str = "4GB";

/// What a server is in its cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// Executes and certifies updates.
    Leader,
    /// A hot standby.
    Follower,
}

/// The settings of a server with this role, under this name (`cluster_name`, in its log and process title).
///
/// Both roles differ only where they must: a follower may become the leader at any time. Commits stay durable: `fsync`,
/// `full_page_writes` and `synchronous_commit` are not touched. Addresses, port and sockets come from
/// [`crate::ServerOptions`].
pub fn recommended_settings(role: Role, name: &str) -> Settings {
    let mut settings = Settings::new();
    settings
        .set("cluster_name", name)
        .set("wal_level", "replica")
        .set("wal_log_hints", "on")
        .set("hot_standby", "on")
        .set("hot_standby_feedback", "on")
        .set("max_wal_senders", REPLICATION_MAX)
        .set("max_replication_slots", REPLICATION_MAX)
        .set("max_slot_wal_keep_size", SLOT_WAL_KEEP_SIZE_MAX)
        .set("max_connections", CONNECTIONS_MAX)
        .set("max_pred_locks_per_transaction", PREDICATE_LOCKS_PER_TRANSACTION)
        // The router holds a snapshot on every server: feedback must arrive before vacuum removes what it sees.
        .set("wal_receiver_status_interval", "1s")
        .set("wal_retrieve_retry_interval", "500ms")
        .set("password_encryption", "scram-sha-256")
        .set("log_line_prefix", "%m [%p] %q%u@%d %a ")
        .set("log_checkpoints", "off");
    if role == Role::Follower {
        // Queries at an epoch live seconds; replay that waits for one longer would make every other reader stale.
        settings.set("max_standby_streaming_delay", "5s");
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_stay_durable_in_both_roles() {
        for role in [Role::Leader, Role::Follower] {
            let settings = recommended_settings(role, "leader");
            for name in ["fsync", "full_page_writes", "synchronous_commit"] {
                assert_eq!(settings.get(name), None);
            }
            assert_eq!(settings.get("max_slot_wal_keep_size"), Some("4GB"));
        }
    }
}
