//! The split ring's three parts in guest memory (VIRTIO 1.2, 2.7). Only where things lie; what is done with them is
//! [`ring`](super::ring)'s.

use vm_memory::GuestMemoryError;

use super::memory::Memory;

/// Descriptors of a ring at most: QEMU's own bound for this device.
pub(super) const RING_SIZE_MAX: u16 = 1024;

const DESCRIPTOR_BYTES: u64 = 16;
/// The driver wants no notification (available ring), or the device none (used ring).
const NO_NOTIFICATION: u16 = 1;

/// Where a ring lies, in guest physical addresses, and how it is used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    pub(super) size: u16,
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    /// Both sides tell up to where they need no notification.
    pub(super) event_index: bool,
}

impl Split {
    /// Whether all of it is guest memory, aligned as it must be.
    pub(super) fn is_within(&self, memory: &Memory) -> bool {
        let size = u64::from(self.size);
        self.descriptors.is_multiple_of(16)
            && self.available.is_multiple_of(2)
            && self.used.is_multiple_of(4)
            && memory.contains(self.descriptors, DESCRIPTOR_BYTES * size)
            && memory.contains(self.available, 4 + 2 * size + 2)
            && memory.contains(self.used, 4 + 8 * size + 2)
    }

    /// How many chains the driver ever made available, modulo 2^16.
    pub(super) fn available_index(&self, memory: &Memory) -> Result<u16, GuestMemoryError> {
        memory.load_u16(self.available + 2)
    }

    /// The head of an available chain.
    pub(super) fn available_head(&self, memory: &Memory, index: u16) -> Result<u16, GuestMemoryError> {
        memory.load_u16(self.available + 4 + 2 * u64::from(index % self.size))
    }

    /// Whether the driver wants to be told, now that the used index went from `old` to `new`.
    pub(super) fn driver_wants_call(&self, memory: &Memory, old: u16, new: u16) -> Result<bool, GuestMemoryError> {
        if !self.event_index {
            return Ok(memory.load_u16(self.available)? & NO_NOTIFICATION == 0);
        }
        // 2.7.10: the driver wants to know when its event index is passed.
        let event = memory.load_u16(self.available + 4 + 2 * u64::from(self.size))?;
        Ok(new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old))
    }

    /// How many chains the device ever used, modulo 2^16.
    pub(super) fn used_index(&self, memory: &Memory) -> Result<u16, GuestMemoryError> {
        memory.load_u16(self.used + 2)
    }

    /// Puts an entry; the driver does not see it before [`set_used_index`](Split::set_used_index).
    pub(super) fn put_used(
        &self,
        memory: &Memory,
        index: u16,
        (head, length): (u16, u32),
    ) -> Result<(), GuestMemoryError> {
        let mut entry = [0; 8];
        entry[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        entry[4..].copy_from_slice(&length.to_le_bytes());
        memory.write(self.used + 4 + 8 * u64::from(index % self.size), &entry)
    }

    pub(super) fn set_used_index(&self, memory: &Memory, index: u16) -> Result<(), GuestMemoryError> {
        memory.store_u16(self.used + 2, index)
    }

    /// Asks for a kick when the chain `next` becomes available.
    pub(super) fn want_kick(&self, memory: &Memory, next: u16) -> Result<(), GuestMemoryError> {
        match self.event_index {
            true => memory.store_u16(self.used + 4 + 8 * u64::from(self.size), next),
            false => memory.store_u16(self.used, 0),
        }
    }

    /// Wants no kick: the ring is looked at anyway. With event indexes a passed index is enough.
    pub(super) fn want_no_kick(&self, memory: &Memory) -> Result<(), GuestMemoryError> {
        match self.event_index {
            true => Ok(()),
            false => memory.store_u16(self.used, NO_NOTIFICATION),
        }
    }
}
