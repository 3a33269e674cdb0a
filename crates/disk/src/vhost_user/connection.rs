//! One front end's messages (docs/interop/vhost-user.rst), turned into what rings need.
//!
//! The protocol's codec is the crate `vhost`; what the messages mean is here. A message that fails ends the connection:
//! the front end connects again and begins anew, which is the one recovery that QEMU has.

use std::fs::File;
use std::sync::Arc;

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use super::Shared;
use super::config::{self, FEATURES, feature};
use super::dirty::DirtyLog;
use super::drain::StopReason;
use super::inflight::InflightArea;
use super::memory::{Memory, REGIONS_MAX};
use super::ring::{Addresses, Ring};
use super::split::RING_SIZE_MAX;

/// What of the protocol is spoken here beyond its first version.
const PROTOCOL_FEATURES: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::LOG_SHMFD)
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);

/// What a front end said so far.
pub(super) struct Connection {
    backend: Arc<Shared>,
    features: u64,
    memory: Arc<Memory>,
    log: Arc<DirtyLog>,
    inflight: Option<Arc<InflightArea>>,
}

/// A failure, told in the log: the protocol has no place for its reason.
fn refuse(what: &str, error: impl std::fmt::Display) -> Error {
    tracing::warn!(%error, "{what}");
    Error::BackendInternalError
}

impl Connection {
    pub(super) fn new(backend: Arc<Shared>) -> Connection {
        let log = Arc::new(DirtyLog::new(!backend.log_dirty));
        Connection { backend, features: 0, memory: Arc::default(), log, inflight: None }
    }

    fn ring(&self, index: u32) -> Result<&Arc<Ring>> {
        self.backend.rings.get(index as usize).ok_or(Error::InvalidParam)
    }

    /// Starts a ring that has all it needs. The first one takes the disk.
    fn start_if_ready(&self, ring: &Arc<Ring>) -> Result<()> {
        if !ring.wants_to_start() {
            return Ok(());
        }
        let disk = self.backend.attach().map_err(|error| refuse("the disk cannot be attached", error))?;
        self.backend.drain.forget();
        let started = ring.start(self.memory.clone(), self.features, self.inflight.as_ref(), disk);
        started.map_err(|error| {
            let _ = self.backend.detach_if_idle();
            refuse("a ring cannot start", error)
        })
    }

    /// Every ring goes on in a new table of guest memory.
    fn take_memory(&mut self, memory: Memory) -> Result<()> {
        self.memory = Arc::new(memory);
        for ring in &self.backend.rings {
            ring.set_memory(&self.memory).map_err(|error| refuse("a ring lies outside the new memory", error))?;
        }
        Ok(())
    }
}

impl Drop for Connection {
    /// The front end has gone: its rings stop, and the disk is free for others.
    fn drop(&mut self) {
        if let Err(error) = self.backend.stop_rings(StopReason::Disconnected) {
            tracing::error!(%error, "the disk was not closed cleanly");
        }
        self.log.clear();
    }
}

