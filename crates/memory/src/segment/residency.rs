//! Which pages of a server's shared memory are in RAM.

use std::io;

use super::{Segment, Window};

/// The ordinary page.
pub(crate) const PAGE_BYTES: usize = 4096;

impl Segment {
    /// Its page: the ordinary one, or that of its huge pages.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }
}

impl Window {
    /// Which of the ordinary pages are in RAM, in the range of `length` bytes from `position` on, which must begin at a
    /// page. Asking touches none of them (mincore(2)).
    ///
    /// # Errors
    /// The range does not lie inside or does not begin at a page.
    pub fn resident(&self, position: usize, length: usize) -> io::Result<Vec<bool>> {
        let start = self.lead_bytes.checked_add(position).filter(|start| start.is_multiple_of(PAGE_BYTES));
        let end = start.and_then(|start| start.checked_add(length)).filter(|end| *end <= self.mapped_bytes);
        let (Some(start), Some(_)) = (start, end) else { return Err(io::ErrorKind::InvalidInput.into()) };
        let mut pages = vec![0_u8; length.div_ceil(PAGE_BYTES)];
        // SAFETY: the range was checked to lie in the mapping; the kernel writes a byte a page of it, and `pages` has
        // as many.
        let result = unsafe { libc::mincore(self.address.as_ptr().add(start).cast(), length, pages.as_mut_ptr()) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        // The other bits are reserved.
        Ok(pages.into_iter().map(|page| page & 1 == 1).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn what_is_in_memory_is_known_without_touching_it() {
        let memory = rustix::fs::memfd_create("window", rustix::fs::MemfdFlags::CLOEXEC).expect("made");
        let file = std::fs::File::from(memory);
        file.set_len(4 * 4096).expect("sized");
        file.write_all_at(&[1], 2 * 4096).expect("written");
        let window = Window::map(file.as_fd(), 1024, 4 * 4096 - 1024, 4096).expect("mapped");
        assert_eq!(window.resident(3072, 3 * 4096).expect("asked"), [false, true, false]);
        assert_eq!(window.resident(3072, 3 * 4096).expect("asked"), [false, true, false], "asking brings nothing");
        for (position, length) in [(0, 4096), (3072, 4 * 4096), (3072, usize::MAX), (usize::MAX, 1)] {
            window.resident(position, length).expect_err("outside, or not at a page");
        }
    }
}
