//! Virtual machines of a directory: those that the servers of the cluster run in, and a person's own beside them.

mod allowed_bridge;
mod decision;
mod follower_forks;
mod fork;
mod fork_memory;
mod metrics;
mod migration;
mod protection;
mod registry;
mod runtime;
mod serving;

pub use allowed_bridge::AllowedBridge;
pub use fork::Fork;
pub use metrics::MachinesPage;
pub(crate) use metrics::{machine_metrics, total_footprint};
pub use migration::{Migrated, MigrationStatus};
pub use registry::{MachineSummary, Machines, NewMachine};
pub(crate) use runtime::{assign_ports, choose_runtime};
