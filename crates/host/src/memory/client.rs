//! Asking a daemon about memory.

use super::{AutoRequest, MemoryStatus, SetRequest};
use crate::{Daemon, Event, HostError, Progress};

/// What `daemon` knows of the memory of its servers.
///
/// # Errors
/// [`HostError::NotACluster`], [`HostError::NotRunning`], [`HostError::NoMemoryAgent`] when nobody listens;
/// [`HostError::InvalidReply`] or [`HostError::InvalidAgentReply`] else.
pub async fn status(daemon: &Daemon) -> Result<MemoryStatus, HostError> {
    let body = daemon.get("/memory").await?;
    serde_json::from_slice(&body).map_err(|error| daemon.invalid_reply(error.to_string()))
}

/// Gives a server a size by hand. The last event is [`Event::Resized`]. What the server was told holds when this is
/// dropped.
///
/// # Errors
/// As [`status`]; [`HostError::Daemon`] with the daemon's words.
pub async fn set(daemon: &Daemon, request: &SetRequest, progress: &dyn Progress) -> Result<Event, HostError> {
    daemon.change("/memory/set", request, progress).await
}

/// Switches the automatic. The last event is [`Event::Switched`].
///
/// # Errors
/// As [`set`].
pub async fn set_auto(daemon: &Daemon, request: &AutoRequest, progress: &dyn Progress) -> Result<Event, HostError> {
    daemon.change("/memory/auto", request, progress).await
}
