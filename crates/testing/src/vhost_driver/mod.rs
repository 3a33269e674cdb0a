//! A virtio-blk driver without a guest: the other end of a vhost-user-blk back end, which it knows by the protocol
//! alone.
//!
//! It is a front end and a guest's driver at once: it shares a piece of its own memory, keeps the rings in it and does
//! requests. Everything that a well-behaved guest would not do can be done through [`Driver::put`] and
//! [`Driver::offer`].
//!
//! ```text
//!  memory:  ring 0 | ring 1 | ... | slots of ring 0: a header, a status, data | slots of ring 1 | ... | free
//! ```
//! A slot is three descriptors (header, data, status) and its own buffer; a ring has a third of its size in slots.

mod memory;
mod requests;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// `VHOST_F_LOG_ALL` (linux/vhost.h): the device marks its writes into memory.
const LOG_ALL: u64 = 1 << 26;
/// `VIRTIO_F_EVENT_IDX`: both sides say up to where they need no notification.
const FLUSH: u64 = 1 << 9;
const EVENT_INDEX: u64 = 1 << 29;
/// All that a driver asks for (VIRTIO 1.2, 5.2.3 and 6). A back end that offers less refuses.
const FEATURES: u64 = (1 << 1) // SIZE_MAX
    | (1 << 2) // SEG_MAX
    | (1 << 6) // BLK_SIZE
    | FLUSH
    | (1 << 10) // TOPOLOGY
    | (1 << 12) // MQ
    | (1 << 13) // DISCARD
    | (1 << 14) // WRITE_ZEROES
    | LOG_ALL
    | (1 << 28) // INDIRECT_DESC
    | EVENT_INDEX
    | (1 << 30) // VHOST_USER_F_PROTOCOL_FEATURES
    | (1 << 32); // VERSION_1

/// Where the shared memory begins for the "guest".
pub const GUEST_BASE: u64 = 0x4000_0000;
/// Where it begins in the front end's address space, as far as the back end is told: ring addresses come in it.
const USER_BASE: u64 = 0x7f00_0000_0000;
/// Room for a ring's three parts at the largest size.
const RING_BYTES: u64 = 64 << 10;
/// Where in it the parts lie.
const AVAILABLE: u64 = 32 << 10;
const USED: u64 = 48 << 10;
/// A slot's header, 16 bytes, and behind it the status.
const SLOT_HEAD_BYTES: u64 = 32;

/// What went wrong with a driver.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum DriverError {
    #[error("the back end: {0}")]
    Backend(#[from] vhost::Error),
    #[error("a driver's memory or descriptors: {0}")]
    Io(#[from] std::io::Error),
    #[error("a driver's memory: {0}")]
    Map(#[from] vm_memory::mmap::MmapRegionError),
    #[error("outside the driver's memory")]
    Outside,
    #[error("no answer within {0:?}")]
    Timeout(Duration),
}

/// What a driver is.
#[derive(Clone, Copy, Debug)]
pub struct DriverOptions {
    /// Rings.
    pub queues: u16,
    /// Descriptors of each: a power of two.
    pub ring_size: u16,
    /// The longest request's data.
    pub slot_bytes: u64,
    /// Memory for nothing but tests' own buffers.
    pub spare_bytes: u64,
    /// Whether both sides say up to where they need no notification.
    pub event_index: bool,
    /// Whether requests under way are kept in an area that outlives the back end.
    pub track_in_flight: bool,
    /// Whether it knows flush.
    pub flushes: bool,
}

impl Default for DriverOptions {
    fn default() -> DriverOptions {
        DriverOptions {
            queues: 1,
            ring_size: 128,
            slot_bytes: 64 << 10,
            spare_bytes: 1 << 20,
            event_index: true,
            track_in_flight: true,
            flushes: true,
        }
    }
}

/// A request of the driver.
#[derive(Clone, Copy, Debug)]
pub enum Ask<'a> {
    /// Sectors into the slot's buffer.
    Read {
        /// The first.
        sector: u64,
        /// In bytes.
        length: u32,
    },
    /// Sectors from here.
    Write {
        /// The first.
        sector: u64,
        /// The bytes.
        data: &'a [u8],
    },
    /// All done before is durable.
    Flush,
    /// Frees sectors.
    Discard {
        /// The first.
        sector: u64,
        /// How many.
        sectors: u32,
    },
    /// Makes sectors zeros.
    WriteZeroes {
        /// The first.
        sector: u64,
        /// How many.
        sectors: u32,
        /// Whether their space may be freed.
        may_unmap: bool,
    },
    /// The serial number into the slot's buffer.
    Identify,
}

/// A request that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The slot that [`Driver::submit`] gave; also the chain's head divided by three.
    pub slot: u16,
    /// 0 is success.
    pub status: u8,
    /// Bytes that the device says it wrote.
    pub length: u32,
}

