//! Messages as bytes.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use super::cursor::Cursor;
use super::message::{DeliveredRange, Lane, Message, ReadFailure, ReadRequest, SessionId};
use super::{DELIVERED_RANGES_MAX, Encoding, HOT_RANGES_MAX, Payload, ProtocolError};
use crate::ByteRange;
use crate::image::FileNumber;

/// What a connection begins with, so that another protocol is noticed at once.
const MAGIC: [u8; 4] = *b"1COP";

impl Message {
    /// Appends kind and fields to `frame`.
    ///
    /// # Errors
    /// [`ProtocolError::Malformed`] for a path longer than 65535 bytes.
    pub fn write_to(&self, frame: &mut Vec<u8>) -> Result<(), ProtocolError> {
        frame.push(self.kind().0);
        match self {
            Message::Hello { version, lane, session } => {
                frame.extend_from_slice(&MAGIC);
                frame.extend_from_slice(&version.to_le_bytes());
                frame.push(matches!(lane, Lane::Background).into());
                frame.push(session.is_some().into());
                frame.extend_from_slice(&session.map(|session| session.0).unwrap_or_default());
            }
            Message::Welcome { version, session, lease_seconds } => {
                frame.extend_from_slice(&version.to_le_bytes());
                frame.extend_from_slice(&session.0);
                frame.extend_from_slice(&lease_seconds.to_le_bytes());
            }
            Message::Refused { reason } => frame.extend_from_slice(reason.as_bytes()),
            Message::Open { plan } => frame.extend_from_slice(plan),
            Message::ManifestPart { bytes } => frame.extend_from_slice(bytes),
            Message::FilePart { path, mode, last, bytes } => {
                frame.extend_from_slice(&mode.to_le_bytes());
                frame.push((*last).into());
                let path = path.as_os_str().as_bytes();
                let length =
                    u16::try_from(path.len()).map_err(|_| ProtocolError::Malformed("a path of more than 64 KiB"))?;
                frame.extend_from_slice(&length.to_le_bytes());
                frame.extend_from_slice(path);
                frame.extend_from_slice(bytes);
            }
            Message::Read(request) => {
                frame.extend_from_slice(&request.id.to_le_bytes());
                frame.extend_from_slice(&request.file.0.to_le_bytes());
                frame.extend_from_slice(&request.offset_bytes.to_le_bytes());
                frame.extend_from_slice(&request.length_bytes.to_le_bytes());
            }
            Message::Content { id, payload } => {
                frame.extend_from_slice(&id.to_le_bytes());
                frame.push(encoding_number(payload.encoding));
                frame.extend_from_slice(&payload.hash.to_le_bytes());
                frame.extend_from_slice(&payload.length_bytes.to_le_bytes());
                frame.extend_from_slice(&payload.bytes);
            }
            Message::Failed { id, failure, reason } => {
                frame.extend_from_slice(&id.to_le_bytes());
                frame.push(matches!(failure, ReadFailure::Lost).into());
                frame.extend_from_slice(reason.as_bytes());
            }
            Message::Delivered(ranges) => {
                for range in ranges {
                    frame.extend_from_slice(&range.file.0.to_le_bytes());
                    frame.extend_from_slice(&range.first.to_le_bytes());
                    frame.extend_from_slice(&range.count.to_le_bytes());
                }
            }
            Message::End { whole } => frame.push((*whole).into()),
            Message::Hot { last, ranges } => {
                frame.push((*last).into());
                for (file, range) in ranges {
                    frame.extend_from_slice(&file.0.to_le_bytes());
                    frame.extend_from_slice(&range.start.to_le_bytes());
                    frame.extend_from_slice(&range.end.to_le_bytes());
                }
            }
            Message::Opened | Message::KeepAlive | Message::HotWanted => {}
        }
        Ok(())
    }

