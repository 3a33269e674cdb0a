//! A PostgreSQL server as an object: found, initialized, configured, started, watched, copied, promoted.
//!
//! ```text
//! Binaries + ServiceUser ──> ServerOptions ──> Server::create / Server::open ──> Server ──> Supervisor
//!                                                   ▲                             │
//!                              FollowerMaker (BaseBackup) fills a data directory  └─> ConnectionParameters ──> SQL
//! ```
//!
//! Nothing here knows of a router or a cluster; what is promised holds for one server and for the pair of a primary and
//! a standby.

mod base_backup;
mod beneath;
mod binaries;
mod configuration_files;
mod connection;
mod control_file;
mod crc32c;
mod error;
mod extension;
mod follower;
mod inherited;
mod initialize;
mod instance;
mod log_tail;
mod lsn;
mod postmaster;
mod process;
mod processes;
mod recommended;
mod replication;
mod server;
mod server_options;
mod service_files;
mod service_user;
mod settings;
mod standby;
mod supervisor;
mod written_settings;

pub use base_backup::{BaseBackup, TablespaceMapping};
pub use beneath::{DEPTH_MAX, Directory};
pub use binaries::Binaries;
pub use connection::{ConnectionParameters, OWN_SETTINGS};
pub use control_file::{ClusterState, ControlFile, WalLevel};
pub use error::{ControlFileError, PostgresError};
pub use extension::{ExtensionMissing, InstalledExtension};
pub use follower::{FollowerMaker, MakeFuture, Progress};
pub use inherited::InheritedDescriptor;
pub use instance::{Instance, InstanceFuture};
pub use lsn::{InvalidLsn, Lsn};
pub use postmaster::{StopMode, port_of};
pub use process::{innermost_number, lives, process_ids, runs_as, status_field};
pub use processes::{ServerProcesses, kill_processes_of, processes_of};
pub use recommended::{Role, recommended_settings};
pub use replication::{ConnectedStandby, ReplicationState};
pub use server::{Server, StartOutcome};
pub use server_options::{ServerOptions, StandbyOptions};
pub use service_user::ServiceUser;
pub use settings::{AccessRule, RuleKind, Settings};
pub use supervisor::{Supervisor, SupervisorState};
pub use written_settings::WrittenSettings;

/// Oldest supported major version.
pub const MAJOR_VERSION_MIN: u32 = 15;
/// Newest supported major version.
pub const MAJOR_VERSION_MAX: u32 = 18;
