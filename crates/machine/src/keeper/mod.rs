//! The process that looks after one machine.

mod admission;
mod arrive;
mod arriving;
mod arriving_disk;
mod backup;
pub(crate) mod backup_copy;
mod begin;
mod brake;
mod checkpoint;
mod conclude;
mod disk_comparison;
mod disk_epochs;
mod former_disk;
mod free_pages;
mod frozen;
mod guest;
mod held;
mod incoming_memory;
mod launch;
mod link;
mod memory;
mod memory_descriptors;
mod memory_file;
mod migrate;
mod network;
mod parts;
mod prefix;
mod primary;
mod processes;
pub(crate) mod protect;
mod protection;
mod protocol;
mod qemu_configuration;
mod receive_order;
mod restore;
mod role;
mod rounds;
mod run;
mod sent_pages;
mod server;
mod servers;
mod service;
mod shared_disk;
mod stand_by;
mod start;
mod state;
mod unresponsive;
pub(crate) mod verdict;
mod work;

pub(crate) use checkpoint::forget_at_rest;
pub(super) use memory::{clear as clear_memory, is_private};
pub(super) use network::clear as clear_network;
pub(super) use processes::{CLOSE_TIMEOUT, end_left_servers, server_of, servers_of};
pub use protection::{
    DETECTION_S_DEFAULT, DETECTION_S_RANGE, Durability, PERIOD_MS_DEFAULT, ProtectionOrder, ProtectionRole,
    ProtectionState, ProtectionStatus, check_detection,
};
pub use protocol::{
    CheckpointTaken, KeeperReply, KeeperRequest, KeeperStatus, MachineState, MigrationEvent, MigrationOrder,
    PauseParts, Prediction,
};
pub(super) use restore::forget as forget_restore;
pub(super) use role::Role;
pub use run::run;
pub use unresponsive::unix_ms;

/// For `map_err`, where only a person reads why.
fn words(error: impl ToString) -> String {
    error.to_string()
}