    /// Understands a frame without its length.
    ///
    /// # Errors
    /// [`ProtocolError::UnknownKind`], [`ProtocolError::Malformed`].
    pub fn parse(frame: &[u8]) -> Result<Message, ProtocolError> {
        let mut fields = Cursor::new(frame);
        let message = match fields.u8()? {
            1 => parse_hello(&mut fields)?,
            2 => Message::Welcome {
                version: fields.u16()?,
                session: SessionId(fields.array()?),
                lease_seconds: fields.u32()?,
            },
            3 => Message::Refused { reason: text(fields.rest()) },
            4 => Message::Open { plan: fields.rest().to_vec() },
            5 => Message::ManifestPart { bytes: fields.rest().to_vec() },
            6 => parse_file_part(&mut fields)?,
            7 => Message::Opened,
            8 => Message::Read(ReadRequest {
                id: fields.u64()?,
                file: FileNumber(fields.u32()?),
                offset_bytes: fields.u64()?,
                length_bytes: fields.u32()?,
            }),
            9 => Message::Content { id: fields.u64()?, payload: parse_payload(&mut fields)? },
            10 => {
                let id = fields.u64()?;
                let failure = if fields.flag()? { ReadFailure::Lost } else { ReadFailure::Io };
                Message::Failed { id, failure, reason: text(fields.rest()) }
            }
            11 => parse_delivered(&mut fields)?,
            12 => Message::KeepAlive,
            13 => Message::End { whole: fields.flag()? },
            14 => Message::HotWanted,
            15 => parse_hot(&mut fields)?,
            kind => return Err(ProtocolError::UnknownKind(kind)),
        };
        fields.end()?;
        Ok(message)
    }
}

fn parse_hello(fields: &mut Cursor<'_>) -> Result<Message, ProtocolError> {
    if fields.array()? != MAGIC {
        return Err(ProtocolError::Malformed("it is not Onecopy who speaks"));
    }
    let version = fields.u16()?;
    let lane = if fields.flag()? { Lane::Background } else { Lane::Demand };
    let known = fields.flag()?;
    let session = SessionId(fields.array()?);
    Ok(Message::Hello { version, lane, session: known.then_some(session) })
}

fn parse_file_part(fields: &mut Cursor<'_>) -> Result<Message, ProtocolError> {
    let mode = fields.u32()?;
    let last = fields.flag()?;
    let path = PathBuf::from(OsString::from_vec(fields.short_bytes()?.to_vec()));
    Ok(Message::FilePart { path, mode, last, bytes: fields.rest().to_vec() })
}

fn parse_payload(fields: &mut Cursor<'_>) -> Result<Payload, ProtocolError> {
    let encoding = match fields.u8()? {
        0 => Encoding::Plain,
        1 => Encoding::Zstd,
        2 => Encoding::Zero,
        _ => return Err(ProtocolError::Malformed("content of unknown encoding")),
    };
    Ok(Payload { encoding, hash: fields.u64()?, length_bytes: fields.u32()?, bytes: fields.rest().to_vec() })
}

fn parse_delivered(fields: &mut Cursor<'_>) -> Result<Message, ProtocolError> {
    let mut rest = Cursor::new(fields.rest());
    let mut ranges = Vec::new();
    while let Ok(file) = rest.u32() {
        if ranges.len() == DELIVERED_RANGES_MAX {
            return Err(ProtocolError::Malformed("more ranges than one acknowledgement may have"));
        }
        ranges.push(DeliveredRange { file: FileNumber(file), first: rest.u64()?, count: rest.u64()? });
    }
    rest.end()?;
    Ok(Message::Delivered(ranges))
}

fn parse_hot(fields: &mut Cursor<'_>) -> Result<Message, ProtocolError> {
    let last = fields.flag()?;
    let mut rest = Cursor::new(fields.rest());
    let mut ranges = Vec::new();
    while let Ok(file) = rest.u32() {
        let (start, end) = (rest.u64()?, rest.u64()?);
        if ranges.len() == HOT_RANGES_MAX || start > end {
            return Err(ProtocolError::Malformed("hot ranges that are too many or none"));
        }
        ranges.push((FileNumber(file), ByteRange::from(start..end)));
    }
    rest.end()?;
    Ok(Message::Hot { last, ranges })
}

