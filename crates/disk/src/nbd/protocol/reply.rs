//! Replies to requests: simple ones, and structured ones in chunks.

use super::fields::Fields;
use super::{TEXT_BYTES_MAX, Violation};

/// Before a simple reply.
pub(crate) const SIMPLE_MAGIC: u32 = 0x6744_6698;
/// Before a chunk of a structured reply.
pub(crate) const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// The chunk is its reply's last.
pub(crate) const DONE: u16 = 1;

/// Kinds of chunks.
pub(crate) mod chunk {
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const OFFSET_HOLE: u16 = 2;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    /// Set in all kinds of errors.
    pub(crate) const ERROR_BIT: u16 = 1 << 15;
    pub(crate) const ERROR: u16 = ERROR_BIT + 1;
}

/// Extents in one block status are at most so many.
pub(crate) const EXTENTS_MAX: usize = 4096;

/// The head of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyHeader {
    /// All of a reply, but for a successful read's data.
    Simple { error: u32, cookie: u64 },
    /// One chunk; `length` bytes follow.
    Chunk { flags: u16, kind: u16, cookie: u64, length: u32 },
}

impl ReplyHeader {
    pub(crate) const SIMPLE_BYTES: usize = 16;
    pub(crate) const CHUNK_BYTES: usize = 20;

    /// How long the head is that begins with this magic number.
    pub(crate) fn bytes(magic: u32) -> Result<usize, Violation> {
        match magic {
            SIMPLE_MAGIC => Ok(ReplyHeader::SIMPLE_BYTES),
            CHUNK_MAGIC => Ok(ReplyHeader::CHUNK_BYTES),
            _ => Err(Violation::new("a reply without its magic number")),
        }
    }

    /// Parses a head of the length that [`bytes`](ReplyHeader::bytes) told.
    pub(crate) fn parse(bytes: &[u8]) -> Result<ReplyHeader, Violation> {
        let mut fields = Fields::of(bytes);
        let header = match fields.u32()? {
            SIMPLE_MAGIC => ReplyHeader::Simple { error: fields.u32()?, cookie: fields.u64()? },
            CHUNK_MAGIC => ReplyHeader::Chunk {
                flags: fields.u16()?,
                kind: fields.u16()?,
                cookie: fields.u64()?,
                length: fields.u32()?,
            },
            _ => return Err(Violation::new("a reply without its magic number")),
        };
        fields.end()?;
        Ok(header)
    }
}

/// A simple reply; a successful read's data goes behind it.
pub(crate) fn simple(error: u32, cookie: u64) -> Vec<u8> {
    let mut bytes = SIMPLE_MAGIC.to_be_bytes().to_vec();
    bytes.extend(error.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes
}

fn last_chunk(kind: u16, cookie: u64, length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(ReplyHeader::CHUNK_BYTES + length);
    bytes.extend(CHUNK_MAGIC.to_be_bytes());
    bytes.extend(DONE.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend((length as u32).to_be_bytes());
    bytes
}

/// The only chunk of a reply without data.
pub(crate) fn nothing(cookie: u64) -> Vec<u8> {
    last_chunk(chunk::NONE, cookie, 0)
}

/// The head of the only chunk of a read: `length` bytes of data go behind it.
pub(crate) fn data_head(cookie: u64, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = last_chunk(chunk::OFFSET_DATA, cookie, 8 + length);
    bytes.extend(offset.to_be_bytes());
    bytes
}

/// The only chunk of a read of nothing but zeros.
pub(crate) fn hole(cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = last_chunk(chunk::OFFSET_HOLE, cookie, 12);
    bytes.extend(offset.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes
}

/// The only chunk of a block status: lengths and states.
pub(crate) fn status(cookie: u64, context: u32, extents: &[(u32, u32)]) -> Vec<u8> {
    let mut bytes = last_chunk(chunk::BLOCK_STATUS, cookie, 4 + 8 * extents.len());
    bytes.extend(context.to_be_bytes());
    for (length, state) in extents {
        bytes.extend(length.to_be_bytes());
        bytes.extend(state.to_be_bytes());
    }
    bytes
}

/// The only chunk of a request that failed.
pub(crate) fn failure(cookie: u64, error: u32, message: &str) -> Vec<u8> {
    let text = &message.as_bytes()[..message.floor_char_boundary(TEXT_BYTES_MAX)];
    let mut bytes = last_chunk(chunk::ERROR, cookie, 6 + text.len());
    bytes.extend(error.to_be_bytes());
    bytes.extend((text.len() as u16).to_be_bytes());
    bytes.extend(text);
    bytes
}

/// What a chunk carries, but for a data chunk's data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Payload {
    /// Zeros.
    Hole { offset: u64, length: u32 },
    /// States of extents, each with its length.
    Status { context: u32, extents: Vec<(u32, u32)> },
    /// The request failed.
    Failure { error: u32, message: String },
    /// Nothing.
    None,
}

impl Payload {
    /// Parses the payload of a chunk that is no data chunk.
    pub(crate) fn parse(kind: u16, bytes: &[u8]) -> Result<Payload, Violation> {
        let mut fields = Fields::of(bytes);
        match kind {
            chunk::NONE => {
                fields.end()?;
                Ok(Payload::None)
            }
            chunk::OFFSET_HOLE => {
                let payload = Payload::Hole { offset: fields.u64()?, length: fields.u32()? };
                fields.end()?;
                Ok(payload)
            }
            chunk::BLOCK_STATUS => {
                let context = fields.u32()?;
                let count = bytes.len().saturating_sub(4) / 8;
                let extents = (0..count).map(|_| Ok((fields.u32()?, fields.u32()?))).collect::<Result<Vec<_>, _>>()?;
                fields.end()?;
                if extents.is_empty() || extents.iter().any(|extent| extent.0 == 0) {
                    return Err(Violation::new("a block status without length"));
                }
                Ok(Payload::Status { context, extents })
            }
            _ if kind & chunk::ERROR_BIT != 0 => {
                let error = fields.u32()?;
                let length = fields.u16()?;
                let message = String::from_utf8_lossy(fields.bytes(usize::from(length))?).into_owned();
                if error == 0 {
                    return Err(Violation::new("an error that is none"));
                }
                Ok(Payload::Failure { error, message })
            }
            _ => Err(Violation::new(format!("a chunk of kind {kind}"))),
        }
    }
}
