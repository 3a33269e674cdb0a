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

mod configuration;
mod desired_state;
mod error;
mod guest_options;
mod guest_server;
mod home;
mod image;
pub mod keeper;
mod machine;
mod machines;
mod name;
mod observe;
mod serving;
mod shape;
#[cfg(test)]
mod tests;

pub use configuration::{Forward, MachineConfiguration};
pub use error::MachineError;
pub(crate) use error::hypervisor_failed;
pub(crate) use guest_options::HOST_IN_GUEST;
pub use home::{MachineEnd, MachineHome};
pub use image::{GuestImage, IMAGES_VARIABLE};
pub use machine::{GuestRefusal, Machine};
pub use machines::{MachineSummary, Machines, NewMachine};
pub use name::MachineName;
pub use shape::{MachineOverrides, MachineTemplate};
pub(crate) use shape::{assign_ports, choose_runtime};
