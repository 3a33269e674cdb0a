//! Keeping a server running.
//!
//! ```text
//!              started                    its postmaster died
//! Starting ───────────────> Running ─────────────────────────┐
//!    ▲  │                      │                             ▼
//!    │  └── start failed ──────┼───────────────────────> BackingOff
//!    │                         │ stop                        │ stop
//!    └───── delay over ────────┼─────────────────────────────┤
//!                              ▼                             ▼
//!                           Stopping ────────────────────> Stopped
//! ```

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::{PostgresError, Server, StopMode};

/// What a supervised server is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SupervisorState {
    /// Being started, recovery included.
    Starting,
    /// Accepts connections.
    Running {
        /// The postmaster.
        process_id: u32,
        /// Restarts so far, over the supervisor's life.
        restarts: u64,
    },
    /// Waits before the next start.
    BackingOff {
        /// Why it is down.
        reason: String,
        /// How long it waits.
        delay: Duration,
    },
    /// Being stopped.
    Stopping,
    /// Stopped for good; the error, if the stop failed.
    Stopped {
        /// Why the stop failed.
        error: Option<String>,
    },
}

/// Keeps a server running until it is told to stop. Dropped without [`Supervisor::stop`], it lets go of the server, which runs on.
#[derive(Debug)]
pub struct Supervisor {
    state: watch::Receiver<SupervisorState>,
}

impl Supervisor {
    /// Starts the server, or takes over one that runs, and keeps it running. Returns at once: watch the state.
    pub fn spawn(_server: Arc<Server>) -> Supervisor {
        todo!()
    }

    /// The server.
    pub fn server(&self) -> &Arc<Server> {
        todo!()
    }

    /// The state, now and whenever it changes.
    pub fn state(&self) -> watch::Receiver<SupervisorState> {
        self.state.clone()
    }

    /// Waits until the server runs.
    ///
    /// # Errors
    /// The reason of the first failed start, when it does not start at once; [`PostgresError::SupervisorGone`].
    pub async fn wait_running(&self) -> Result<(), PostgresError> {
        todo!()
    }

    /// Stops and starts the server, as a change of its settings may need.
    ///
    /// # Errors
    /// [`PostgresError::SupervisorGone`], those of [`Server::stop`] and [`Server::start`].
    pub async fn restart(&self, _mode: StopMode) -> Result<(), PostgresError> {
        todo!()
    }

    /// Stops the server and ends.
    ///
    /// # Errors
    /// Those of [`Server::stop`]; the server is then still running and not supervised any more.
    pub async fn stop(self, _mode: StopMode) -> Result<(), PostgresError> {
        todo!()
    }
}
