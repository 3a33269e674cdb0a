//! The part before any data flows: greeting, options and their replies.

use super::fields::Fields;
use super::{TEXT_BYTES_MAX, Violation};

/// First of all, from the server: "NBDMAGIC".
pub(crate) const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Before each option, and in the greeting: "IHAVEOPT".
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Before each reply to an option.
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Both sides know how to answer options ("fixed newstyle").
pub(crate) const FIXED_NEWSTYLE: u16 = 1;
/// No zeros behind the reply to `EXPORT_NAME`.
pub(crate) const NO_ZEROES: u16 = 1 << 1;
/// How many they were.
pub(crate) const ZEROES_BYTES: usize = 124;

/// An option's data is at most so long: a list of queries for metadata contexts is the longest that makes sense.
pub(crate) const OPTION_BYTES_MAX: u32 = 64 << 10;

/// What a client may ask for.
pub(crate) mod option {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    pub(crate) const STARTTLS: u32 = 5;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const LIST_META_CONTEXT: u32 = 9;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
}

/// How a server answers.
pub(crate) mod answer {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const SERVER: u32 = 2;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    /// Set in all that follow.
    pub(crate) const ERROR: u32 = 1 << 31;
    pub(crate) const UNSUPPORTED: u32 = ERROR + 1;
    pub(crate) const INVALID: u32 = ERROR + 3;
    pub(crate) const TLS_REQUIRED: u32 = ERROR + 5;
    pub(crate) const UNKNOWN: u32 = ERROR + 6;
    pub(crate) const SHUTDOWN: u32 = ERROR + 7;
}

