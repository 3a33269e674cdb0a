//! Which pages of a file the kernel has in its page cache.

use std::fs::File;
use std::io;

use rustix::mm::{MapFlags, ProtFlags};

use crate::PAGE_BYTES;

/// Bytes of a file that are in the page cache. Reads none.
///
/// # Errors
/// The file cannot be mapped.
pub fn resident_bytes(file: &File) -> io::Result<u64> {
    let pages = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?.div_ceil(PAGE_BYTES);
    if pages == 0 {
        return Ok(0);
    }
    Ok(resident(file, pages)?.into_iter().filter(|is_there| *is_there).count() as u64 * PAGE_BYTES as u64)
}

/// For each page of the first `pages` of a file, whether it is in the page cache, mincore(2). Reads none.
pub(super) fn resident(file: &File, pages: usize) -> io::Result<Vec<bool>> {
    let length = pages * PAGE_BYTES;
    let mut bytes = vec![0u8; pages];
    // SAFETY: a new mapping at a place of the kernel's choice, never read through, and taken away below.
    let place =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, ProtFlags::empty(), MapFlags::SHARED, file, 0) }?;
    // SAFETY: the range is mapped, and there is a byte for each of its pages.
    let asked = unsafe { libc::mincore(place, length, bytes.as_mut_ptr()) };
    let asked = if asked == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: nobody else knows of this mapping.
    unsafe { rustix::mm::munmap(place, length) }?;
    asked?;
    Ok(bytes.iter().map(|byte| byte & 1 == 1).collect())
}
