//! A request to a disk, as a server hands it over.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use crate::DiskError;

/// One segment of a request's data in guest memory. It need not be a page, nor begin at one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestSegment {
    /// Guest physical address of its first byte, when the server knows it.
    pub guest_address: Option<u64>,
    /// Its length in bytes.
    pub length: u32,
}

/// What a guest asks for. Offsets and lengths are in bytes, multiples of [`SECTOR_BYTES`](crate::SECTOR_BYTES).
#[derive(Debug)]
pub enum Request {
    /// Bytes of the disk.
    Read {
        /// First byte.
        offset: u64,
        /// How many.
        length: u64,
        /// Where they go in guest memory: may be empty.
        segments: Vec<GuestSegment>,
    },
    /// New bytes: the server's own copy, which the guest cannot change any more.
    Write {
        /// First byte.
        offset: u64,
        /// The bytes.
        data: Vec<u8>,
        /// Where they came from in guest memory: may be empty.
        segments: Vec<GuestSegment>,
    },
    /// All writes completed before are durable when this one completes.
    Flush,
    /// The guest needs this range no more: it reads as zeros and its space is freed.
    Discard {
        /// First byte.
        offset: u64,
        /// How many.
        length: u64,
    },
    /// The range reads as zeros.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// How many.
        length: u64,
        /// Whether its space may be freed; else it stays reserved, so that later writes cannot run out of it.
        may_unmap: bool,
    },
}

/// Called once with a request's outcome: a read's bytes, nothing for others. From any thread; it must not block.
pub type Completion = Box<dyn FnOnce(Result<Vec<u8>, DiskError>) + Send>;

/// Who hands requests to a disk: a ring between its start and its stop, or a connection. When it goes, what it asked
/// for and has no answer is withdrawn ([`Disk::withdraw`](crate::Disk::withdraw)): it may be asked for again, and the
/// first asking must not reach the disk behind that and what followed. Clones are the same requester.
#[derive(Clone, Debug, Default)]
pub struct Requester(Arc<RwLock<bool>>);

impl Requester {
    /// Held while the disk is changed for it; none once it has withdrawn.
    pub(crate) fn working(&self) -> Option<RwLockReadGuard<'_, bool>> {
        Some(self.0.read().unwrap_or_else(PoisonError::into_inner)).filter(|has_withdrawn| !**has_withdrawn)
    }

    /// Whether both are the same.
    pub(crate) fn is(&self, other: &Requester) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn has_withdrawn(&self) -> bool {
        self.working().is_none()
    }

    /// Waits for changes that are at work, which takes no longer than the disk's own files do, and lets none begin.
    pub(crate) fn withdraw(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

/// The outcome of a request that must not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// It is done.
    Done,
    /// It would wait, and nothing of it was done: hand it to [`Disk::submit`](crate::Disk::submit).
    WouldWait,
}
