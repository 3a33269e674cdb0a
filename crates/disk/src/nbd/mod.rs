//! The NBD server: disks and their snapshots for whoever speaks NBD, over sockets of the network or of the file system.
//!
//! ```text
//!   client ── negotiation ──> transmission ──> Disk (try_, else submit) | Source (workers)
//!                                  ^                  |
//!                                  └──── replies <────┘   in any order
//! ```
//!
//! [`protocol`] is the bytes, [`stream`] a connection plain or encrypted; both serve the client side, too
//! ([`source::NbdClient`](crate::source::NbdClient)). [`server`] is the server. Each connection has two threads, one
//! that reads requests and does what needs no waiting, one that sends what others have finished; a bound on what is in
//! flight makes a client wait that asks for more.

mod address;
pub(crate) mod protocol;
mod server;
pub(crate) mod socket;
pub(crate) mod stream;
pub(crate) mod tls;

pub use address::Address;
pub use server::{
    Content, DiskExports, Export, ExportInformation, Exports, Server, ServerOptions, ServerStatistics, SourceExports,
};
