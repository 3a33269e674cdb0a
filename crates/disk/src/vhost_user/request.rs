//! What a chain asks of a block device (VIRTIO 1.2, 5.2.6). Hostile input.

use super::chain::{Chain, ChainError};
use super::config::RANGE_SECTORS_MAX;
use super::memory::{Memory, Segment};
use crate::{GuestSegment, SECTOR_BYTES};

const HEADER_BYTES: usize = 16;
/// A range of a discard or write-zeroes request.
const RANGE_BYTES: usize = 16;
/// A serial number, as `VIRTIO_BLK_T_GET_ID` gives it.
pub(super) const SERIAL_BYTES: usize = 20;

/// What the last byte of a request says.
pub(super) mod status {
    pub(in crate::vhost_user) const OK: u8 = 0;
    pub(in crate::vhost_user) const IO_ERROR: u8 = 1;
    pub(in crate::vhost_user) const UNSUPPORTED: u8 = 2;
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    /// In bytes, as are all others; the length is the buffers'.
    Read {
        offset: u64,
        length: u64,
    },
    Write {
        offset: u64,
        length: u64,
    },
    Flush,
    Discard {
        offset: u64,
        length: u64,
    },
    WriteZeroes {
        offset: u64,
        length: u64,
        may_unmap: bool,
    },
    /// Who the disk is.
    Identify,
    /// Nothing: the answer is known.
    Refuse {
        status: u8,
    },
}

impl Operation {
    /// Whether it changes what the disk holds.
    pub(super) fn is_change(&self) -> bool {
        matches!(self, Operation::Write { .. } | Operation::Discard { .. } | Operation::WriteZeroes { .. })
    }
}

/// A request that has a place for its answer.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// The chain's first descriptor: the request's name on the ring.
    pub(super) head: u16,
    pub(super) operation: Operation,
    /// Where the status goes.
    pub(super) status_address: u64,
    /// The data's buffers: the guest's bytes of a write, the room for a read's.
    pub(super) data: Vec<Segment>,
    /// It is flushed before it is answered.
    pub(super) is_durable: bool,
}

impl Call {
    /// Reads what a chain asks.
    ///
    /// # Errors
    /// It is no request at all: there is no place for an answer.
    pub(super) fn decode(memory: &Memory, head: u16, chain: &mut Chain) -> Result<Call, ChainError> {
        let status_address = chain.take_status()?;
        let mut header = [0; HEADER_BYTES];
        chain.take_front(memory, &mut header)?;
        let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
        let sector = u64::from_le_bytes(sector);
        let operation = match u32::from_le_bytes([t0, t1, t2, t3]) {
            0 => data_at(sector, chain.writable_bytes(), |offset, length| Operation::Read { offset, length }),
            1 => data_at(sector, chain.readable_bytes(), |offset, length| Operation::Write { offset, length }),
            4 => Operation::Flush,
            8 => Operation::Identify,
            11 => range(memory, chain, false)?,
            13 => range(memory, chain, true)?,
            _ => Operation::Refuse { status: status::UNSUPPORTED },
        };
        let data = match operation {
            Operation::Read { .. } | Operation::Identify => chain.writable.clone(),
            Operation::Write { .. } => chain.readable.clone(),
            _ => Vec::new(),
        };
        Ok(Call { head, operation, status_address, data, is_durable: false })
    }

    /// The data's places in guest memory, as the storage core takes them.
    pub(super) fn segments(&self) -> impl Iterator<Item = GuestSegment> {
        self.data.iter().map(|segment| GuestSegment { guest_address: Some(segment.address), length: segment.length })
    }

    /// Bytes that a buffer must hold for this request.
    pub(super) fn data_bytes(&self) -> u64 {
        match self.operation {
            Operation::Read { length, .. } | Operation::Write { length, .. } => length,
            _ => 0,
        }
    }
}

/// A read or write: whole sectors, at least one. Whether they are the disk's, the core decides.
fn data_at(sector: u64, length: u64, operation: impl Fn(u64, u64) -> Operation) -> Operation {
    match sector.checked_mul(SECTOR_BYTES) {
        Some(offset) if length > 0 && length.is_multiple_of(SECTOR_BYTES) => operation(offset, length),
        _ => Operation::Refuse { status: status::IO_ERROR },
    }
}

/// The one range of a discard or write-zeroes request, its flags checked as 5.2.6.2 demands.
fn range(memory: &Memory, chain: &mut Chain, zeroes: bool) -> Result<Operation, ChainError> {
    if chain.readable_bytes() != RANGE_BYTES as u64 {
        return Ok(Operation::Refuse { status: status::UNSUPPORTED });
    }
    let mut bytes = [0; RANGE_BYTES];
    chain.take_front(memory, &mut bytes)?;
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = bytes;
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
    let flags = u32::from_le_bytes(flags);
    let unknown_flags = if zeroes { flags & !1 } else { flags };
    if unknown_flags != 0 {
        return Ok(Operation::Refuse { status: status::UNSUPPORTED });
    }
    let length = u64::from(sectors) * SECTOR_BYTES;
    Ok(match sector.checked_mul(SECTOR_BYTES) {
        Some(offset) if (1..=RANGE_SECTORS_MAX).contains(&sectors) => match zeroes {
            true => Operation::WriteZeroes { offset, length, may_unmap: flags & 1 != 0 },
            false => Operation::Discard { offset, length },
        },
        _ => Operation::Refuse { status: status::IO_ERROR },
    })
}
