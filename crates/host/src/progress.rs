//! What long work tells while it goes on.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One thing that happened during [`crate::Cluster::up`], a change of its followers or [`crate::down`]; with `--json`
/// each is one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A step begins.
    Step {
        /// What is done, on what.
        message: String,
    },
    /// A follower's data arrives.
    Copying {
        /// The follower.
        server: String,
        /// Bytes that have arrived.
        done_bytes: u64,
        /// Bytes that will arrive, as far as known; 0 while it is not.
        total_bytes: u64,
    },
    /// Something that the user should know, although the work goes on.
    Notice {
        /// What, and what follows from it.
        message: String,
    },
    /// How followers are made, and why this way.
    Way {
        /// `lazy`, `reflink` or `copy`.
        way: String,
        /// Why.
        reason: String,
    },
    /// A new follower answers queries through the router.
    Answering {
        /// The follower.
        server: String,
        /// Since the change was begun, in milliseconds.
        elapsed_ms: u64,
    },
    /// A follower that answers already is being filled.
    Filling {
        /// The follower.
        server: String,
        /// How far it is.
        clone: crate::CloneStatus,
        /// Written by the leader and not yet replayed there; none while it is not known.
        replay_lag_bytes: Option<u64>,
    },
    /// All data of a follower is there.
    Whole {
        /// The follower.
        server: String,
    },
    /// The change is done; nothing follows.
    Done {
        /// Names of the followers now.
        followers: Vec<String>,
    },
    /// A server's pool is on its way to another size.
    Resizing {
        /// The server.
        instance: String,
        /// How far it is.
        progress: onecopy_memory::engine::Progress,
    },
    /// A server has been told another size, and has it where that was waited for; nothing follows.
    Resized {
        /// The server.
        instance: String,
        /// What it was told and what it has.
        change: onecopy_memory::engine::Change,
    },
    /// The automatic was switched; nothing follows.
    Switched {
        /// One server; none for all.
        instance: Option<String>,
        /// Targets follow need and pressure from now on.
        automatic: bool,
    },
    /// The cluster serves clients.
    Ready {
        /// The cluster.
        summary: Summary,
    },
    /// The work failed; nothing follows.
    Failed {
        /// What failed, on what, why, and what to do.
        message: String,
    },
}

impl Event {
    /// Whether nothing follows it.
    pub fn is_last(&self) -> bool {
        use Event::{Done, Failed, Ready, Resized, Switched};
        matches!(self, Done { .. } | Failed { .. } | Ready { .. } | Resized { .. } | Switched { .. })
    }
}

/// Receives the events. Called from several tasks, must not block for long.
pub trait Progress: Send + Sync {
    /// Takes one event.
    fn report(&self, event: Event);

    /// A step begins.
    fn step(&self, message: String) {
        tracing::info!("{message}");
        self.report(Event::Step { message });
    }

    /// Something that the user should know.
    fn notice(&self, message: String) {
        tracing::warn!("{message}");
        self.report(Event::Notice { message });
    }
}

impl<F: Fn(Event) + Send + Sync> Progress for F {
    fn report(&self, event: Event) {
        self(event);
    }
}

/// What a user must know of a cluster that is up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Its directory.
    pub directory: PathBuf,
    /// The daemon.
    pub process_id: u32,
    /// Where clients connect.
    pub router: SocketAddr,
    /// Where `/metrics`, `/status` and `/healthz` are.
    pub metrics: SocketAddr,
    /// Names of the servers that are there: the leader, then the followers.
    pub servers: Vec<String>,
    /// Version of PostgreSQL.
    pub postgres_version: String,
}
