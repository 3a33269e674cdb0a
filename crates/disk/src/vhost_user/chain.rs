//! Descriptor chains: what a guest hands over as one request. Hostile input: every field is the guest's.

use super::memory::{Memory, Segment};

const DESCRIPTOR_BYTES: usize = 16;
/// VIRTIO 1.2, 2.7.5: flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Descriptors in one chain. The device tells the guest 126 data segments; a driver that ignores that gets to here.
pub(super) const DESCRIPTORS_MAX: usize = 1024;
/// Bytes that one chain may name: 126 segments of 256 KiB, which the device tells the guest, and some.
pub(super) const CHAIN_BYTES_MAX: u64 = 32 << 20;

/// Why a chain is no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ChainError {
    #[error("a descriptor's number is not below its table's size")]
    Index,
    #[error("a descriptor table or a buffer lies outside guest memory")]
    Address,
    #[error("more than {DESCRIPTORS_MAX} descriptors, or a loop of them")]
    TooMany,
    #[error("more than {CHAIN_BYTES_MAX} bytes")]
    TooLong,
    #[error("an indirect table within an indirect table, or followed by a descriptor, or of an impossible size")]
    Indirect,
    #[error("a buffer to read behind one to write")]
    Order,
    #[error("no whole request header, or no room for the status")]
    Frame,
}

/// A request's buffers. Reused from request to request.
#[derive(Clone, Debug, Default)]
pub(super) struct Chain {
    /// Bytes from the guest.
    pub(super) readable: Vec<Segment>,
    /// Room for bytes to the guest.
    pub(super) writable: Vec<Segment>,
    table: Vec<u8>,
}

struct Descriptor {
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn parse(bytes: &[u8; DESCRIPTOR_BYTES]) -> Descriptor {
        let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, n0, n1] = *bytes;
        Descriptor {
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            length: u32::from_le_bytes([l0, l1, l2, l3]),
            flags: u16::from_le_bytes([f0, f1]),
            next: u16::from_le_bytes([n0, n1]),
        }
    }
}

impl Chain {
    /// Follows the chain that begins at `head` in the table of `size` descriptors at `table`.
    ///
    /// # Errors
    /// It breaks a rule; what was found of its buffers stays, so that an answer may still find its place.
    pub(super) fn walk(&mut self, memory: &Memory, table: u64, size: u16, head: u16) -> Result<(), ChainError> {
        self.readable.clear();
        self.writable.clear();
        let (mut index, mut bytes) = (head, 0);
        for _ in 0..=size {
            if index >= size {
                return Err(ChainError::Index);
            }
            let mut raw = [0; DESCRIPTOR_BYTES];
            let address = table.checked_add(u64::from(index) * DESCRIPTOR_BYTES as u64).ok_or(ChainError::Address)?;
            memory.read(address, &mut raw).map_err(|_| ChainError::Address)?;
            let descriptor = Descriptor::parse(&raw);
            if descriptor.flags & INDIRECT != 0 {
                if descriptor.flags & NEXT != 0 {
                    return Err(ChainError::Indirect);
                }
                return self.walk_indirect(memory, &descriptor, &mut bytes);
            }
            self.add(memory, &descriptor, &mut bytes)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(ChainError::TooMany)
    }

    fn walk_indirect(&mut self, memory: &Memory, outer: &Descriptor, bytes: &mut u64) -> Result<(), ChainError> {
        let size = outer.length as usize / DESCRIPTOR_BYTES;
        if size == 0 || size > DESCRIPTORS_MAX || !(outer.length as usize).is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(ChainError::Indirect);
        }
        // One copy of the table: the guest cannot change a descriptor between its check and its use.
        let mut table = std::mem::take(&mut self.table);
        table.resize(outer.length as usize, 0);
        let walked = memory
            .read(outer.address, &mut table)
            .map_err(|_| ChainError::Address)
            .and_then(|()| self.walk_table(memory, &table, bytes));
        self.table = table;
        walked
    }

    fn walk_table(&mut self, memory: &Memory, table: &[u8], bytes: &mut u64) -> Result<(), ChainError> {
        let (descriptors, _) = table.as_chunks::<DESCRIPTOR_BYTES>();
        let mut index = 0;
        for _ in 0..=descriptors.len() {
            let descriptor = Descriptor::parse(descriptors.get(index).ok_or(ChainError::Index)?);
            if descriptor.flags & INDIRECT != 0 {
                return Err(ChainError::Indirect);
            }
            self.add(memory, &descriptor, bytes)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = usize::from(descriptor.next);
        }
        Err(ChainError::TooMany)
    }

    fn add(&mut self, memory: &Memory, descriptor: &Descriptor, bytes: &mut u64) -> Result<(), ChainError> {
        let segment = Segment { address: descriptor.address, length: descriptor.length };
        if segment.length == 0 {
            return Ok(());
        }
        *bytes += u64::from(segment.length);
        if *bytes > CHAIN_BYTES_MAX {
            return Err(ChainError::TooLong);
        }
        if !memory.contains(segment.address, u64::from(segment.length)) {
            return Err(ChainError::Address);
        }
        if self.readable.len() + self.writable.len() == DESCRIPTORS_MAX {
            return Err(ChainError::TooMany);
        }
        if descriptor.flags & WRITE != 0 {
            self.writable.push(segment);
        } else if self.writable.is_empty() {
            self.readable.push(segment);
        } else {
            return Err(ChainError::Order);
        }
        Ok(())
    }

    /// Takes the first bytes out of the readable buffers: the header may lie in one buffer with data, or in several.
    pub(super) fn take_front(&mut self, memory: &Memory, into: &mut [u8]) -> Result<(), ChainError> {
        let mut taken = 0;
        while taken < into.len() {
            let first = self.readable.first_mut().ok_or(ChainError::Frame)?;
            let count = (into.len() - taken).min(first.length as usize);
            memory.read(first.address, &mut into[taken..taken + count]).map_err(|_| ChainError::Address)?;
            taken += count;
            first.address += count as u64;
            first.length -= count as u32;
            if first.length == 0 {
                self.readable.remove(0);
            }
        }
        Ok(())
    }

    /// Takes the last byte out of the writable buffers, the status's place, and tells its address.
    pub(super) fn take_status(&mut self) -> Result<u64, ChainError> {
        let last = self.writable.last_mut().ok_or(ChainError::Frame)?;
        last.length -= 1;
        let address = last.address + u64::from(last.length);
        if last.length == 0 {
            self.writable.pop();
        }
        Ok(address)
    }

    /// Bytes of data from the guest.
    pub(super) fn readable_bytes(&self) -> u64 {
        self.readable.iter().map(|segment| u64::from(segment.length)).sum()
    }

    /// Room for data to the guest.
    pub(super) fn writable_bytes(&self) -> u64 {
        self.writable.iter().map(|segment| u64::from(segment.length)).sum()
    }
}
