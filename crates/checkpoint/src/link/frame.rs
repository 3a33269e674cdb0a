//! Frames: kind, session, epoch, length, payload. Read as from somebody who may lie.

use std::io::{self, Read};

use super::{LinkError, Session};
use crate::delta::{Different, HeldEpoch, Sizes, Space};

/// The version of these bytes.
const FORMAT: u32 = 1;
/// Bytes of a frame before its payload.
pub(super) const HEAD_BYTES: usize = 32;
/// Bytes of an epoch in a frame at most.
pub const DATA_BYTES_MAX: usize = 64 << 10;
/// Bytes of a message at most: the caller's state of a machine, beside what travels as epochs.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// What is read of a payload before its sender has sent it all: so that a length alone takes no memory.
const READ_AHEAD_BYTES: usize = 256 << 10;
/// Letters of a reason.
const REASON_BYTES_MAX: usize = 1 << 10;
/// Runs of what differs in one frame.
pub(super) const RUNS_MAX: usize = 4096;
const RUN_BYTES: usize = 16;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Hello = 1,
    Welcome = 2,
    Data = 3,
    Acknowledged = 4,
    Different = 5,
    Message = 6,
    Heartbeat = 7,
    Failed = 8,
}

impl Kind {
    fn of(byte: u8) -> Option<Kind> {
        Some(match byte {
            1 => Kind::Hello,
            2 => Kind::Welcome,
            3 => Kind::Data,
            4 => Kind::Acknowledged,
            5 => Kind::Different,
            6 => Kind::Message,
            7 => Kind::Heartbeat,
            8 => Kind::Failed,
            _ => return None,
        })
    }

    fn bytes_max(self) -> usize {
        match self {
            Kind::Hello => HELLO_BYTES,
            Kind::Welcome | Kind::Acknowledged => HeldEpoch::BYTES,
            Kind::Data => DATA_BYTES_MAX,
            Kind::Different => 2 + RUNS_MAX * RUN_BYTES,
            Kind::Message => MESSAGE_BYTES_MAX,
            Kind::Heartbeat => 0,
            Kind::Failed => REASON_BYTES_MAX,
        }
    }
}

/// A frame that has come.
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) session: Session,
    pub(super) epoch: u64,
    pub(super) payload: Vec<u8>,
}

/// The bytes before a payload.
pub(super) fn head(kind: Kind, session: Session, epoch: u64, payload: &[u8]) -> [u8; HEAD_BYTES] {
    debug_assert!(payload.len() <= kind.bytes_max(), "{kind:?} of {} bytes", payload.len());
    let mut bytes = [0; HEAD_BYTES];
    bytes[0] = kind as u8;
    bytes[4..8].copy_from_slice(&u32::try_from(payload.len()).expect("frames are short").to_le_bytes());
    bytes[8..24].copy_from_slice(&session.0);
    bytes[24..].copy_from_slice(&epoch.to_le_bytes());
    bytes
}

pub(super) fn read(from: &mut impl Read) -> Result<Frame, LinkError> {
    let mut head = [0; HEAD_BYTES];
    from.read_exact(&mut head)?;
    let [kind, zeros @ .., _, _, _, _] = *head.first_chunk::<8>().expect("it has more");
    let kind = Kind::of(kind).filter(|_| zeros == [0; 3]);
    let kind = kind.ok_or_else(|| LinkError::malformed(format!("a frame of kind {}", head[0])))?;
    let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
    if length > kind.bytes_max() {
        return Err(LinkError::malformed(format!("a frame {kind:?} of {length} bytes")));
    }
    let mut payload = Vec::with_capacity(length.min(READ_AHEAD_BYTES));
    from.take(length as u64).read_to_end(&mut payload)?;
    if payload.len() < length {
        return Err(LinkError::Connection(io::ErrorKind::UnexpectedEof.into()));
    }
    let session = Session(*head[8..].first_chunk().expect("it has more"));
    let epoch = u64::from_le_bytes(*head[24..].first_chunk().expect("it has more"));
    Ok(Frame { kind, session, epoch, payload })
}

const HELLO_BYTES: usize = 4 + 8 + 8 + 1;

