//! The process that looks after one machine.

mod disk_server;
mod guest;
mod protocol;
mod run;
mod service;
mod socket;
mod unresponsive;

pub(super) use disk_server::{DISK_CLOSE_TIMEOUT, disk_server_of, end_left_disk_server};
pub use protocol::{KeeperReply, KeeperRequest, KeeperStatus, MachineState};
pub use run::run;
pub(super) use socket::connect;
pub(super) use unresponsive::unix_ms;
