//! Requests for data.

use super::Violation;
use super::fields::Fields;

/// Before each request.
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;

/// What may be asked of an export.
pub(crate) mod command {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISCONNECT: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const TRIM: u16 = 4;
    pub(crate) const WRITE_ZEROES: u16 = 6;
    pub(crate) const BLOCK_STATUS: u16 = 7;
}

/// How it may be asked.
pub(crate) mod command_flag {
    /// Durable before the reply.
    pub(crate) const FUA: u16 = 1;
    /// The space stays reserved.
    pub(crate) const NO_HOLE: u16 = 1 << 1;
    /// The data in one chunk.
    pub(crate) const DF: u16 = 1 << 2;
    /// One extent only.
    pub(crate) const REQ_ONE: u16 = 1 << 3;
    /// Only if it is faster than writing zeros.
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
}

/// The head of a request; a write's data follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestHeader {
    pub(crate) flags: u16,
    pub(crate) command: u16,
    /// The client's number for it, given back in the reply.
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

impl RequestHeader {
    pub(crate) const BYTES: usize = 28;

    pub(crate) fn parse(bytes: &[u8; RequestHeader::BYTES]) -> Result<RequestHeader, Violation> {
        let mut fields = Fields::of(bytes);
        if fields.u32()? != REQUEST_MAGIC {
            return Err(Violation::new("a request without its magic number"));
        }
        Ok(RequestHeader {
            flags: fields.u16()?,
            command: fields.u16()?,
            cookie: fields.u64()?,
            offset: fields.u64()?,
            length: fields.u32()?,
        })
    }

    pub(crate) fn encode(&self) -> [u8; RequestHeader::BYTES] {
        let mut bytes = [0; RequestHeader::BYTES];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }
}
