//! The shared memory of a server as the kernel sees it: which parts of it are there.
//!
//! PostgreSQL's main segment is an anonymous shared mapping, which is a file of tmpfs without a name (or of hugetlbfs).
//! Its descriptor, opened through `/proc/PID/map_files`, tells its blocks, and by `SEEK_DATA` and `SEEK_HOLE` where
//! they lie.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use anyhow::Context;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::servers::TestServer;

/// How `/proc/PID/maps` calls such mappings, with small and with huge pages.
const SMALL_PAGES_NAME: &str = "/dev/zero (deleted)";
const HUGE_PAGES_NAME: &str = "/anon_hugepage (deleted)";
/// The machine's ordinary page.
const SMALL_PAGE_BYTES: u64 = 4096;
/// `st_blocks` counts in these, whatever the file system's blocks are (stat(2)).
const STAT_BLOCK_BYTES: u64 = 512;

/// A server's main shared memory segment.
#[derive(Debug)]
pub struct Segment {
    file: File,
    /// Its whole length, returned parts included.
    pub length_bytes: u64,
    /// Whether it lies in huge pages.
    pub has_huge_pages: bool,
}

impl Segment {
    /// Finds that of a running server.
    ///
    /// # Errors
    ///
    /// It does not run, has no such segment, or this is not root.
    pub fn of(server: &TestServer) -> anyhow::Result<Segment> {
        let process = server.server.process_id().context("the server does not run")?;
        let maps = std::fs::read_to_string(format!("/proc/{process}/maps"))?;
        let shared = maps.lines().filter_map(shared_mapping);
        let (range, has_huge_pages) =
            shared.max_by_key(|(range, _)| range.end - range.start).context("no shared memory is mapped")?;
        let path = format!("/proc/{process}/map_files/{:x}-{:x}", range.start, range.end);
        let file = File::options().read(true).write(true).open(&path).with_context(|| format!("{path}: needs root"))?;
        Ok(Segment { file, length_bytes: range.end - range.start, has_huge_pages })
    }

    /// What is there, in bytes: in memory or in swap.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn present_bytes(&self) -> anyhow::Result<u64> {
        Ok(self.file.metadata()?.blocks() * STAT_BLOCK_BYTES)
    }

    /// The runs of bytes that are there, in order. Only for small pages.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn present_ranges(&self) -> anyhow::Result<Vec<Range<u64>>> {
        let mut ranges = Vec::new();
        let mut position = 0;
        loop {
            let start = match rustix::fs::seek(&self.file, SeekFrom::Data(position)) {
                Ok(start) => start,
                // Nothing comes any more (lseek(2)).
                Err(Errno::NXIO) => return Ok(ranges),
                Err(error) => return Err(error.into()),
            };
            position = rustix::fs::seek(&self.file, SeekFrom::Hole(start))?;
            ranges.push(start..position);
        }
    }

    /// Takes this range away under the server's feet, as only a control may do.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn punch(&self, range: Range<u64>) -> anyhow::Result<()> {
        let whole = range.start.next_multiple_of(SMALL_PAGE_BYTES)..range.end / SMALL_PAGE_BYTES * SMALL_PAGE_BYTES;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, whole.start, whole.end - whole.start)?)
    }

    /// The longest run of bytes that are not there. Only for small pages.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn longest_hole(&self) -> anyhow::Result<Range<u64>> {
        let mut holes = Vec::new();
        let mut end = 0;
        for range in self.present_ranges()? {
            holes.push(end..range.start);
            end = range.end;
        }
        holes.push(end..self.length_bytes);
        holes.into_iter().max_by_key(|hole| hole.end - hole.start).context("no holes")
    }
}

/// Start and end of a mapping when it is an anonymous shared one, and whether it is of huge pages.
fn shared_mapping(line: &str) -> Option<(Range<u64>, bool)> {
    let has_huge_pages = line.ends_with(HUGE_PAGES_NAME);
    if !has_huge_pages && !line.ends_with(SMALL_PAGES_NAME) {
        return None;
    }
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?, has_huge_pages))
}

/// Shared memory of the whole machine: `Shmem` of `/proc/meminfo`, in bytes.
///
/// # Errors
///
/// The file has no such line.
pub fn machine_shared_bytes() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Shmem:")).context("/proc/meminfo has no Shmem")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_anonymous_shared_mappings_count() {
        let small = "7f0000000000-7f0000200000 rw-s 00000000 00:01 1031 /dev/zero (deleted)";
        assert_eq!(shared_mapping(small), Some((0x7f00_0000_0000..0x7f00_0020_0000, false)));
        let huge = "7f0000000000-7f0000200000 rw-s 00000000 00:0f 1031    /anon_hugepage (deleted)";
        assert_eq!(shared_mapping(huge), Some((0x7f00_0000_0000..0x7f00_0020_0000, true)));
        for other in
            ["", "7f00-7f10 r-xp 00000000 fe:00 1 /usr/bin/true", "7f00-7f10 rw-s 0 0:1 2 /dev/shm/PostgreSQL.1"]
        {
            assert_eq!(shared_mapping(other), None);
        }
    }
}
