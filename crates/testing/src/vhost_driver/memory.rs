//! Where things lie in the driver's memory, and access to it.

use std::sync::atomic::AtomicU16;

use vm_memory::{Bytes, VolatileMemory};

use super::{Driver, DriverError, GUEST_BASE, RING_BYTES, SLOT_HEAD_BYTES};

impl Driver {
    /// A ring's first byte, as a guest physical address: descriptors, then at 32 KiB the available, at 48 KiB the used
    /// ring.
    pub fn ring_address(&self, queue: u16) -> u64 {
        GUEST_BASE + u64::from(queue) * RING_BYTES
    }

    /// A slot's header; the status follows 16 bytes behind.
    pub fn slot_address(&self, queue: u16, slot: u16) -> u64 {
        let slots = u64::from(self.options.ring_size / 3);
        let number = u64::from(queue) * slots + u64::from(slot);
        GUEST_BASE + u64::from(self.options.queues) * RING_BYTES + number * SLOT_HEAD_BYTES
    }

    /// A slot's buffer.
    pub fn data_address(&self, queue: u16, slot: u16) -> u64 {
        let slots = u64::from(self.options.ring_size / 3);
        let number = u64::from(queue) * slots + u64::from(slot);
        self.slot_address(self.options.queues, 0) + number * self.options.slot_bytes
    }

    /// Memory that no slot uses.
    pub fn spare_address(&self) -> u64 {
        self.data_address(self.options.queues, 0)
    }

    /// The first address behind the memory.
    pub fn end_address(&self) -> u64 {
        GUEST_BASE + self.memory.size() as u64
    }

    /// Writes into the shared memory, as the guest would.
    ///
    /// # Errors
    /// Outside it.
    pub fn put(&self, address: u64, bytes: &[u8]) -> Result<(), DriverError> {
        let offset = address.checked_sub(GUEST_BASE).ok_or(DriverError::Outside)?;
        self.memory.as_volatile_slice().write_slice(bytes, offset as usize).map_err(|_| DriverError::Outside)
    }

    /// Reads the shared memory.
    ///
    /// # Errors
    /// Outside it.
    pub fn get(&self, address: u64, into: &mut [u8]) -> Result<(), DriverError> {
        let offset = address.checked_sub(GUEST_BASE).ok_or(DriverError::Outside)?;
        self.memory.as_volatile_slice().read_slice(into, offset as usize).map_err(|_| DriverError::Outside)
    }

    pub(super) fn number(&self, address: u64) -> &AtomicU16 {
        let offset = (address - GUEST_BASE) as usize;
        self.memory.get_atomic_ref(offset).expect("a ring's counters lie in the driver's memory, aligned")
    }
}
