//! What goes over an NBD connection, as bytes: used by the server and by the client alike.
//!
//! Facts are from the protocol's own document, `doc/proto.md` of the NetworkBlockDevice project. All numbers are
//! big-endian. Parsing is total: whatever the bytes, the result is a value or a [`Violation`].

mod fields;
pub(crate) mod handshake;
pub(crate) mod reply;
pub(crate) mod request;
#[cfg(test)]
mod tests;

use std::io;

/// The other side sent what the protocol does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not NBD: {what}")]
pub(crate) struct Violation {
    /// What was wrong.
    pub(crate) what: String,
}

impl Violation {
    pub(crate) fn new(what: impl Into<String>) -> Violation {
        Violation { what: what.into() }
    }
}

impl From<Violation> for io::Error {
    fn from(violation: Violation) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, violation)
    }
}

/// A name or a text is at most so long (the document's "Strings").
pub(crate) const TEXT_BYTES_MAX: usize = 4096;

/// The largest read or write that every server should take, and the largest that ours takes.
pub(crate) const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// The port that is NBD's.
pub(crate) const PORT: u16 = 10809;

/// What an export can do ("Transmission flags").
pub(crate) mod transmission_flag {
    pub(crate) const HAS_FLAGS: u16 = 1;
    pub(crate) const READ_ONLY: u16 = 1 << 1;
    pub(crate) const SEND_FLUSH: u16 = 1 << 2;
    pub(crate) const SEND_FUA: u16 = 1 << 3;
    pub(crate) const SEND_TRIM: u16 = 1 << 5;
    pub(crate) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(crate) const SEND_DF: u16 = 1 << 7;
    pub(crate) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(crate) const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// The name of the only metadata context that we know: which ranges are holes, which are zeros.
pub(crate) const BASE_ALLOCATION: &str = "base:allocation";

/// States of an extent in [`BASE_ALLOCATION`].
pub(crate) mod allocation {
    pub(crate) const HOLE: u32 = 1;
    pub(crate) const ZERO: u32 = 1 << 1;
}
