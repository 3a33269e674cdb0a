//! Clones on another host: the same image, read over TLS instead of from a path.
//!
//! ```text
//!   clone's host                                                  source's host
//!   Filling ── RemoteOrigin ══ TLS ══ [onecopy host] ── socket ── Sessions ── ImageStore ── source's files
//!     [client]               [request] [protocol]                 [server]   [image_store] └─ what was saved
//! ```
//!
//! Neither host believes the other more than it must: what a manifest says is taken by [`manifest`], or not at all.
//!
//! [`keys`] says who may talk to whom. [`request`] is the first line of each connection; then [`protocol`] carries the
//! [`manifest`] of the image and its content. [`server`] keeps an image for a lease after its last reader has gone, so
//! that a connection that breaks costs nothing but time.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub mod client;
pub mod endpoint;
pub mod image_store;
pub mod keys;
pub mod manifest;
pub mod protocol;
pub mod request;
pub mod server;

/// How long an image is kept, and a clone waits, without a connection between them.
pub const LEASE: Duration = Duration::from_secs(600);

/// Where `onecopy host` listens unless told otherwise.
pub const PORT_DEFAULT: u16 = 6440;

/// A clone for which the source would have to keep more of its log than this cannot catch up; for one on another host
/// no more is kept, whatever that host wants.
pub const WAL_KEEP_BYTES_MAX: u64 = 16 << 30;

/// Another host, as this one reaches it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteHost {
    /// `HOST:PORT` of its `onecopy host`.
    pub address: String,
    /// The directory of this host's own keys.
    pub keys: PathBuf,
    /// The certificate that it must show there, as DER; none: any of the authority that has its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<Vec<u8>>,
}

/// A side that has nothing to say says so this often.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// A connection over which nothing came for so long is broken.
const UNRESPONSIVE_MAX: Duration = Duration::from_secs(20);

#[cfg(test)]
mod lies;