impl VhostUserBackendReqHandlerMut for Connection {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.features = 0;
        self.backend.stop_rings(StopReason::Requested).map_err(|error| refuse("the disk was not closed cleanly", error))
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(FEATURES)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !FEATURES != 0 {
            return Err(Error::FeatureMismatch);
        }
        self.features = features;
        self.log.enable(features & feature::LOG_ALL != 0);
        if features & feature::PROTOCOL_FEATURES == 0 {
            // Without the message that enables rings, they all are.
            self.backend.rings.iter().for_each(|ring| ring.enable(true));
        }
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(PROTOCOL_FEATURES)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        if features & !PROTOCOL_FEATURES.bits() != 0 {
            return Err(Error::FeatureMismatch);
        }
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.backend.rings.len() as u64)
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let geometry =
            self.backend.attachment.geometry().map_err(|error| refuse("the disk's size is not known", error))?;
        let space = config::space(geometry.size_bytes, self.backend.rings.len() as u16);
        let end = offset.checked_add(size).ok_or(Error::InvalidParam)?;
        space.get(offset as usize..end as usize).map(<[u8]>::to_vec).ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, _offset: u32, _buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        // Nothing that is offered is for the driver to write.
        Err(Error::InvalidParam)
    }

    fn set_mem_table(
        &mut self,
        ctx: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let memory = Memory::map(ctx, files, &self.log).map_err(|error| refuse("guest memory is refused", error))?;
        self.take_memory(memory).map(|()| None)
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<u64>> {
        let memory =
            self.memory.with(region, fd, &self.log).map_err(|error| refuse("guest memory is refused", error))?;
        self.take_memory(memory).map(|()| None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let memory = self.memory.without(region).map_err(|error| refuse("guest memory is refused", error))?;
        self.take_memory(memory)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).ok().filter(|size| *size <= RING_SIZE_MAX && size.is_power_of_two());
        let ring = self.ring(index)?;
        if ring.is_running() {
            return Err(Error::InvalidOperation("a running ring keeps its size"));
        }
        ring.set_size(size.ok_or(Error::InvalidParam)?);
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        // The address for logging the used ring is the used ring's own: it is marked as all of guest memory is.
        let addresses = Addresses { descriptors: descriptor, available, used };
        self.ring(index)?
            .set_addresses(addresses, &self.memory)
            .map_err(|error| refuse("a ring's addresses are refused", error))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let ring = self.ring(index)?;
        if ring.is_running() {
            return Err(Error::InvalidOperation("a running ring keeps its place"));
        }
        ring.set_base(u16::try_from(base).map_err(|_| Error::InvalidParam)?);
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let ring = self.ring(index)?;
        // While a machine moves its memory is marked. What is in flight does not move with it.
        let reason = if self.features & feature::LOG_ALL != 0 { StopReason::Migrated } else { StopReason::Requested };
        let base = self.backend.drain.during(reason, |deadline| ring.stop(reason, deadline));
        // The last ring's stop gives the disk away: all that was answered is in its files then.
        self.backend.detach_if_idle().map_err(|error| refuse("the disk was not closed cleanly", error))?;
        Ok(VhostUserVringState::new(index, u32::from(base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let ring = self.ring(u32::from(index))?;
        if ring.is_running() {
            return Err(Error::InvalidOperation("a running ring keeps its kick descriptor"));
        }
        // Without a descriptor the ring would have to be polled, which nobody asks of a disk.
        ring.set_kick(Some(fd.ok_or(Error::InvalidParam)?));
        self.start_if_ready(ring)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(u32::from(index))?.set_call(fd);
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(u32::from(index))?.set_error(fd);
        Ok(())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let ring = self.ring(index)?;
        ring.enable(enable);
        self.start_if_ready(ring)
    }

    fn get_inflight_fd(&mut self, inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, queue_size) = (inflight.num_queues, inflight.queue_size);
        if usize::from(queues) > self.backend.rings.len() || queue_size > RING_SIZE_MAX {
            return Err(Error::InvalidParam);
        }
        let (file, size_bytes) = InflightArea::create(queues, queue_size)
            .map_err(|error| refuse("no area for requests in flight", error))?;
        Ok((VhostUserInflight::new(size_bytes, 0, queues, queue_size), file))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let shape = (inflight.num_queues, inflight.queue_size);
        let area = InflightArea::map(file, inflight.mmap_offset, inflight.mmap_size, shape)
            .map_err(|error| refuse("the area of requests in flight is refused", error))?;
        self.inflight = Some(Arc::new(area));
        Ok(())
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let size_bytes = usize::try_from(log.mmap_size).map_err(|_| Error::InvalidParam)?;
        self.log.set(file, log.mmap_offset, size_bytes).map_err(|error| refuse("the dirty log is refused", error))
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("a disk has no display"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("a disk shares no objects"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("a disk shares no memory"))
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("a disk has no state but its rings'"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("a disk has no state but its rings'"))
    }
}
