//! The guest's memory, as the front end shares it: a few files, each a run of guest physical addresses.
//!
//! Every address in a request comes from the guest. All access goes through here and is checked against the regions;
//! every write is marked in the [`DirtyLog`].

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap,
};

use super::dirty::{DirtyLog, RegionLog};

/// Regions that a front end may share. QEMU offers one for each run of RAM; hot-plugged memory adds some.
pub(super) const REGIONS_MAX: usize = 64;

/// Why guest memory could not be taken over.
#[derive(Debug, thiserror::Error)]
pub(super) enum MemoryError {
    #[error("a region of guest memory cannot be mapped: {0}")]
    Map(#[from] vm_memory::mmap::MmapRegionError),
    #[error("a region of guest memory ends behind the last address")]
    Wraps,
    #[error("more than {REGIONS_MAX} regions of guest memory")]
    TooMany,
    #[error("regions of guest memory overlap: {0}")]
    Overlap(vm_memory::GuestRegionCollectionError),
    #[error("no such region of guest memory")]
    Unknown,
}

/// A run of guest memory bytes that one descriptor names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Guest physical address.
    pub(super) address: u64,
    /// Bytes: never none.
    pub(super) length: u32,
}

/// Where a region lies in the front end's own address space: ring addresses come in it.
#[derive(Clone, Copy, Debug)]
struct Span {
    user: u64,
    guest: u64,
    size_bytes: u64,
}

/// All of it, at one moment. A change makes a new value; requests under way keep the old one's mappings alive.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    regions: GuestMemoryMmap<RegionLog>,
    spans: Vec<Span>,
}

impl Memory {
    /// Maps regions as `SET_MEM_TABLE` tells them.
    pub(super) fn map(
        table: &[VhostUserMemoryRegion],
        files: Vec<File>,
        log: &Arc<DirtyLog>,
    ) -> Result<Memory, MemoryError> {
        let mut memory = Memory::default();
        for (region, file) in table.iter().zip(files) {
            memory = memory.with(region, file, log)?;
        }
        Ok(memory)
    }

    /// This memory and one region more.
    pub(super) fn with(
        &self,
        region: &VhostUserMemoryRegion,
        file: File,
        log: &Arc<DirtyLog>,
    ) -> Result<Memory, MemoryError> {
        if self.spans.len() == REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        let mapping = MmapRegionBuilder::new_with_bitmap(
            region.memory_size as usize,
            RegionLog::new(log.clone(), region.guest_phys_addr),
        )
        .with_file_offset(FileOffset::new(file, region.mmap_offset))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
        .build()?;
        region.user_addr.checked_add(region.memory_size).ok_or(MemoryError::Wraps)?;
        let mapped = GuestRegionMmap::new(mapping, GuestAddress(region.guest_phys_addr)).ok_or(MemoryError::Wraps)?;
        let regions = self.regions.insert_region(Arc::new(mapped)).map_err(MemoryError::Overlap)?;
        let mut spans = self.spans.clone();
        spans.push(Span { user: region.user_addr, guest: region.guest_phys_addr, size_bytes: region.memory_size });
        Ok(Memory { regions, spans })
    }

    /// This memory without a region.
    pub(super) fn without(&self, region: &VhostUserMemoryRegion) -> Result<Memory, MemoryError> {
        let (regions, _) = self
            .regions
            .remove_region(GuestAddress(region.guest_phys_addr), region.memory_size)
            .map_err(|_| MemoryError::Unknown)?;
        let mut spans = self.spans.clone();
        spans.retain(|span| span.guest != region.guest_phys_addr);
        Ok(Memory { regions, spans })
    }

    /// The guest physical address of one in the front end's address space.
    pub(super) fn guest_address(&self, user: u64) -> Option<u64> {
        self.spans
            .iter()
            .find(|span| (span.user..span.user + span.size_bytes).contains(&user))
            .map(|span| user - span.user + span.guest)
    }

    /// Whether all bytes of a run are guest memory.
    pub(super) fn contains(&self, address: u64, length: u64) -> bool {
        let within_one = self
            .regions
            .find_region(GuestAddress(address))
            .is_some_and(|region| length <= region.len() - (address - region.start_addr().0));
        within_one
            || usize::try_from(length).is_ok_and(|length| self.regions.check_range(GuestAddress(address), length))
    }

    pub(super) fn read(&self, address: u64, into: &mut [u8]) -> Result<(), GuestMemoryError> {
        self.regions.read_slice(into, GuestAddress(address))
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestMemoryError> {
        self.regions.write_slice(bytes, GuestAddress(address))
    }

    /// Reads a number that the guest may write at the same time; what it wrote before is seen after.
    pub(super) fn load_u16(&self, address: u64) -> Result<u16, GuestMemoryError> {
        self.regions.load::<u16>(GuestAddress(address), Ordering::Acquire).map(u16::from_le)
    }

    /// Writes a number that the guest may read at the same time; it sees what was written before.
    pub(super) fn store_u16(&self, address: u64, value: u16) -> Result<(), GuestMemoryError> {
        self.regions.store(value.to_le(), GuestAddress(address), Ordering::Release)
    }

    /// Copies the guest's bytes, segment after segment.
    pub(super) fn gather(&self, segments: &[Segment], mut into: &mut [u8]) -> Result<(), GuestMemoryError> {
        for segment in segments {
            let (bytes, rest) = into.split_at_mut(into.len().min(segment.length as usize));
            self.read(segment.address, bytes)?;
            into = rest;
        }
        Ok(())
    }

    /// Copies bytes to the guest, segment after segment.
    pub(super) fn scatter(&self, segments: &[Segment], mut bytes: &[u8]) -> Result<(), GuestMemoryError> {
        for segment in segments {
            let (part, rest) = bytes.split_at(bytes.len().min(segment.length as usize));
            self.write(segment.address, part)?;
            bytes = rest;
        }
        Ok(())
    }
}
