//! Which pages of guest memory this back end wrote while a machine migrates.
//!
//! QEMU sees what its guest writes, not what another process does. So it hands over a bitmap (one bit a page of 4096
//! bytes, by guest physical address) and asks for every write to be marked (`VHOST_F_LOG_ALL`;
//! docs/interop/vhost-user.rst, "Migration"). A write is marked after it was made: QEMU clears a bit before it sends
//! the page.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};
use vm_memory::mmap::MmapRegionError;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// The page of the bitmap: fixed by the protocol (`VHOST_LOG_PAGE`).
const LOG_PAGE_BYTES: u64 = 4096;

/// The bitmap, while there is one. Shared by all regions of guest memory, also by those of requests under way.
#[derive(Debug)]
pub(super) struct DirtyLog {
    /// Whether writes are marked now: asked on each write, so it costs no lock when there is no migration.
    enabled: AtomicBool,
    /// Never marks: only the proof that marking is needed sets this.
    blind: bool,
    bits: RwLock<Option<MmapRegion<()>>>,
    /// Writes to pages beyond the bitmap's end.
    missed: AtomicU64,
}

impl DirtyLog {
    pub(super) fn new(blind: bool) -> DirtyLog {
        DirtyLog { enabled: AtomicBool::new(false), blind, bits: RwLock::new(None), missed: AtomicU64::new(0) }
    }

    /// Takes the front end's bitmap.
    pub(super) fn set(&self, file: File, offset: u64, size_bytes: usize) -> Result<(), MmapRegionError> {
        let mapping = MmapRegion::from_file(FileOffset::new(file, offset), size_bytes)?;
        *self.bits.write().unwrap_or_else(PoisonError::into_inner) = Some(mapping);
        Ok(())
    }

    /// Starts or ends marking.
    pub(super) fn enable(&self, enabled: bool) {
        self.enabled.store(enabled && !self.blind, Ordering::SeqCst);
    }

    /// Forgets the bitmap: the front end that owns it has gone.
    pub(super) fn clear(&self) {
        self.enable(false);
        *self.bits.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn mark(&self, address: u64, length: usize) {
        if length == 0 || !self.enabled.load(Ordering::SeqCst) {
            return;
        }
        let bits = self.bits.read().unwrap_or_else(PoisonError::into_inner);
        let Some(bits) = bits.as_ref() else { return };
        let last = address.saturating_add(length as u64 - 1);
        for page in address / LOG_PAGE_BYTES..=last / LOG_PAGE_BYTES {
            match bits.get_atomic_ref::<AtomicU8>((page / 8) as usize) {
                Ok(byte) => drop(byte.fetch_or(1 << (page % 8), Ordering::SeqCst)),
                Err(_) => drop(self.missed.fetch_add(1, Ordering::Relaxed)),
            }
        }
    }

    fn is_marked(&self, address: u64) -> bool {
        let bits = self.bits.read().unwrap_or_else(PoisonError::into_inner);
        let page = address / LOG_PAGE_BYTES;
        let byte = bits.as_ref().and_then(|bits| {
            bits.get_atomic_ref::<AtomicU8>((page / 8) as usize).ok().map(|byte| byte.load(Ordering::SeqCst))
        });
        byte.is_some_and(|byte| byte & (1 << (page % 8)) != 0)
    }
}

/// A region's part of the log: all writes into the region pass here.
#[derive(Clone, Debug)]
pub(super) struct RegionLog {
    log: Arc<DirtyLog>,
    guest_base: u64,
}

impl RegionLog {
    pub(super) fn new(log: Arc<DirtyLog>, guest_base: u64) -> RegionLog {
        RegionLog { log, guest_base }
    }
}

impl<'a> WithBitmapSlice<'a> for RegionLog {
    type S = LogSlice<'a>;
}

impl Bitmap for RegionLog {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.log.mark(self.guest_base + offset as u64, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.log.is_marked(self.guest_base + offset as u64)
    }

    fn slice_at(&self, offset: usize) -> LogSlice<'_> {
        LogSlice { log: &self.log, guest_base: self.guest_base + offset as u64 }
    }
}

/// The log of a part of a region. Borrowed, so that an access of a few bytes touches no reference count.
#[derive(Clone, Debug)]
pub(super) struct LogSlice<'a> {
    log: &'a DirtyLog,
    guest_base: u64,
}

impl<'a> WithBitmapSlice<'_> for LogSlice<'a> {
    type S = LogSlice<'a>;
}

impl BitmapSlice for LogSlice<'_> {}

impl<'a> Bitmap for LogSlice<'a> {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.log.mark(self.guest_base + offset as u64, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.log.is_marked(self.guest_base + offset as u64)
    }

    fn slice_at(&self, offset: usize) -> LogSlice<'a> {
        LogSlice { log: self.log, guest_base: self.guest_base + offset as u64 }
    }
}
