//! What long work tells while it goes on.

use serde::{Deserialize, Serialize};

/// One thing that happened during [`crate::Cluster::up`] or [`crate::stop`]; with `--json` each is one line.
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
    /// The cluster serves clients.
    Ready {
        /// The cluster.
        summary: crate::Summary,
    },
    /// The work failed; nothing follows.
    Failed {
        /// What failed, on what, why, and what to do.
        message: String,
    },
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
