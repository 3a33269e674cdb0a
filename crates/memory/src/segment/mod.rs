//! The shared memory of a PostgreSQL server, reached from outside by way of the kernel: `/proc/PID/map_files` gives the
//! file behind a mapping, also when that file has no name (proc_pid_map_files(5)). It needs root of the host itself.
//!
//! A descriptor or a mapping of this file keeps its memory alive when the server is gone. So a [`Segment`] is opened
//! for one operation, never kept; that is also what makes a restart of the server in between harmless.

mod maps;
mod postmaster;
#[cfg(feature = "own")]
mod residency;
mod window;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, fstat, fstatfs, seek};

pub(crate) use postmaster::Postmaster;
#[cfg(feature = "own")]
pub(crate) use residency::PAGE_BYTES;
pub(crate) use window::Window;

use crate::MemoryError;

/// How much memory the largest shared mapping of a process has, in RAM or in swap: of a server of PostgreSQL that is
/// its pool and little more. None when the kernel does not let us see it.
pub(crate) fn shared_memory_bytes(process_id: u32) -> Option<u64> {
    /// `st_blocks` counts in these, whatever the file system's blocks are (stat(2)).
    const STAT_BLOCK_BYTES: u64 = 512;
    let mappings = maps::of_process(process_id).ok()?;
    let shared = mappings.into_iter().filter(|mapping| mapping.shared_writable);
    let largest = shared.max_by_key(|mapping| mapping.end - mapping.start)?;
    let path = format!("/proc/{process_id}/map_files/{:x}-{:x}", largest.start, largest.end);
    let metadata = std::fs::metadata(path).ok()?;
    Some(std::os::unix::fs::MetadataExt::blocks(&metadata) * STAT_BLOCK_BYTES)
}

/// The file behind a server's shared memory. Places in it are counted from its beginning.
#[derive(Debug)]
pub(crate) struct Segment {
    file: File,
    /// The address at which the server sees the file's first byte.
    base_address: u64,
    size_bytes: u64,
    page_bytes: u64,
}

impl Segment {
    /// Opens the shared memory that a process has at this address.
    ///
    /// # Errors
    /// [`MemoryError::NotAllowed`]: nothing is mapped there, it is no shared memory of the server's own, or the kernel
    /// does not let us.
    pub fn open(postmaster: &Postmaster, address: u64) -> Result<Segment, MemoryError> {
        let refuse = |reason: String| MemoryError::NotAllowed { what: "to reach the server's shared memory", reason };
        let mappings = maps::of_process(postmaster.process_id).map_err(|error| refuse(error.to_string()))?;
        let mapping = mappings.into_iter().find(|mapping| mapping.holds(address) && mapping.shared_writable);
        let mapping = mapping.ok_or_else(|| refuse(format!("nothing is shared at {address:#x}")))?;
        let path = postmaster.file("map_files").join(format!("{:x}-{:x}", mapping.start, mapping.end));
        let file = open_memory(&path, postmaster.owner_id).map_err(|error| refuse(error.to_string()))?;
        let base_address = mapping.start.checked_sub(mapping.offset);
        let base_address = base_address.ok_or_else(|| refuse("it is mapped at an impossible place".to_owned()))?;
        Segment::of(file, base_address).map_err(|error| refuse(error.to_string()))
    }

    fn of(file: File, base_address: u64) -> io::Result<Segment> {
        let size_bytes = u64::try_from(fstat(&file)?.st_size).map_err(|_| io::ErrorKind::InvalidData)?;
        // Of huge pages: their size.
        let page_bytes = u64::try_from(fstatfs(&file)?.f_bsize).map_err(|_| io::ErrorKind::InvalidData)?;
        if !page_bytes.is_power_of_two() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Segment { file, base_address, size_bytes, page_bytes })
    }

    /// How large it is, whether memory is behind all of it or not.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Where in the file lies what the server sees at `address`; none when it is not in it.
    pub fn place_of(&self, address: u64) -> Option<u64> {
        address.checked_sub(self.base_address).filter(|place| *place < self.size_bytes)
    }

    /// Maps a range of it.
    pub fn window(&self, place: u64, length: u64) -> io::Result<Window> {
        Window::map(self.file.as_fd(), place, length, self.page_bytes)
    }

    /// Reads from it, without mapping it. Short only at the end.
    pub fn read(&self, place: u64, buffer: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, buffer, place)
    }

    /// Gives the memory of a range back, of its whole pages: what shares a page with something outside stays as it is.
    /// Says how many bytes these pages have. What is read there afterwards is zero.
    pub fn give_back(&self, place: u64, length: u64) -> io::Result<u64> {
        let Some((start, length)) = whole_pages(place, length, self.page_bytes) else { return Ok(0) };
        if start.checked_add(length).is_none_or(|end| end > self.size_bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, start, length)?;
        Ok(length)
    }

    /// How much memory the whole pages of a range have, in RAM or in swap. Of huge pages the kernel does not tell: all
    /// of it.
    pub fn memory_bytes(&self, place: u64, length: u64) -> io::Result<u64> {
        let Some((start, length)) = whole_pages(place, length, self.page_bytes) else { return Ok(0) };
        let (mut bytes, mut position, end) = (0, start, start.saturating_add(length));
        while position < end {
            let start = match seek(&self.file, SeekFrom::Data(position)) {
                Ok(start) => start.min(end),
                // Nothing comes any more (lseek(2)).
                Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            position = if start < end { seek(&self.file, SeekFrom::Hole(start))?.clamp(start + 1, end) } else { end };
            bytes += position - start;
        }
        Ok(bytes)
    }
}

