//! What `onecopy memory status` tells.

use onecopy_memory::Bytes;
use onecopy_memory::agent::Status;
use serde::{Deserialize, Serialize};

/// The memory of a host's servers, now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// What the agent knows and has done.
    #[serde(flatten)]
    pub agent: Status,
    /// Why the cluster's servers cannot be resized, and what to do.
    pub notice: Option<String>,
}

/// One line of it, for `onecopy status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySummary {
    /// Targets follow need and pressure.
    pub automatic: bool,
    /// Servers in care.
    pub instances: usize,
    /// What their pools use or may use now.
    pub committed_bytes: Bytes,
    /// What all of them together may have.
    pub budget_bytes: Bytes,
    /// Memory that the host has left; none while that is not known.
    pub available_bytes: Option<Bytes>,
    /// Why the cluster's servers cannot be resized, and what to do.
    pub notice: Option<String>,
}

impl From<&MemoryStatus> for MemorySummary {
    fn from(status: &MemoryStatus) -> MemorySummary {
        let agent = &status.agent;
        MemorySummary {
            automatic: agent.automatic,
            instances: agent.instances.len(),
            committed_bytes: agent.committed_bytes,
            budget_bytes: agent.budget_bytes,
            available_bytes: agent.pressure.as_ref().map(|pressure| pressure.available_bytes),
            notice: status.notice.clone(),
        }
    }
}
