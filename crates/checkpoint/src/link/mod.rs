//! The connection by which epochs travel: frames, what is held, what is acknowledged, pace, signs of life.
//!
//! ```text
//!  Sending                                       Receiving
//!     │ hello (session, sizes) ─────────────────────> │   begins, and begins again after a broken connection
//!     │ <──────────────────────── welcome (held)      │   the last epoch that counts here: Encoder::resume
//!     │ data .. data ───────────────────────────────> │   an epoch, at the pace that is allowed
//!     │ <────────────────────── different (what)      │   if anything does:
//!     │ data .. data ───────────────────────────────> │   that, as it is
//!     │ <────────────────── acknowledged (held)       │   the epoch counts
//!     │ message <───────────────────────────> message │   what both ends have to say beside: the caller's bytes
//!     │ heartbeat <───────────────────────> heartbeat │   when nothing else was said for a while
//! ```
//!
//! Reading and writing are blocking, over anything: between hosts over what `onecopy host` has put TLS around, where
//! each side has shown who it is. The caller gives its streams time-outs, for reading and for writing, of more than a
//! [`HEARTBEAT`]; a peer that says or takes nothing for so long is gone ([`LinkError::Silent`]).
//!
//! The bytes: `docs/link-format.md`.

mod error;
mod frame;
mod incoming;
mod outgoing;
mod pace;
mod receiving;
mod sending;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

pub use error::LinkError;
pub use frame::{DATA_BYTES_MAX, MESSAGE_BYTES_MAX};
pub use outgoing::Beating;
pub use pace::Pace;
pub use receiving::{FailureSender, Received, Receiving};
pub use sending::{Sending, Sent};

/// A side that has said nothing for so long says that it lives.
pub const HEARTBEAT: Duration = Duration::from_secs(1);

/// What two sides have in common over all their connections: a number that nobody else knows.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Session(pub [u8; 16]);

impl Session {
    /// A new one.
    pub fn new() -> Session {
        Session(rand::random())
    }
}

impl Default for Session {
    fn default() -> Session {
        Session::new()
    }
}

/// Not the number, which opens the session.
impl fmt::Debug for Session {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Session(..)")
    }
}
