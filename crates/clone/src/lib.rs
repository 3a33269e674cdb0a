//! A standby that serves before its data is there.
//!
//! ```text
//!            source's data directory                                clone's data directory
//!   postgres ──write──> [source] ── old content, before it goes ──> [fill] <──read── postgres of the clone
//!                           │                                         ▲  ▲
//!                        freeze: image, position ─── [recovery] ──────┘  └── background, hot pages first [warm]
//! ```
//!
//! [`fanotify`] is the kernel's part: it asks before a marked file's range is read or written. [`image`] is what a data
//! directory holds at the freeze, [`source`] saves what the running server is about to change, [`fill`] brings a
//! clone's files to the image's content, [`target`] is the clone's directory, which nobody but us can start until it is
//! whole. [`recovery`] makes PostgreSQL take the image for a standby's directory. [`hydrator`] is the process in which
//! this happens, [`keeper`] the small one that holds its descriptors, [`service`] how others talk to it. [`methods`]
//! chooses between this and two ways that need less of the kernel. [`network`] is the same between two hosts.

mod bytes;
mod error;
pub mod fanotify;
pub mod fill;
pub mod free_space;
pub mod hydrator;
pub mod image;
pub mod keeper;
#[cfg(test)]
mod killed;
pub mod methods;
pub mod network;
mod origin;
pub mod plan;
#[cfg(test)]
mod recorder;
pub mod recovery;
pub mod service;
pub mod source;
pub mod target;
pub mod warm;

pub use bytes::{ByteRange, CHUNK_BYTES};
pub use error::CloneError;
pub use origin::{Origin, OriginError};
