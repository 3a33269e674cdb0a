//! Messages of clients, read only as far as the router must understand them.

use bytes::{Buf, BufMut, Bytes};

use super::{Channel, Frame};

/// Start-up parameters are at most this many; PostgreSQL's packet bound allows no more that mean anything.
const STARTUP_PARAMETERS_MAX: usize = 200;

/// Protocol codes in place of a version; PostgreSQL's `pqcomm.h`.
const CANCEL_REQUEST: u32 = 80_877_102;
const SSL_REQUEST: u32 = 80_877_103;
const GSS_REQUEST: u32 = 80_877_104;

/// A message that does not have the form its type demands.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed {0} message")]
pub struct FrontendError(pub &'static str);

/// The first packet of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartupPacket {
    /// A session, with its parameters (`user`, `database`, `options`, settings).
    Session {
        /// Major and minor version, 3.0 or 3.2.
        version: (u16, u16),
        /// In the order sent.
        parameters: Vec<(String, String)>,
    },
    /// TLS is asked for.
    Ssl,
    /// GSSAPI encryption is asked for.
    Gss,
    /// Another session's running statement is to be cancelled.
    Cancel {
        /// Process id and secret as given at log-in.
        process_id: u32,
        /// The secret of protocol 3.0 has 4 bytes.
        secret: u32,
    },
}

impl StartupPacket {
    /// Reads a start-up packet (without its length).
    pub fn parse(packet: &Bytes) -> Result<StartupPacket, FrontendError> {
        let malformed = FrontendError("start-up");
        let mut rest = packet.clone();
        if rest.remaining() < 4 {
            return Err(malformed);
        }
        match rest.get_u32() {
            SSL_REQUEST => Ok(StartupPacket::Ssl),
            GSS_REQUEST => Ok(StartupPacket::Gss),
            CANCEL_REQUEST if rest.remaining() == 8 => {
                Ok(StartupPacket::Cancel { process_id: rest.get_u32(), secret: rest.get_u32() })
            }
            version => {
                let mut parameters = Vec::new();
                loop {
                    let name = string(&mut rest).ok_or(malformed.clone())?;
                    if name.is_empty() {
                        break;
                    }
                    if parameters.len() == STARTUP_PARAMETERS_MAX {
                        return Err(malformed);
                    }
                    let value = string(&mut rest).ok_or(malformed.clone())?;
                    parameters.push((text(name, "start-up")?, text(value, "start-up")?));
                }
                Ok(StartupPacket::Session { version: ((version >> 16) as u16, version as u16), parameters })
            }
        }
    }
}

/// Takes a zero-terminated string.
fn string(rest: &mut Bytes) -> Option<Bytes> {
    let end = rest.iter().position(|&byte| byte == 0)?;
    let value = rest.split_to(end);
    rest.advance(1);
    Some(value)
}

fn text(bytes: Bytes, message: &'static str) -> Result<String, FrontendError> {
    String::from_utf8(bytes.into()).map_err(|_| FrontendError(message))
}

/// The SQL of a simple `Query`.
pub fn sql_of_query(frame: &Frame) -> Result<Bytes, FrontendError> {
    let mut rest = frame.body();
    let sql = string(&mut rest).ok_or(FrontendError("Query"))?;
    if rest.has_remaining() { Err(FrontendError("Query")) } else { Ok(sql) }
}

/// `Parse`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parse {
    /// The statement's name; empty: unnamed.
    pub name: Bytes,
    /// Its text.
    pub sql: Bytes,
    /// Number and OIDs of parameter types, as sent.
    pub types: Bytes,
}

impl Parse {
    /// Reads the message.
    pub fn read(frame: &Frame) -> Result<Parse, FrontendError> {
        let malformed = FrontendError("Parse");
        let mut rest = frame.body();
        let name = string(&mut rest).ok_or(malformed.clone())?;
        let sql = string(&mut rest).ok_or(malformed.clone())?;
        if rest.len() < 2 || rest.len() != 2 + 4 * usize::from(u16::from_be_bytes([rest[0], rest[1]])) {
            return Err(malformed);
        }
        Ok(Parse { name, sql, types: rest })
    }

    /// Appends the message under another statement name.
    pub fn encode_as(sql: &Bytes, types: &[u8], name: &str, channel: &mut Channel) {
        channel.begin(b'P', name.len() + sql.len() + types.len() + 2);
        channel.output.put_slice(name.as_bytes());
        channel.output.put_u8(0);
        channel.put(sql);
        channel.output.put_u8(0);
        channel.output.put_slice(types);
    }
}

/// `Bind`: its two names; the values pass through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    /// The portal; empty: unnamed.
    pub portal: Bytes,
    /// The statement.
    pub statement: Bytes,
    /// Formats, values and result formats, as sent, or the first part of them.
    pub values: Bytes,
    /// How many bytes of them follow.
    pub rest: usize,
}