pub(super) fn hello(sizes: &Sizes) -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    bytes[..4].copy_from_slice(&FORMAT.to_le_bytes());
    bytes[4..12].copy_from_slice(&sizes.memory_bytes.to_le_bytes());
    bytes[12..20].copy_from_slice(&sizes.disk_bytes.to_le_bytes());
    bytes[20] = u8::from(sizes.disk_travels);
    bytes
}

pub(super) fn parse_hello(payload: &[u8]) -> Result<Sizes, LinkError> {
    let bytes: &[u8; HELLO_BYTES] =
        payload.try_into().map_err(|_| LinkError::malformed("a hello of another length"))?;
    let format = u32::from_le_bytes(*bytes.first_chunk().expect("it has more"));
    if format != FORMAT || bytes[20] > 1 {
        return Err(LinkError::malformed(format!("its format is {format}, and this version knows {FORMAT}")));
    }
    let number = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().expect("it has more"));
    Ok(Sizes { memory_bytes: number(4), disk_bytes: number(12), disk_travels: bytes[20] == 1 })
}

pub(super) fn parse_held(payload: &[u8]) -> Result<HeldEpoch, LinkError> {
    let bytes = payload.try_into().map_err(|_| LinkError::malformed("what is held has another length"))?;
    Ok(HeldEpoch::from_bytes(bytes))
}

/// What differs, as payloads: whether it is the last one, whether the devices do, runs.
pub(super) fn different(different: &Different) -> Vec<Vec<u8>> {
    let spaces = [(1, &different.pages), (2, &different.blocks)];
    let runs: Vec<[u8; RUN_BYTES]> = spaces
        .iter()
        .flat_map(|(space, numbers)| {
            let follow = |one: &u64, other: &u64| one.checked_add(1) == Some(*other);
            let runs = numbers.chunk_by(follow).flat_map(|run| run.chunks(u32::MAX as usize));
            runs.map(|run| {
                let mut bytes = [0; RUN_BYTES];
                bytes[0] = *space;
                bytes[4..8].copy_from_slice(&(run.len() as u32).to_le_bytes());
                bytes[8..].copy_from_slice(&run[0].to_le_bytes());
                bytes
            })
        })
        .collect();
    let count = runs.len().div_ceil(RUNS_MAX).max(1);
    let payload = |at: usize| {
        let of_frame = &runs[at * RUNS_MAX..runs.len().min((at + 1) * RUNS_MAX)];
        [&[u8::from(at + 1 == count), u8::from(different.devices)], of_frame.as_flattened()].concat()
    };
    (0..count).map(payload).collect()
}

/// Adds what a payload tells; whether it is the last one. Numbers rise and stay within the machine.
pub(super) fn parse_different(payload: &[u8], sizes: &Sizes, into: &mut Different) -> Result<bool, LinkError> {
    let wrong = || LinkError::malformed("what differs is no part of the machine");
    let ([is_last, devices], runs) = payload.split_first_chunk().ok_or_else(wrong)?;
    let (runs, rest) = runs.as_chunks::<RUN_BYTES>();
    if *is_last > 1 || *devices > 1 || !rest.is_empty() || runs.is_empty() && *is_last == 0 {
        return Err(wrong());
    }
    into.devices |= *devices == 1;
    for run in runs {
        let (space, numbers) = match run[0] {
            1 => (Space::Memory, &mut into.pages),
            2 if sizes.disk_travels => (Space::Disk, &mut into.blocks),
            _ => return Err(wrong()),
        };
        let count = u32::from_le_bytes(*run[4..].first_chunk().expect("it has more"));
        let first = u64::from_le_bytes(*run[8..].first_chunk().expect("it has more"));
        let end = first.checked_add(count.into()).filter(|end| *end <= sizes.pieces(space)).ok_or_else(wrong)?;
        if count == 0 || numbers.last().is_some_and(|last| *last >= first) {
            return Err(wrong());
        }
        numbers.extend(first..end);
    }
    Ok(*is_last == 1)
}

/// Why this side gives up, cut to what fits.
pub(super) fn reason(reason: &str) -> &[u8] {
    &reason.as_bytes()[..reason.floor_char_boundary(REASON_BYTES_MAX)]
}
