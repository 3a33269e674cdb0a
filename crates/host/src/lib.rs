//! One machine's cluster: its directory, its servers, the router before them, and the page that tells how they are.
//!
//! ```text
//!             nothing there                      all there
//!  Cluster::up ──> leader made ──> followers made ──> servers running ──> router listens ──> Ready
//!       └──────────────── a directory that is a cluster already ──┘
//! ```
//!
//! Servers outlive a killed daemon: the next [`Cluster::up`] takes them over, [`down`] stops them.

mod access;
mod cluster;
mod directory;
mod error;
mod http;
mod inquiry;
mod lock;
mod making;
mod observation;
mod orphans;
mod progress;
mod roles;
mod secret;
mod state;
mod status;
mod stop;

pub use access::ClientAccess;
pub use cluster::{Cluster, Summary, UpOptions};
pub use directory::{DIRECTORY_DEFAULT, DIRECTORY_VARIABLE, Directory};
pub use error::HostError;
pub use http::{Observed, Page};
pub use inquiry::{is_running, metrics, status};
pub use progress::{Event, Progress};
pub use state::{ClusterState, REPLICAS_MAX, ServerState};
pub use status::{ClusterStatus, ServerStatus};
pub use stop::down;