impl Bind {
    /// Reads the message.
    pub fn read(frame: &Frame) -> Result<Bind, FrontendError> {
        let mut rest = frame.body();
        let portal = string(&mut rest).ok_or(FrontendError("Bind"))?;
        let statement = string(&mut rest).ok_or(FrontendError("Bind"))?;
        if rest.len() < 6 {
            return Err(FrontendError("Bind"));
        }
        Ok(Bind { portal, statement, values: rest, rest: frame.rest })
    }
}

/// Appends `bind` for the statement that the server calls `statement`; of one in parts, the first.
pub fn rename_bind(bind: &Bind, statement: &str, channel: &mut Channel) {
    channel.begin(b'B', bind.portal.len() + statement.len() + bind.values.len() + bind.rest + 2);
    channel.output.put_slice(&bind.portal);
    channel.output.put_u8(0);
    channel.output.put_slice(statement.as_bytes());
    channel.output.put_u8(0);
    channel.put(&bind.values);
}

/// What `Describe` and `Close` name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseTarget {
    /// A prepared statement.
    Statement,
    /// A portal.
    Portal,
}

fn target_and_name(frame: &Frame, message: &'static str) -> Result<(CloseTarget, Bytes), FrontendError> {
    let mut rest = frame.body();
    if !rest.has_remaining() {
        return Err(FrontendError(message));
    }
    let target = match rest.get_u8() {
        b'S' => CloseTarget::Statement,
        b'P' => CloseTarget::Portal,
        _ => return Err(FrontendError(message)),
    };
    let name = string(&mut rest).ok_or(FrontendError(message))?;
    if rest.has_remaining() { Err(FrontendError(message)) } else { Ok((target, name)) }
}

/// `Describe`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Describe {
    /// Statement or portal.
    pub target: CloseTarget,
    /// Its name.
    pub name: Bytes,
}

impl Describe {
    /// Reads the message.
    pub fn read(frame: &Frame) -> Result<Describe, FrontendError> {
        target_and_name(frame, "Describe").map(|(target, name)| Describe { target, name })
    }
}

/// `Close`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Close {
    /// Statement or portal.
    pub target: CloseTarget,
    /// Its name.
    pub name: Bytes,
}

impl Close {
    /// Reads the message.
    pub fn read(frame: &Frame) -> Result<Close, FrontendError> {
        target_and_name(frame, "Close").map(|(target, name)| Close { target, name })
    }
}

/// `Execute`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Execute {
    /// The portal.
    pub portal: Bytes,
    /// Most rows to return; 0: all.
    pub rows_max: u32,
}

impl Execute {
    /// Reads the message.
    pub fn read(frame: &Frame) -> Result<Execute, FrontendError> {
        let mut rest = frame.body();
        let portal = string(&mut rest).ok_or(FrontendError("Execute"))?;
        if rest.remaining() != 4 {
            return Err(FrontendError("Execute"));
        }
        Ok(Execute { portal, rows_max: rest.get_u32() })
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use proptest::prelude::*;

    use super::*;
    use crate::wire::{Reply, Socket};

    fn frame(tag: u8, body: &[u8]) -> Frame {
        let mut bytes = BytesMut::new();
        bytes.message(tag, body);
        Frame::whole(tag, bytes.freeze())
    }

    #[tokio::test]
    async fn a_bind_is_renamed_and_nothing_else_changes() {
        let (socket, _peer) = tokio::net::UnixStream::pair().unwrap();
        let mut channel = Channel::new(Socket::Unix(socket), 1 << 20);
        let bind = Bind::read(&frame(b'B', b"portal\0old\0\0\0\0\0\0\0")).expect("well formed");
        rename_bind(&bind, "new", &mut channel);
        assert_eq!(&channel.output[..], b"B\0\0\0\x15portal\0new\0\0\0\0\0\0\0");
    }

    #[test]
    fn a_parse_must_hold_the_types_it_counts() {
        assert!(Parse::read(&frame(b'P', b"\0select 1\0\0\0")).is_ok());
        assert!(Parse::read(&frame(b'P', b"\0select 1\0\0\x02\0\0\0\x17")).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_reader_panic(body in proptest::collection::vec(any::<u8>(), 0..64)) {
            let frame = frame(b'x', &body);
            let _ = (Parse::read(&frame).is_ok(), Bind::read(&frame).is_ok(), Describe::read(&frame).is_ok());
            let _ = (Close::read(&frame).is_ok(), Execute::read(&frame).is_ok(), sql_of_query(&frame).is_ok());
            let _ = StartupPacket::parse(&Bytes::from(body)).is_ok();
        }
    }
}
