//! The process that looks after one machine.

mod disk_server;
mod guest;
mod protocol;
mod run;
mod service;
mod silence;
mod socket;

pub(super) use disk_server::{DISK_CLOSE_TIMEOUT, disk_server_of, end_left_disk_server};
pub use protocol::{KeeperReply, KeeperRequest, KeeperStatus, MachineState};
pub use run::run;
pub(super) use silence::unix_ms;
pub(super) use socket::connect;
