//! One machine's cluster: its directory, its servers, the router before them, and the page that tells how they are.
//!
//! ```text
//!             nothing there                      all there
//!  Cluster::up ──> leader made ──> followers made ──> servers running ──> router listens ──> Ready
//!       └──────────────── a directory that is a cluster already ──┘
//! ```
//!
//! While it serves, followers come and go: `POST /scale` and `POST /reinit` on the daemon's socket. Servers outlive a
//! killed daemon: the next [`Cluster::up`] takes them over, [`down`] stops them.

mod access;
mod change;
mod cloning;
mod cluster;
mod control;
mod daemon_client;
mod directory;
mod error;
mod http;
#[cfg(test)]
mod kills;
pub mod machines;
mod membership;
pub mod memory;
mod observation;
mod observed_server;
mod orphans;
mod ports;
mod progress;
mod provisioning;
pub mod remote;
mod roles;
mod secret;
mod state;
mod status;
mod steps;
mod stop;
mod up_options;

pub use access::ClientAccess;
pub use change::{CloneOptions, ReinitRequest, ScaleRequest};
pub use cluster::Cluster;
pub use daemon_client::{Daemon, metrics, reach, reinit, scale, status};
pub use directory::{DIRECTORY_DEFAULT, DIRECTORY_VARIABLE, Directory};
pub use error::HostError;
pub use http::{Observed, Page};
pub use onecopy_machine::{MachineStatus, TotalFootprint};
pub use progress::{Event, Progress, Summary};
pub use state::{ClusterState, REPLICAS_MAX, Runtime, ServerState};
pub use status::{CloneStatus, ClusterStatus, ServerStatus};
pub use stop::down;
pub use up_options::UpOptions;
