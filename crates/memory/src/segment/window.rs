//! A part of a server's shared memory, mapped into this process. The server changes it at any time: it is only read and
//! changed atomically.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A range of a file, mapped shared and writable.
#[derive(Debug)]
pub(crate) struct Window {
    /// Where the mapping begins: at or before `start`, at a page.
    pub(super) address: NonNull<u8>,
    pub(super) mapped_bytes: usize,
    /// How far behind `address` the wanted range begins.
    pub(super) lead_bytes: usize,
}

// SAFETY: the mapping is only reached through atomics, and is valid until the drop.
unsafe impl Send for Window {}
// SAFETY: as for Send.
unsafe impl Sync for Window {}

impl Window {
    /// Maps `length` bytes of the file from `offset` on. `page_bytes` is the file's page: 4096, or that of its huge
    /// pages.
    ///
    /// # Errors
    /// The file ends before, or the kernel refuses.
    pub fn map(file: BorrowedFd<'_>, offset: u64, length: u64, page_bytes: u64) -> io::Result<Window> {
        let end = offset.checked_add(length).ok_or(io::ErrorKind::InvalidInput)?;
        let size_bytes = rustix::fs::fstat(file.as_fd())?.st_size;
        if length == 0 || page_bytes == 0 || i64::try_from(end).map_or(true, |end| end > size_bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let begin = offset / page_bytes * page_bytes;
        let mapped = end.next_multiple_of(page_bytes) - begin;
        let (Ok(mapped_bytes), Ok(lead_bytes)) = (usize::try_from(mapped), usize::try_from(offset - begin)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses; nothing that exists is touched. It lies within
        // the file.
        let address = unsafe { mmap(std::ptr::null_mut(), mapped_bytes, protection, MapFlags::SHARED, file, begin) }?;
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Window { address, mapped_bytes, lead_bytes })
    }

    /// How many bytes were asked for, at least.
    fn length(&self) -> usize {
        self.mapped_bytes - self.lead_bytes
    }

    /// The word of four bytes at this place, counted from the beginning of what was asked for; none when it does not
    /// lie inside or is not aligned.
    pub fn word(&self, position: usize) -> Option<&AtomicU32> {
        let address = self.place(position, size_of::<u32>())?;
        // SAFETY: it lies inside the mapping, which lives as long as `self`, is aligned, and all access to it here is
        // atomic.
        Some(unsafe { AtomicU32::from_ptr(address.cast()) })
    }

    /// The word of eight bytes at this place; as [`word`](Self::word).
    pub fn long_word(&self, position: usize) -> Option<&AtomicU64> {
        let address = self.place(position, size_of::<u64>())?;
        // SAFETY: as in `word`.
        Some(unsafe { AtomicU64::from_ptr(address.cast()) })
    }

    fn place(&self, position: usize, size: usize) -> Option<*mut u8> {
        let end = position.checked_add(size).filter(|end| *end <= self.length())?;
        let place = self.lead_bytes + end - size;
        // The mapping itself begins at a page.
        place.is_multiple_of(size).then(|| self.address.as_ptr().wrapping_add(place))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this size, and no borrow of its words outlives `self`.
        let _ = unsafe { munmap(self.address.as_ptr().cast(), self.mapped_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::Ordering;

    #[test]
    fn words_are_those_of_the_file_and_end_where_it_ends() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(3 * 4096).expect("sized");
        let window = Window::map(file.as_fd(), 4096 + 24, 64, 4096).expect("mapped");
        window.word(4).expect("inside").store(0x0403_0201, Ordering::Relaxed);
        window.long_word(8).expect("inside").store(7, Ordering::Relaxed);
        let mut bytes = [0; 16];
        file.read_exact_at(&mut bytes, 4096 + 24).expect("read");
        assert_eq!(bytes, [0, 0, 0, 0, 1, 2, 3, 4, 7, 0, 0, 0, 0, 0, 0, 0]);
        assert!(window.word(2).is_none(), "not aligned");
        assert!(window.word(4096).is_none() && window.word(usize::MAX).is_none(), "outside");
        assert!(window.word(4096 - 24 - 4).is_some() && window.long_word(4096 - 24 - 4).is_none(), "the last word");
    }

    #[test]
    fn what_lies_outside_the_file_is_refused() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(8192).expect("sized");
        for (offset, length) in [(0, 8193), (8192, 1), (u64::MAX, 1), (1, u64::MAX), (0, 0)] {
            Window::map(file.as_fd(), offset, length, 4096).expect_err("outside");
        }
        Window::map(file.as_fd(), 0, 8192, 4096).expect("all of it");
    }
}