fn encoding_number(encoding: Encoding) -> u8 {
    match encoding {
        Encoding::Plain => 0,
        Encoding::Zstd => 1,
        Encoding::Zero => 2,
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request() -> impl Strategy<Value = ReadRequest> {
        any::<(u64, u32, u64, u32)>().prop_map(|(id, file, offset_bytes, length_bytes)| ReadRequest {
            id,
            file: FileNumber(file),
            offset_bytes,
            length_bytes,
        })
    }

    fn payload() -> impl Strategy<Value = Payload> {
        let encoding = prop_oneof![Just(Encoding::Plain), Just(Encoding::Zstd), Just(Encoding::Zero)];
        (encoding, any::<u64>(), any::<u32>(), any::<Vec<u8>>())
            .prop_map(|(encoding, hash, length_bytes, bytes)| Payload { encoding, hash, length_bytes, bytes })
    }

    fn message() -> impl Strategy<Value = Message> {
        let session = any::<[u8; 16]>().prop_map(SessionId);
        let lane = prop_oneof![Just(Lane::Demand), Just(Lane::Background)];
        let failure = prop_oneof![Just(ReadFailure::Io), Just(ReadFailure::Lost)];
        let range = any::<(u32, u64, u64)>().prop_map(|(file, first, count)| DeliveredRange {
            file: FileNumber(file),
            first,
            count,
        });
        let hot = any::<(u32, u64, u64)>()
            .prop_map(|(file, one, other)| (FileNumber(file), ByteRange::from(one.min(other)..one.max(other))));
        let path = any::<Vec<u8>>().prop_map(|bytes| PathBuf::from(OsString::from_vec(bytes)));
        prop_oneof![
            (any::<u16>(), lane, proptest::option::of(session.clone()))
                .prop_map(|(version, lane, session)| { Message::Hello { version, lane, session } }),
            (any::<u16>(), session, any::<u32>()).prop_map(|(version, session, lease_seconds)| Message::Welcome {
                version,
                session,
                lease_seconds
            }),
            any::<String>().prop_map(|reason| Message::Refused { reason }),
            any::<Vec<u8>>().prop_map(|plan| Message::Open { plan }),
            any::<Vec<u8>>().prop_map(|bytes| Message::ManifestPart { bytes }),
            (path, any::<u32>(), any::<bool>(), any::<Vec<u8>>())
                .prop_map(|(path, mode, last, bytes)| Message::FilePart { path, mode, last, bytes }),
            request().prop_map(Message::Read),
            (any::<u64>(), payload()).prop_map(|(id, payload)| Message::Content { id, payload }),
            (any::<u64>(), failure, any::<String>()).prop_map(|(id, failure, reason)| Message::Failed {
                id,
                failure,
                reason
            }),
            proptest::collection::vec(range, 0..50).prop_map(Message::Delivered),
            Just(Message::Opened),
            Just(Message::KeepAlive),
            Just(Message::HotWanted),
            (any::<bool>(), proptest::collection::vec(hot, 0..50))
                .prop_map(|(last, ranges)| Message::Hot { last, ranges }),
            any::<bool>().prop_map(|whole| Message::End { whole }),
        ]
    }

    fn bytes_of(message: &Message) -> Vec<u8> {
        let mut frame = Vec::new();
        message.write_to(&mut frame).unwrap();
        frame
    }

    proptest! {
        #[test]
        fn messages_are_understood_as_they_were_meant(message in message()) {
            prop_assert_eq!(Message::parse(&bytes_of(&message)).unwrap(), message);
        }

        #[test]
        fn hostile_bytes_give_messages_or_errors(bytes: Vec<u8>) {
            let _ = Message::parse(&bytes);
        }

        #[test]
        fn damaged_messages_give_messages_or_errors(
            message in message(),
            at: prop::sample::Index,
            byte: u8,
            cut: prop::sample::Index,
        ) {
            let mut frame = bytes_of(&message);
            *at.get_mut(&mut frame) = byte;
            frame.truncate(cut.index(frame.len() + 1));
            if let Ok(understood) = Message::parse(&frame) {
                // What is understood has one form, but for text that was not UTF-8.
                let again = Message::parse(&bytes_of(&understood)).unwrap();
                prop_assert_eq!(again, understood);
            }
        }
    }

    #[test]
    fn bounds_hold() {
        let range = DeliveredRange { file: FileNumber(0), first: 0, count: 1 };
        let most = bytes_of(&Message::Delivered(vec![range; DELIVERED_RANGES_MAX]));
        assert!(most.len() < super::super::FRAME_BYTES_MAX && Message::parse(&most).is_ok());
        let more = bytes_of(&Message::Delivered(vec![range; DELIVERED_RANGES_MAX + 1]));
        assert!(matches!(Message::parse(&more), Err(ProtocolError::Malformed(_))));
        let path = PathBuf::from("x".repeat(70_000));
        let long = Message::FilePart { path, mode: 0o600, last: true, bytes: Vec::new() };
        assert!(long.write_to(&mut Vec::new()).is_err());
        assert!(matches!(Message::parse(&[]), Err(ProtocolError::Malformed(_))));
        assert!(matches!(Message::parse(&[99]), Err(ProtocolError::UnknownKind(99))));
    }
}