struct Ring {
    kick: EventFd,
    call: EventFd,
    error: EventFd,
    /// Waits for `call`.
    called: Epoll,
    available: u16,
    /// The available index when the device's wish was last asked.
    asked_at: u16,
    used: u16,
    free: Vec<u16>,
}

fn waiting_for(call: &EventFd) -> std::io::Result<Epoll> {
    let called = Epoll::new()?;
    called.ctl(ControlOperation::Add, call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0))?;
    Ok(called)
}

/// The driver.
pub struct Driver {
    options: DriverOptions,
    front_end: Frontend,
    memory: MmapRegion<()>,
    file: File,
    rings: Vec<Ring>,
    in_flight: Option<(VhostUserInflight, File)>,
    log: Option<(MmapRegion<()>, File)>,
}

impl Driver {
    /// Connects to a back end and negotiates; no ring runs yet.
    ///
    /// # Errors
    /// The back end is not there, or refuses.
    pub fn connect(socket: &Path, options: DriverOptions) -> Result<Driver, DriverError> {
        let slots = u64::from(options.ring_size / 3);
        let size = u64::from(options.queues) * (RING_BYTES + slots * (SLOT_HEAD_BYTES + options.slot_bytes))
            + options.spare_bytes;
        let file = File::from(rustix::fs::memfd_create("driver", rustix::fs::MemfdFlags::CLOEXEC).map_err(io)?);
        file.set_len(size.next_multiple_of(4096))?;
        let memory = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), file.metadata()?.len() as usize)?;
        let flags = EFD_NONBLOCK | EFD_CLOEXEC;
        let rings = (0..options.queues)
            .map(|_| {
                let call = EventFd::new(flags)?;
                Ok(Ring {
                    kick: EventFd::new(flags)?,
                    called: waiting_for(&call)?,
                    call,
                    error: EventFd::new(flags)?,
                    available: 0,
                    asked_at: 0,
                    used: 0,
                    free: (0..options.ring_size / 3).collect(),
                })
            })
            .collect::<std::io::Result<_>>()?;
        let front_end = Frontend::connect(socket, u64::from(options.queues))?;
        let mut driver = Driver { options, front_end, memory, file, rings, in_flight: None, log: None };
        driver.negotiate(false)?;
        if options.track_in_flight {
            let ask = VhostUserInflight::new(0, 0, options.queues, options.ring_size);
            driver.in_flight = Some(driver.front_end.get_inflight_fd(&ask)?);
        }
        driver.share()?;
        Ok(driver)
    }

    /// Connects to another back end, or to the same one after its death, with the same memory and rings.
    ///
    /// # Errors
    /// The back end is not there, or refuses.
    pub fn reconnect(&mut self, socket: &Path) -> Result<(), DriverError> {
        self.front_end = Frontend::connect(socket, u64::from(self.options.queues))?;
        self.negotiate(self.log.is_some())?;
        self.share()
    }

    fn features(&self, log: bool) -> u64 {
        let chosen = [(EVENT_INDEX, self.options.event_index), (FLUSH, self.options.flushes), (LOG_ALL, log)];
        let left_out = chosen.into_iter().filter(|(_, is_wanted)| !is_wanted);
        left_out.fold(FEATURES, |features, (feature, _)| features & !feature)
    }

    fn negotiate(&mut self, log: bool) -> Result<(), DriverError> {
        self.front_end.set_owner()?;
        self.front_end.get_features()?;
        self.front_end.set_features(self.features(log))?;
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        let offered = self.front_end.get_protocol_features()?;
        self.front_end.set_protocol_features(offered & wanted)?;
        // Each message is answered: a refusal is seen where it happens.
        self.front_end.set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::NEED_REPLY);
        Ok(())
    }

    fn share(&mut self) -> Result<(), DriverError> {
        if let Some((area, file)) = &self.in_flight {
            self.front_end.set_inflight_fd(area, file.as_raw_fd())?;
        }
        self.front_end.set_mem_table(&[VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST_BASE,
            memory_size: self.memory.size() as u64,
            userspace_addr: USER_BASE,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }])?;
        Ok(())
    }

    /// Shares the memory again, as a front end does when its machine's memory changed; running rings go on.
    ///
    /// # Errors
    /// The back end refuses.
    pub fn share_again(&mut self) -> Result<(), DriverError> {
        self.share()
    }

    /// Starts a ring where it stands: after a death with what is in flight, else where it stopped.
    ///
    /// # Errors
    /// The back end refuses.
    pub fn start(&mut self, queue: u16) -> Result<(), DriverError> {
        let base = self.rings[usize::from(queue)].used;
        self.start_at(queue, base)
    }

    /// Starts a ring at an index of the available ring.
    ///
    /// # Errors
    /// The back end refuses.
    pub fn start_at(&mut self, queue: u16, base: u16) -> Result<(), DriverError> {
        let ring = &self.rings[usize::from(queue)];
        let index = usize::from(queue);
        self.front_end.set_vring_num(index, self.options.ring_size)?;
        self.front_end.set_vring_base(index, base)?;
        self.front_end.set_vring_addr(index, &self.addresses(queue))?;
        self.front_end.set_vring_call(index, &ring.call)?;
        self.front_end.set_vring_err(index, &ring.error)?;
        self.front_end.set_vring_kick(index, &ring.kick)?;
        self.front_end.set_vring_enable(index, true)?;
        Ok(())
    }

    /// Has the device call at another descriptor from now on; what it has told at the one before is lost.
    ///
    /// # Errors
    /// The back end refuses.
    pub fn move_call(&mut self, queue: u16) -> Result<(), DriverError> {
        let ring = &mut self.rings[usize::from(queue)];
        ring.call = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        ring.called = waiting_for(&ring.call)?;
        Ok(self.front_end.set_vring_call(usize::from(queue), &ring.call)?)
    }

    fn addresses(&self, queue: u16) -> VringConfigData {
        let user = self.ring_address(queue) - GUEST_BASE + USER_BASE;
        VringConfigData {
            queue_max_size: self.options.ring_size,
            queue_size: self.options.ring_size,
            flags: 0,
            desc_table_addr: user,
            used_ring_addr: user + USED,
            avail_ring_addr: user + AVAILABLE,
            log_addr: None,
        }
    }

    /// Stops a ring; gives the index at which it goes on.
    ///
    /// # Errors
    /// The back end has gone.
    pub fn stop(&mut self, queue: u16) -> Result<u16, DriverError> {
        Ok(self.front_end.get_vring_base(usize::from(queue))? as u16)
    }

    /// The device's configuration space, from its beginning.
    ///
    /// # Errors
    /// The back end refuses.
    pub fn config(&mut self, bytes: u32) -> Result<Vec<u8>, DriverError> {
        let room = vec![0; bytes as usize];
        Ok(self.front_end.get_config(0, bytes, VhostUserConfigFlags::WRITABLE, &room)?.1)
    }

    /// The area of requests in flight, as the back end has made it, and its size in bytes; none when they are not
    /// tracked.
    pub fn in_flight(&self) -> Option<(&File, u64)> {
        self.in_flight.as_ref().map(|(area, file)| (file, area.mmap_size))
    }

    /// Begins to log which pages the device writes.
    ///
    /// # Errors
    /// The back end refuses.
    pub fn log(&mut self) -> Result<(), DriverError> {
        let bits = (GUEST_BASE + self.memory.size() as u64).div_ceil(4096).div_ceil(8);
        let file = File::from(rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).map_err(io)?);
        file.set_len(bits)?;
        let mapping = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), bits as usize)?;
        let region = VhostUserDirtyLogRegion { mmap_size: bits, mmap_offset: 0, mmap_handle: file.as_raw_fd() };
        self.front_end.set_log_base(0, Some(region))?;
        self.front_end.set_features(self.features(true))?;
        for queue in 0..self.options.queues {
            self.front_end.set_vring_addr(usize::from(queue), &self.addresses(queue))?;
        }
        self.log = Some((mapping, file));
        Ok(())
    }

    /// Guest physical addresses of the pages that are marked.
    pub fn logged_pages(&self) -> Vec<u64> {
        let Some((bits, _)) = &self.log else { return Vec::new() };
        let slice = bits.as_volatile_slice();
        let is_marked = |page: &u64| {
            slice.load::<u8>((page / 8) as usize, Ordering::Acquire).is_ok_and(|byte| byte & (1 << (page % 8)) != 0)
        };
        (0..bits.size() as u64 * 8).filter(is_marked).map(|page| page * 4096).collect()
    }
}

fn io(error: rustix::io::Errno) -> DriverError {
    DriverError::Io(error.into())
}