/// Start and length of the whole pages in a range; none when there is none.
pub(crate) fn whole_pages(place: u64, length: u64, page_bytes: u64) -> Option<(u64, u64)> {
    let start = place.checked_next_multiple_of(page_bytes)?;
    let end = place.checked_add(length)? / page_bytes * page_bytes;
    (start < end).then(|| (start, end - start))
}

/// Opens the file behind a mapping when it is what a server's shared memory is: memory without a name that belongs to
/// the server's user. The server could show us anything that it has mapped; what it could not change itself must not be
/// changed by us.
fn open_memory(path: &Path, owner_id: u32) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let (status, kind) = (fstat(&file)?, fstatfs(&file)?.f_type);
    let is_memory = kind == libc::TMPFS_MAGIC || kind == libc::HUGETLBFS_MAGIC;
    if !is_memory || status.st_nlink != 0 || status.st_uid != owner_id {
        return Err(io::Error::other("what is mapped there is not the server's own memory without a name"));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    /// A segment of this process: memory without a name.
    pub(crate) fn memory(size_bytes: u64) -> Segment {
        let file = File::from(memfd_create("segment", MemfdFlags::CLOEXEC).expect("made"));
        file.set_len(size_bytes).expect("sized");
        Segment::of(file, 0x1000).expect("a segment")
    }

    /// Memory that it has: `st_blocks` is in units of 512 bytes (stat(2)).
    fn allocated_bytes(segment: &Segment) -> i64 {
        fstat(&segment.file).expect("asked").st_blocks * 512
    }

    #[test]
    fn whole_pages_go_back_and_their_neighbours_stay() {
        let segment = memory(8 * 4096);
        std::os::unix::fs::FileExt::write_all_at(&segment.file, &[7; 8 * 4096], 0).expect("written");
        assert_eq!(allocated_bytes(&segment), 8 * 4096);
        assert_eq!(segment.give_back(1024, 3 * 4096).expect("given"), 2 * 4096);
        assert_eq!(allocated_bytes(&segment), 6 * 4096);
        let mut bytes = [1; 8 * 4096];
        segment.read(0, &mut bytes).expect("read");
        assert!(bytes[..4096].iter().all(|byte| *byte == 7) && bytes[3 * 4096..].iter().all(|byte| *byte == 7));
        assert!(bytes[4096..3 * 4096].iter().all(|byte| *byte == 0));
        assert_eq!(segment.give_back(100, 5000).expect("none"), 0, "no whole page");
        segment.give_back(4096, 8 * 4096).expect_err("behind the end");
    }

    #[test]
    fn only_what_has_memory_is_counted() {
        let segment = memory(16 * 4096);
        for page in [1, 2, 5, 15] {
            std::os::unix::fs::FileExt::write_all_at(&segment.file, &[7; 4096], page * 4096).expect("written");
        }
        let bytes = |first: u64, end: u64| segment.memory_bytes(first * 4096, (end - first) * 4096).expect("asked");
        assert_eq!((bytes(0, 16), bytes(2, 6), bytes(3, 5)), (4 * 4096, 2 * 4096, 0));
        assert_eq!((bytes(6, 15), bytes(15, 16), bytes(16, 20)), (0, 4096, 0));
        assert_eq!(
            segment.memory_bytes(4097, 4 * 4096).expect("asked"),
            4096,
            "of the first page only a part is meant"
        );
    }

    #[test]
    fn places_are_counted_from_the_beginning() {
        let segment = memory(8192);
        assert_eq!(segment.place_of(0x1000), Some(0));
        assert_eq!(segment.place_of(0x1000 + 8191), Some(8191));
        assert_eq!((segment.place_of(0xfff), segment.place_of(0x1000 + 8192)), (None, None));
    }

    #[test]
    fn a_file_with_a_name_or_of_somebody_else_is_refused() {
        let named = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
        let owner = fstat(named.as_file()).expect("asked").st_uid;
        open_memory(named.path(), owner).expect_err("it has a name");
        let on_disk = tempfile::NamedTempFile::new().expect("a file");
        open_memory(on_disk.path(), owner).expect_err("no memory");
        let segment = memory(4096);
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&segment.file));
        open_memory(Path::new(&path), owner).expect("memory without a name");
        open_memory(Path::new(&path), owner + 1).expect_err("somebody else's");
    }

    proptest! {
        #[test]
        fn whole_pages_lie_inside(place: u64, length: u64, power in 12_u32..31) {
            let page_bytes = 1 << power;
            if let Some((start, size)) = whole_pages(place, length, page_bytes) {
                prop_assert!(start >= place && start + size <= place + length && size > 0);
                prop_assert!(start % page_bytes == 0 && size % page_bytes == 0);
                prop_assert!(start - place < page_bytes && place + length - start - size < page_bytes);
            }
        }
    }
}
