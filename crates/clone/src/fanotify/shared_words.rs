//! Memory that several processes share, in words that change atomically. It lives as long as a descriptor of it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::CloneError;

const WORD_BYTES: usize = size_of::<u64>();

/// Words in a memory file (memfd_create(2)).
#[derive(Debug)]
pub(crate) struct SharedWords {
    descriptor: OwnedFd,
    words: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the words are only reached as atomics, and the mapping is valid until the drop.
unsafe impl Send for SharedWords {}
// SAFETY: as for Send.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// `count` words, all zero; at least one.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: no memory.
    pub fn create(name: &str, count: usize) -> Result<SharedWords, CloneError> {
        let make = || {
            let descriptor = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&descriptor, (count.max(1) * WORD_BYTES) as u64)?;
            // A size that cannot change is what makes the mapping sound.
            fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            Ok(descriptor)
        };
        let descriptor = make().map_err(|error: rustix::io::Errno| refused(error))?;
        SharedWords::open(descriptor)
    }

    /// Those that another process made.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: `descriptor` is no such memory.
    pub fn open(descriptor: OwnedFd) -> Result<SharedWords, CloneError> {
        let seals = rustix::fs::fcntl_get_seals(&descriptor).map_err(refused)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(refused(rustix::io::Errno::INVAL));
        }
        let size_bytes = fstat(&descriptor).map_err(refused)?.st_size as usize;
        let count = size_bytes / WORD_BYTES;
        if count == 0 {
            return Err(refused(rustix::io::Errno::INVAL));
        }
        // SAFETY: a new mapping of a size that is sealed; nothing else is touched.
        let address = unsafe {
            mmap(
                std::ptr::null_mut(),
                count * WORD_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &descriptor,
                0,
            )
        };
        let words = NonNull::new(address.map_err(refused)?.cast()).ok_or_else(|| refused(rustix::io::Errno::NOMEM))?;
        Ok(SharedWords { descriptor, words, count })
    }

    /// All of them.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has `count` words, is page-aligned, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), self.count) }
    }
}

impl AsFd for SharedWords {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this size, and no borrow of the words outlives `self`.
        let _ = unsafe { munmap(self.words.as_ptr().cast(), self.count * WORD_BYTES) };
    }
}

fn refused(error: rustix::io::Errno) -> CloneError {
    CloneError::kernel("share memory")(error.into())
}
