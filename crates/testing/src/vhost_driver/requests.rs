//! Requests on the driver's rings, as a guest makes them and as none should.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::EpollEvent;

use super::{AVAILABLE, Ask, Driver, DriverError, Finished, Ring, USED};

/// `VIRTIO_BLK_S_OK` (VIRTIO 1.2, 5.2.6).
const STATUS_OK: u8 = 0;

impl Driver {
    /// Writes a descriptor of a ring's table.
    ///
    /// # Errors
    /// Outside the memory.
    pub fn put_descriptor(
        &self,
        table: u64,
        index: u16,
        (address, length, flags, next): (u64, u32, u16, u16),
    ) -> Result<(), DriverError> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.put(table + 16 * u64::from(index), &bytes)
    }

    /// Makes a chain available and kicks, whatever the chain is.
    ///
    /// # Errors
    /// The kick failed.
    pub fn offer(&mut self, queue: u16, head: u16) -> Result<(), DriverError> {
        self.offer_quietly(queue, head)?;
        self.kick(queue)
    }

    fn offer_quietly(&mut self, queue: u16, head: u16) -> Result<(), DriverError> {
        let base = self.ring_address(queue) + AVAILABLE;
        let size = self.options.ring_size;
        let available = self.rings[usize::from(queue)].available;
        self.put(base + 4 + 2 * u64::from(available % size), &head.to_le_bytes())?;
        self.rings[usize::from(queue)].available = available.wrapping_add(1);
        self.number(base + 2).store(available.wrapping_add(1), Ordering::Release);
        Ok(())
    }

    /// Kicks a ring unless the device wants none.
    ///
    /// # Errors
    /// The descriptor failed.
    pub fn kick(&mut self, queue: u16) -> Result<(), DriverError> {
        fence(Ordering::SeqCst);
        let used = self.ring_address(queue) + USED;
        let event = self.number(used + 4 + 8 * u64::from(self.options.ring_size)).load(Ordering::Acquire);
        let wants_none = self.number(used).load(Ordering::Acquire) & 1 != 0;
        let ring = &mut self.rings[usize::from(queue)];
        let old = std::mem::replace(&mut ring.asked_at, ring.available);
        let passed = ring.available.wrapping_sub(event).wrapping_sub(1) < ring.available.wrapping_sub(old);
        if if self.options.event_index { passed } else { !wants_none } {
            ring.kick.write(1)?;
        }
        Ok(())
    }

    /// Kicks a ring whether the device wants it or not.
    ///
    /// # Errors
    /// The descriptor failed.
    pub fn kick_anyway(&mut self, queue: u16) -> Result<(), DriverError> {
        Ok(self.rings[usize::from(queue)].kick.write(1)?)
    }

    /// Puts a request on a ring without a kick. None when all slots are taken.
    ///
    /// # Errors
    /// The request is longer than a slot's buffer.
    pub fn submit(&mut self, queue: u16, ask: Ask<'_>) -> Result<Option<u16>, DriverError> {
        let Some(slot) = self.rings[usize::from(queue)].free.pop() else { return Ok(None) };
        let data = self.data_address(queue, slot);
        let (kind, sector, length, from_guest) = match ask {
            Ask::Read { sector, length } => (0_u32, sector, length, false),
            Ask::Write { sector, data: bytes } => {
                self.check_length(bytes.len() as u64)?;
                self.put(data, bytes)?;
                (1, sector, bytes.len() as u32, true)
            }
            Ask::Flush => (4, 0, 0, true),
            Ask::Identify => (8, 0, 20, false),
            Ask::Discard { sector, sectors } => (11, 0, self.put_range(data, sector, sectors, 0)?, true),
            Ask::WriteZeroes { sector, sectors, may_unmap } => {
                (13, 0, self.put_range(data, sector, sectors, u32::from(may_unmap))?, true)
            }
        };
        self.check_length(u64::from(length))?;
        let mut header = [0; 17];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..16].copy_from_slice(&sector.to_le_bytes());
        header[16] = 0xff;
        let head = self.slot_address(queue, slot);
        self.put(head, &header)?;
        let (table, first) = (self.ring_address(queue), 3 * slot);
        let after_header = if length > 0 { first + 1 } else { first + 2 };
        self.put_descriptor(table, first, (head, 16, 1, after_header))?;
        let direction = if from_guest { 0 } else { 2 };
        self.put_descriptor(table, first + 1, (data, length, 1 | direction, first + 2))?;
        self.put_descriptor(table, first + 2, (head + 16, 1, 2, 0))?;
        self.offer_quietly(queue, first)?;
        Ok(Some(slot))
    }

    fn check_length(&self, length: u64) -> Result<(), DriverError> {
        if length > self.options.slot_bytes { Err(DriverError::Outside) } else { Ok(()) }
    }

    fn put_range(&self, at: u64, sector: u64, sectors: u32, flags: u32) -> Result<u32, DriverError> {
        let mut range = [0; 16];
        range[..8].copy_from_slice(&sector.to_le_bytes());
        range[8..12].copy_from_slice(&sectors.to_le_bytes());
        range[12..].copy_from_slice(&flags.to_le_bytes());
        self.put(at, &range)?;
        Ok(range.len() as u32)
    }

    /// A request that ended, if one did.
    ///
    /// # Errors
    /// The device names a chain that is none.
    pub fn finished(&mut self, queue: u16) -> Result<Option<Finished>, DriverError> {
        let used = self.ring_address(queue) + USED;
        let size = u64::from(self.options.ring_size);
        let next = self.rings[usize::from(queue)].used;
        if self.number(used + 2).load(Ordering::Acquire) == next {
            return Ok(None);
        }
        let mut entry = [0; 8];
        self.get(used + 4 + 8 * (u64::from(next) % size), &mut entry)?;
        let [h0, h1, h2, h3, length @ ..] = entry;
        let slot = (u32::from_le_bytes([h0, h1, h2, h3]) / 3) as u16;
        let mut status = [0];
        self.get(self.slot_address(queue, slot) + 16, &mut status)?;
        let ring = &mut self.rings[usize::from(queue)];
        ring.used = next.wrapping_add(1);
        ring.free.push(slot);
        // The event index: call for the next one.
        let event = self.ring_address(queue) + AVAILABLE + 4 + 2 * size;
        self.number(event).store(next.wrapping_add(1), Ordering::SeqCst);
        Ok(Some(Finished { slot, status: status[0], length: u32::from_le_bytes(length) }))
    }

    /// Waits for a call of the device and gives the next request that ended.
    ///
    /// # Errors
    /// None ended in time.
    pub fn wait(&mut self, queue: u16, timeout: Duration) -> Result<Finished, DriverError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(finished) = self.finished(queue)? {
                return Ok(finished);
            }
            let left = deadline.checked_duration_since(Instant::now()).ok_or(DriverError::Timeout(timeout))?;
            let Ring { call, called, .. } = &self.rings[usize::from(queue)];
            called.wait(left.as_millis() as i32 + 1, &mut [EpollEvent::default()])?;
            // Nothing to read is fine: the time was up.
            let _ = call.read();
        }
    }

    /// Whether the device calls within this time.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn is_called(&self, queue: u16, timeout: Duration) -> Result<bool, DriverError> {
        let called = &self.rings[usize::from(queue)].called;
        Ok(called.wait(timeout.as_millis() as i32, &mut [EpollEvent::default()])? > 0)
    }

    /// Whether the device told that the ring is broken.
    pub fn is_broken(&self, queue: u16) -> bool {
        self.rings[usize::from(queue)].error.read().is_ok()
    }

    /// Does one request and waits for it.
    ///
    /// # Errors
    /// No answer came in time, or no slot is free.
    pub fn request(&mut self, queue: u16, ask: Ask<'_>, timeout: Duration) -> Result<Finished, DriverError> {
        self.submit(queue, ask)?.ok_or(DriverError::Outside)?;
        self.kick(queue)?;
        self.wait(queue, timeout)
    }

    /// Whether a request succeeded.
    pub fn succeeded(finished: &Finished) -> bool {
        finished.status == STATUS_OK
    }
}
