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
//! All numbers are little-endian. A frame is `length: u32` (of what follows), `kind: u8`, the fields.
//! [`Message::parse`] is total: any bytes give a message or an error.

use std::fmt::Debug;

mod codec;
mod cursor;
mod frame;
mod message;
mod payload;

pub use frame::{read_message, write_message};
pub use message::{DeliveredRange, Lane, Message, ReadFailure, ReadRequest, SessionId};
pub use payload::{Encoding, Payload};

/// The protocol's version; both sides must have the same.
pub const VERSION: u16 = 3;

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
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum ProtocolError {
    #[error("the connection broke: {0}")]
    Broken(#[from] std::io::Error),
    #[error("a frame of {0} bytes; at most {FRAME_BYTES_MAX} are allowed")]
    TooLong(usize),
    #[error("a frame of unknown kind {0}")]
    UnknownKind(u8),
    #[error("a malformed frame: {0}")]
    Malformed(&'static str),
    #[error("content of {length_bytes} bytes does not have its hash")]
    Damaged { length_bytes: usize },
    #[error("{field} {value} is not taken from the other host: {reason}")]
    NotTaken { field: &'static str, value: String, reason: String },
    #[error("{got} came where {wanted} was due")]
    Unexpected { got: &'static str, wanted: &'static str },
    #[error("{0}")]
    Refused(String),
}

/// The most that is shown of what another host says, in letters.
const SHOWN_LETTERS_MAX: usize = 200;
/// The most that is heard of why another host does not go on, in letters.
const REASON_LETTERS_MAX: usize = 4000;

impl ProtocolError {
    /// For a field that is not taken; `value` is shown as [`shown`] shows it.
    pub fn not_taken(field: &'static str, value: impl Debug, reason: impl Into<String>) -> ProtocolError {
        ProtocolError::NotTaken { field, value: shown(value), reason: reason.into() }
    }

    /// The other side's own words for why it does not go on.
    pub fn refused(reason: &str) -> ProtocolError {
        ProtocolError::Refused(words(reason))
    }
}

/// What another host says, for a message: with no letter that does something to a terminal or a log, and not longer
/// than a line or two.
pub fn shown(value: impl Debug) -> String {
    bounded(format!("{value:?}").chars(), SHOWN_LETTERS_MAX)
}

/// Another host's words, for people: several lines, but no other control letters.
pub fn words(text: &str) -> String {
    let plain = |letter: char| if letter.is_control() && letter != '\n' { ' ' } else { letter };
    bounded(text.chars().map(plain), REASON_LETTERS_MAX)
}

fn bounded(letters: impl Iterator<Item = char>, letters_max: usize) -> String {
    let mut letters = letters.peekable();
    let mut text: String = letters.by_ref().take(letters_max).collect();
    if letters.peek().is_some() {
        text.push_str("..");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_others_do_nothing_to_a_terminal_and_end() {
        assert_eq!(words("no\x1b]0;room\x07\non \u{9b}2J it"), "no ]0;room \non  2J it");
        assert_eq!(shown("a\n\x1b[2J'"), "\"a\\n\\u{1b}[2J'\"");
        assert_eq!(shown("x".repeat(5000)).len(), SHOWN_LETTERS_MAX + 2);
        assert_eq!(words(&"x".repeat(1 << 20)).len(), REASON_LETTERS_MAX + 2);
    }
}
