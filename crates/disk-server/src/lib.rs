//! The process that serves a disk: `onecopy disk serve`, and `onecopy disk-server` below a machine.
//!
//! ```text
//!   QEMU, NBD clients ──> transports ──> attachment ──> disk ──> observer: page map
//!   onecopy disk ..   ──> control socket ─────────────┘        ^
//!                                             scan ────────────┘  what has not passed yet
//! ```
//!
//! It may be killed at any moment: what it had acknowledged is in the disk's files, what a guest waits for is asked for
//! again by its driver's in-flight area or its NBD client, and the page map is built again. One server listens on a
//! control socket; who has the disk is told by the disk's own lease, which a transport takes when its machine runs and
//! gives back when it stops.

mod at_rest;
mod client;
mod control;
mod error;
mod metrics;
mod observer;
pub mod protocol;
mod scan;
mod served;
mod server;
mod transports;

use std::path::PathBuf;
use std::time::Duration;

use onecopy_disk::vhost_user::CompletionHold;
use onecopy_disk::{TlsFiles, nbd};

pub use at_rest::{at_rest, open_at_rest, served};
pub use client::DiskClient;
pub use error::DiskServerError;
pub use observer::ObservedPages;
pub use served::Served;
pub use server::DiskServer;

/// The control socket in a disk's directory.
pub const CONTROL_SOCKET: &str = "control.sock";

/// Bytes a second that the background scan reads unless it is told otherwise: a small part of any disk's rate.
pub const SCAN_BYTES_PER_SECOND_DEFAULT: u64 = 64 << 20;

/// How a disk is served.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The socket of the vhost-user-blk transport, if there shall be one.
    pub vhost: Option<PathBuf>,
    /// Its queues.
    pub queues: u16,
    /// The serial number that the guest sees.
    pub serial: Option<String>,
    /// Whether writes into guest memory are marked during migration: only a proof turns it off.
    pub log_dirty: bool,
    /// Where NBD clients come in.
    pub nbd: Vec<nbd::Address>,
    /// With certificates, NBD clients must encrypt and show one of the same authority.
    pub tls: Option<TlsFiles>,
    /// Whether NBD clients may come without certificates also from other hosts: whoever reaches the address has the
    /// disk then.
    pub nbd_unencrypted: bool,
    /// Whether NBD clients may only read.
    pub read_only: bool,
    /// Which answers are kept from the guest from the first one on: what protects a machine says it again when it
    /// starts a server anew.
    pub hold: CompletionHold,
    /// The control socket, if it is not the usual one: two servers of one disk, as in a migration, need two.
    pub control: Option<PathBuf>,
    /// Whether to keep a page map.
    pub page_map: bool,
    /// Bytes a second of the background scan; 0 for none.
    pub scan_bytes_per_second: u64,
    /// Bytes a second of the background copy of a remote base; none for no bound.
    pub limit_bytes_per_second: Option<u64>,
    /// How long to wait for another holder to give the disk back.
    pub lease_timeout: Duration,
}

impl Default for ServeOptions {
    fn default() -> ServeOptions {
        ServeOptions {
            vhost: None,
            queues: 1,
            serial: None,
            log_dirty: true,
            nbd: Vec::new(),
            tls: None,
            nbd_unencrypted: false,
            read_only: false,
            hold: CompletionHold::Nothing,
            control: None,
            page_map: true,
            scan_bytes_per_second: SCAN_BYTES_PER_SECOND_DEFAULT,
            limit_bytes_per_second: None,
            lease_timeout: Duration::from_secs(10),
        }
    }
}

impl ServeOptions {
    /// Whether the server has the disk from its start to its end: without a vhost-user-blk transport nobody else says
    /// when.
    fn keeps_disk(&self) -> bool {
        self.vhost.is_none()
    }

    /// Refuses to offer a disk to the network in the clear, unless that is wanted.
    fn check(&self) -> Result<(), DiskServerError> {
        if self.tls.is_some() || self.nbd_unencrypted {
            return Ok(());
        }
        match self.nbd.iter().find(|address| !address.is_of_this_host()) {
            Some(address) => Err(DiskServerError::Unencrypted { address: address.clone() }),
            None => Ok(()),
        }
    }
}
