//! Virtual machines of a directory: made, started, looked after and removed; with a PostgreSQL server in them where
//! that is wanted.
//!
//! ```text
//!   onecopy up, onecopy vm ..  ──(keeper.sock)──>  keeper ──┬── disk-server      serves machines/<name>/disk
//!                                                           └── QEMU             the guest, with its agent
//! ```
//!
//! A machine's keeper, its disk server and QEMU outlive the daemon, and each other: who dies alone is started again, or
//! taken over by the next one. A machine has ended when its QEMU has.

mod carry;
mod configuration;
mod desired_state;
mod error;
mod etcd;
mod files;
mod footprint;
mod fork;
mod guest_options;
mod guest_server;
mod hardware;
mod home;
mod image;
pub mod keeper;
mod machine;
pub mod memory_server;
pub mod migration;
mod name;
mod network;
pub mod network_holder;
mod observe;
mod snapshot_server;
mod template;
#[cfg(test)]
mod tests;

pub use carry::carry;
pub use configuration::{Forward, GUEST_PORT, MachineConfiguration, Transport};
pub use error::{MachineError, hypervisor_failed};
pub use etcd::{Endpoint, Etcd, Survivor, decision};
pub use footprint::{DiskFootprint, MemoryFootprint, SharedMemory, TotalFootprint};
pub use fork::Dependent;
pub use guest_options::{GuestServerOptions, HOST_IN_GUEST};
pub use guest_server::GuestServer;
pub use home::{MachineEnd, MachineHome};
pub use image::{GuestImage, IMAGES_VARIABLE};
pub use keeper::{CheckpointTaken, PauseParts};
pub use machine::{END_TIMEOUT, GuestRefusal, Machine};
pub use memory_server::available_memory_bytes;
pub use name::{InvalidName, MachineName};
pub use network::{BridgedNetwork, InterfaceAddress, NetworkChoice};
pub use observe::{MachineStatus, NetworkStatus};
pub use onecopy_checkpoint::image::Checkpoint;
pub use onecopy_network::{HardwareAddress, Statistics as NetworkStatistics};
pub use snapshot_server::{ServedSnapshot, SnapshotServer};
pub use template::{MachineOverrides, MachineTemplate};
