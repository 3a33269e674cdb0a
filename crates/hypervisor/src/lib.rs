//! A QEMU virtual machine as an object.
//!
//! ```text
//!  MachineConfiguration ──> CommandLine ──> QEMU's process <──watches── Machine
//!   (all of it as data)    (a pure function)   | qmp.sock  <──────────── Monitor   commands, events
//!                                              | agent.sock <─────────── Agent     to the guest's agent
//!                                              | console.log <────────── Console   what the guest's kernel says
//! ```
//!
//! QEMU's process outlives the one that has started it: [`Machine::adopt`] takes it over by its directory. Nothing here
//! knows of disks' formats, of databases or of clusters.

mod accelerator;
pub mod agent;
mod command_line;
pub mod configuration;
mod console;
mod directory;
mod error;
mod handle;
mod launch;
pub mod machine;
mod memory_layout;
pub mod monitor;
mod process;
mod program;

pub use accelerator::kvm_runs_guests;
pub use agent::Agent;
pub use command_line::{CommandLine, HostTraits};
pub use configuration::MachineConfiguration;
pub use console::{Console, open_of_account, printable};
pub use directory::MachineDirectory;
pub use error::HypervisorError;
pub use launch::InheritedDescriptor;
pub use machine::{EndCause, Ending, Machine, State, TimeLimits};
pub use memory_layout::memory_offset;
pub use monitor::{Event, Monitor};
pub use program::{Qemu, QemuVersion};
