//! The memory of a host's servers: how a cluster's servers are started, and the agent that shares memory out among
//! them.

mod client;
mod configuration;
mod engines;
mod limit;
mod metrics;
mod routes;
mod schema;
mod service;
mod standalone;
mod starting;
mod status;

pub use client::{set, set_auto, status};
pub use configuration::{CgroupUse, ExtensionUse, InstanceMemory, MemoryConfiguration, ServerMemory};
pub(crate) use metrics::metrics;
pub(crate) use routes::routes;
pub use routes::{AutoRequest, SetRequest};
pub(crate) use schema::EXTENSION;
pub(crate) use service::MemoryService;
pub use standalone::MemoryAgent;
pub(crate) use starting::ServersMemory;
pub use status::{MemoryStatus, MemorySummary};
