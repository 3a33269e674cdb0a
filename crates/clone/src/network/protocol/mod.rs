//! How two hosts speak of an image: frames of a length, a kind and fields, over any stream of bytes.
//!
//! ```text
//!  clone's host                                   source's host
//!   Hello {lane, session?}  ──────────────────>
//!                           <──────────────────   Welcome {session, lease}            or Refused
//!   Open {plan}             ──────────────────>                                       (a new session only)
//!                           <──────────────────   ManifestPart.., FilePart.., Opened  or Refused
//!   Read {id, range}        ──────────────────>
//!                           <──────────────────   Content {id, hash, bytes}           or Failed {id}
//!   Delivered {ranges}      ──────────────────>                                       (need not be kept any more)
//!   HotWanted               ──────────────────>
//!                           <──────────────────   Hot {ranges}..                      (what to have first)
//!   KeepAlive               <─────────────────>   KeepAlive
//!   End {whole}             ──────────────────>                                       (the image may go)
//! ```
//!
//! All numbers are little-endian. A frame is `length: u32` (of what follows), `kind: u8`, the fields. [`Message::parse`] is total: any bytes
//! give a message or an error.

mod codec;
mod cursor;
mod frame;
mod message;
mod payload;

pub use frame::{read_message, write_message};
pub use message::{DeliveredRange, Lane, Message, ReadFailure, ReadRequest, SessionId};
pub use payload::{Encoding, Payload};

/// The protocol's version; both sides must have the same.
pub const VERSION: u16 = 2;

/// The longest frame: a content of [`READ_BYTES_MAX`] with its header, with room for the other kinds.
pub const FRAME_BYTES_MAX: usize = 1 << 20;

/// The longest range of one read.
pub const READ_BYTES_MAX: usize = 256 << 10;

/// The longest part of a manifest or of a small file in one frame.
pub const PART_BYTES_MAX: usize = 512 << 10;

/// The most ranges in one acknowledgement.
pub const DELIVERED_RANGES_MAX: usize = 4096;

/// The most hot ranges in one frame.
pub const HOT_RANGES_MAX: usize = 4096;

/// What the other side sent is not of this protocol, or the stream broke.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// The stream ended, or failed.
    #[error("the connection broke: {0}")]
    Broken(#[from] std::io::Error),
    /// A frame is longer than any may be.
    #[error("a frame of {0} bytes; at most {FRAME_BYTES_MAX} are allowed")]
    TooLong(usize),
    /// A frame of no known kind.
    #[error("a frame of unknown kind {0}")]
    UnknownKind(u8),
    /// A frame is not what its kind says.
    #[error("a malformed frame: {0}")]
    Malformed(&'static str),
    /// Content that is not what its hash says.
    #[error("content of {length_bytes} bytes does not have its hash")]
    Damaged {
        /// How long it should be.
        length_bytes: usize,
    },
    /// A message that has no place here.
    #[error("{got} came where {wanted} was due")]
    Unexpected {
        /// What came.
        got: &'static str,
        /// What should have come.
        wanted: &'static str,
    },
    /// The other side will not go on.
    #[error("{0}")]
    Refused(String),
}
