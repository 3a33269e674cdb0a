//! What is sent is read back as it was, and whatever is received is a value or a violation.

use proptest::collection::vec;
use proptest::prelude::*;

use super::handshake::*;
use super::reply::*;
use super::request::*;

proptest! {
    #[test]
    fn requests_come_back(flags: u16, command: u16, cookie: u64, offset: u64, length: u32) {
        let header = RequestHeader { flags, command, cookie, offset, length };
        prop_assert_eq!(RequestHeader::parse(&header.encode()), Ok(header));
    }

    #[test]
    fn information_requests_come_back(name in ".{0,60}", wanted in vec(any::<u16>(), 0..20)) {
        let request = InformationRequest { name, wanted };
        prop_assert_eq!(InformationRequest::parse(&request.encode()), Ok(request));
    }

    #[test]
    fn context_requests_come_back(name in ".{0,60}", queries in vec(".{0,30}", 0..20)) {
        let request = ContextRequest { name, queries };
        prop_assert_eq!(ContextRequest::parse(&request.encode()), Ok(request));
    }

    #[test]
    fn information_comes_back(size_bytes: u64, flags: u16, text in ".{0,100}", sizes: (u32, u32, u32)) {
        let (minimum_bytes, preferred_bytes, maximum_bytes) = sizes;
        for information in [
            Information::Export { size_bytes, flags },
            Information::Description(text),
            Information::BlockSize { minimum_bytes, preferred_bytes, maximum_bytes },
        ] {
            prop_assert_eq!(Information::parse(&information.encode()), Ok(information));
        }
    }

    #[test]
    fn chunks_come_back(cookie: u64, offset: u64, length in 1_u32.., error in 1_u32.., message in ".{0,80}",
                        extents in vec((1_u32.., any::<u32>()), 1..40)) {
        for (bytes, expected) in [
            (hole(cookie, offset, length), Payload::Hole { offset, length }),
            (status(cookie, 7, &extents), Payload::Status { context: 7, extents: extents.clone() }),
            (failure(cookie, error, &message), Payload::Failure { error, message: message.clone() }),
            (nothing(cookie), Payload::None),
        ] {
            let (head, payload) = bytes.split_at(ReplyHeader::CHUNK_BYTES);
            let ReplyHeader::Chunk { flags, kind, cookie: told, length } = ReplyHeader::parse(head)? else {
                return Err(TestCaseError::fail("a simple reply"));
            };
            prop_assert_eq!((flags, told, length as usize), (DONE, cookie, payload.len()));
            prop_assert_eq!(Payload::parse(kind, payload), Ok(expected));
        }
    }

    #[test]
    fn whatever_comes_is_a_value_or_a_violation(bytes in vec(any::<u8>(), 0..200), kind: u16) {
        // No panic, and no memory beyond what came: that is all that these must hold.
        let _ = InformationRequest::parse(&bytes);
        let _ = ContextRequest::parse(&bytes);
        let _ = Information::parse(&bytes);
        let _ = parse_context(&bytes);
        let _ = parse_name(&bytes);
        let _ = ReplyHeader::parse(&bytes);
        match Payload::parse(kind, &bytes) {
            Ok(Payload::Status { extents, .. }) => prop_assert!(extents.len() * 8 < bytes.len()),
            Ok(Payload::Failure { message, .. }) => prop_assert!(message.len() <= 3 * bytes.len()),
            _ => {}
        }
    }

    #[test]
    fn a_message_cut_short_is_a_violation(name in ".{1,40}", queries in vec(".{0,30}", 1..5), cut in 0_usize..1000) {
        let bytes = ContextRequest { name, queries }.encode();
        let cut = cut % bytes.len();
        prop_assert!(ContextRequest::parse(&bytes[..cut]).is_err());
    }
}

#[test]
fn counts_that_lie_take_no_memory() {
    let mut bytes = 0_u32.to_be_bytes().to_vec();
    bytes.extend(u32::MAX.to_be_bytes());
    assert!(ContextRequest::parse(&bytes).is_err());
    let mut bytes = u32::MAX.to_be_bytes().to_vec();
    bytes.extend([b'a'; 100]);
    assert!(InformationRequest::parse(&bytes).is_err());
}
