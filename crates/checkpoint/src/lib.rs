//! Machine checkpoints: a machine's memory, devices and disk as of one instant, taken again and again.
//!
//! ```text
//!              ┌──────── one instant ────────┐
//!  QEMU ──> [ memory ]   device state   disk epoch        memory: the guest's memory as a file that we serve
//!           written-back   (a blob)
//!           pages, epochs
//! ```
//!
//! A new QEMU becomes the machine again by a stream that [`restore`] makes, over the same memory and disk.
//!
//! [`take`] has the order of the steps, and what happens when it is cut short.
//!
//! [`image`] keeps checkpoints in a directory; [`delta`] is how one travels to another host, by what that host has
//! already, over a [`link`]; [`migration_policy`] says when a machine that travels stops for its last one.
//!
//! Why it is so: `docs/decisions/0025-machine-checkpoints.md`.

pub mod delta;
mod error;
mod files;
pub mod image;
pub mod link;
pub mod memory;
pub mod migration_policy;
pub mod restore;
pub mod take;

pub use delta::DeltaError;
pub use error::CheckpointError;
pub use link::LinkError;
pub use restore::RestoreError;

/// The unit of memory, of its epochs and of what is kept of it: the guest's page.
pub const PAGE_BYTES: usize = 4096;