/// What the server says first.
pub(crate) fn greeting() -> [u8; 18] {
    let mut bytes = [0; 18];
    bytes[..8].copy_from_slice(&GREETING_MAGIC.to_be_bytes());
    bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    bytes[16..].copy_from_slice(&(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    bytes
}

/// The flags of a server's greeting.
pub(crate) fn parse_greeting(bytes: &[u8; 18]) -> Result<u16, Violation> {
    let mut fields = Fields::of(bytes);
    if fields.u64()? != GREETING_MAGIC {
        return Err(Violation::new("no NBD server is there"));
    }
    if fields.u64()? != OPTION_MAGIC {
        return Err(Violation::new("the server speaks NBD as before 2011"));
    }
    let flags = fields.u16()?;
    if flags & FIXED_NEWSTYLE == 0 {
        return Err(Violation::new("the server cannot answer options"));
    }
    Ok(flags)
}

/// The head of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OptionHeader {
    pub(crate) option: u32,
    pub(crate) length: u32,
}

impl OptionHeader {
    pub(crate) const BYTES: usize = 16;

    pub(crate) fn parse(bytes: &[u8; OptionHeader::BYTES]) -> Result<OptionHeader, Violation> {
        let mut fields = Fields::of(bytes);
        if fields.u64()? != OPTION_MAGIC {
            return Err(Violation::new("an option without its magic number"));
        }
        Ok(OptionHeader { option: fields.u32()?, length: fields.u32()? })
    }
}

/// An option as it is sent.
pub(crate) fn option_message(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// The head of a reply to an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AnswerHeader {
    pub(crate) option: u32,
    pub(crate) kind: u32,
    pub(crate) length: u32,
}

impl AnswerHeader {
    pub(crate) const BYTES: usize = 20;

    pub(crate) fn parse(bytes: &[u8; AnswerHeader::BYTES]) -> Result<AnswerHeader, Violation> {
        let mut fields = Fields::of(bytes);
        if fields.u64()? != OPTION_REPLY_MAGIC {
            return Err(Violation::new("a reply to an option without its magic number"));
        }
        Ok(AnswerHeader { option: fields.u32()?, kind: fields.u32()?, length: fields.u32()? })
    }
}

/// A reply to an option as it is sent.
pub(crate) fn answer_message(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// The data of `INFO` and `GO`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InformationRequest {
    /// Which export.
    pub(crate) name: String,
    /// What else the client wants to know.
    pub(crate) wanted: Vec<u16>,
}

impl InformationRequest {
    pub(crate) fn parse(data: &[u8]) -> Result<InformationRequest, Violation> {
        let mut fields = Fields::of(data);
        let name = fields.counted_text()?;
        let count = fields.u16()?;
        let wanted = (0..count).map(|_| fields.u16()).collect::<Result<Vec<_>, _>>()?;
        fields.end()?;
        Ok(InformationRequest { name, wanted })
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = (self.name.len() as u32).to_be_bytes().to_vec();
        bytes.extend(self.name.as_bytes());
        bytes.extend((self.wanted.len() as u16).to_be_bytes());
        bytes.extend(self.wanted.iter().flat_map(|wanted| wanted.to_be_bytes()));
        bytes
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContextRequest {
    /// Of which export.
    pub(crate) name: String,
    /// Which contexts.
    pub(crate) queries: Vec<String>,
}

impl ContextRequest {
    pub(crate) fn parse(data: &[u8]) -> Result<ContextRequest, Violation> {
        let mut fields = Fields::of(data);
        let name = fields.counted_text()?;
        let count = fields.u32()?;
        // Each takes at least its length: the count cannot make us reserve memory that the data does not justify.
        let queries = (0..count).map(|_| fields.counted_text()).collect::<Result<Vec<_>, _>>()?;
        fields.end()?;
        Ok(ContextRequest { name, queries })
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = (self.name.len() as u32).to_be_bytes().to_vec();
        bytes.extend(self.name.as_bytes());
        bytes.extend((self.queries.len() as u32).to_be_bytes());
        for query in &self.queries {
            bytes.extend((query.len() as u32).to_be_bytes());
            bytes.extend(query.as_bytes());
        }
        bytes
    }
}

/// A metadata context that the server offers or has chosen: its number and its name.
pub(crate) fn context_data(number: u32, name: &str) -> Vec<u8> {
    let mut bytes = number.to_be_bytes().to_vec();
    bytes.extend(name.as_bytes());
    bytes
}

/// The reverse of [`context_data`].
pub(crate) fn parse_context(data: &[u8]) -> Result<(u32, String), Violation> {
    let mut fields = Fields::of(data);
    Ok((fields.u32()?, fields.last_text()?))
}

/// A fact about an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Information {
    /// Its size and what it can do.
    Export { size_bytes: u64, flags: u16 },
    /// What it is, for humans.
    Description(String),
    /// How requests must be cut.
    BlockSize { minimum_bytes: u32, preferred_bytes: u32, maximum_bytes: u32 },
    /// Something that we do not use.
    Other(u16),
}

impl Information {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const DESCRIPTION: u16 = 2;
    pub(crate) const BLOCK_SIZE: u16 = 3;

    pub(crate) fn parse(data: &[u8]) -> Result<Information, Violation> {
        let mut fields = Fields::of(data);
        let information = match fields.u16()? {
            Information::EXPORT => Information::Export { size_bytes: fields.u64()?, flags: fields.u16()? },
            Information::DESCRIPTION => return Ok(Information::Description(fields.last_text()?)),
            Information::BLOCK_SIZE => Information::BlockSize {
                minimum_bytes: fields.u32()?,
                preferred_bytes: fields.u32()?,
                maximum_bytes: fields.u32()?,
            },
            other => return Ok(Information::Other(other)),
        };
        fields.end()?;
        Ok(information)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Information::Export { size_bytes, flags } => {
                let mut bytes = Information::EXPORT.to_be_bytes().to_vec();
                bytes.extend(size_bytes.to_be_bytes());
                bytes.extend(flags.to_be_bytes());
                bytes
            }
            Information::Description(text) => {
                let mut bytes = Information::DESCRIPTION.to_be_bytes().to_vec();
                bytes.extend(text.bytes().take(TEXT_BYTES_MAX));
                bytes
            }
            Information::BlockSize { minimum_bytes, preferred_bytes, maximum_bytes } => {
                let mut bytes = Information::BLOCK_SIZE.to_be_bytes().to_vec();
                bytes
                    .extend([minimum_bytes, preferred_bytes, maximum_bytes].iter().flat_map(|size| size.to_be_bytes()));
                bytes
            }
            Information::Other(kind) => kind.to_be_bytes().to_vec(),
        }
    }
}

/// The name of an export as `EXPORT_NAME` carries it.
pub(crate) fn parse_name(data: &[u8]) -> Result<String, Violation> {
    Fields::of(data).last_text()
}
