//! What can be given back of a server that nobody may touch: the kernel's cached copies of its files.
//!
//! Only pages that are on disk are dropped (posix_fadvise(2)), so nothing is lost; the server reads them again. Its own pool stays as
//! it is.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise};

use crate::segment::PAGE_BYTES;
use crate::{Bytes, MemoryError};

/// Where relations are. The log is left alone: what was written last is read soonest, by followers.
const DIRECTORIES: [&str; 3] = ["base", "global", "pg_tblspc"];
/// Files that are looked at in one go; a server with more of them is gone through in part.
const FILES_MAX: usize = 1 << 20;
/// `pg_tblspc/OID/PG_15_x/DATABASE/file`.
const DEPTH_MAX: usize = 5;
/// Number of cachestat(2) on every architecture (`include/uapi/asm-generic/unistd.h`); the C library does not know it yet.
const CACHESTAT: libc::c_long = 451;

/// What was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DroppedCache {
    /// How much the kernel gave back; none when it cannot say (before Linux 6.5).
    pub bytes: Option<Bytes>,
    /// How many files were gone through.
    pub files: usize,
}

/// Drops cached copies of the relations' files until `bytes` are dropped, or all of them where the kernel cannot count.
///
/// # Errors
/// [`MemoryError::File`]: the data directory cannot be read. Files that vanish meanwhile do not matter.
pub fn drop_page_cache(data_directory: &Path, bytes: Bytes) -> Result<DroppedCache, MemoryError> {
    let mut dropped = DroppedCache { bytes: Some(0), files: 0 };
    // Deepest last: what is popped is what was found last.
    let mut left: Vec<(PathBuf, usize)> = DIRECTORIES.iter().map(|name| (data_directory.join(name), 1)).collect();
    while let Some((directory, depth)) = left.pop() {
        let entries = match std::fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if depth > 1 && error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(MemoryError::File { action: "read", path: directory, source }),
        };
        for entry in entries.flatten() {
            let is_table_space = depth == 1 && directory.ends_with("pg_tblspc");
            let kind = entry.file_type().ok();
            if is_table_space || kind.is_some_and(|kind| kind.is_dir()) && depth < DEPTH_MAX {
                left.push((entry.path(), depth + 1));
            } else if kind.is_some_and(|kind| kind.is_file()) {
                dropped.add(&entry.path());
            }
            if dropped.bytes.is_some_and(|done| done >= bytes) || dropped.files >= FILES_MAX {
                return Ok(dropped);
            }
        }
    }
    Ok(dropped)
}

impl DroppedCache {
    fn add(&mut self, path: &Path) {
        // The directory is the server's: what stands there may be exchanged for anything at any time.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        let Ok(file) = OpenOptions::new().read(true).custom_flags(flags).open(path) else { return };
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return;
        }
        let before = cached_bytes(&file);
        if fadvise(&file, 0, None, Advice::DontNeed).is_err() {
            return;
        }
        self.files += 1;
        self.bytes = match (self.bytes, before, cached_bytes(&file)) {
            (Some(sum), Some(before), Some(after)) => Some(sum + before.saturating_sub(after)),
            _ => None,
        };
    }
}

/// How much of a file is in the page cache; none when the kernel cannot say.
fn cached_bytes(file: &File) -> Option<Bytes> {
    // `struct cachestat_range`: offset, length; 0 is up to the end.
    let range = [0_u64; 2];
    // `struct cachestat`: cached, dirty, under write-back, evicted, recently evicted; in pages.
    let mut counts = [0_u64; 5];
    // SAFETY: the kernel reads `range` and writes `counts`, which have its layouts and live until it returns; the descriptor belongs to
    // `file`, which is borrowed.
    let result = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut counts, 0_u32) };
    (result == 0).then(|| counts[0] * PAGE_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A data directory with a file of 1 MB, and a table space elsewhere with another.
    fn data_directory(root: &Path) -> PathBuf {
        let data = root.join("data");
        let (base, elsewhere) = (data.join("base/5"), root.join("space/PG_15_202209061/5"));
        for directory in [&base, &elsewhere, &data.join("global"), &data.join("pg_tblspc")] {
            std::fs::create_dir_all(directory).expect("made");
        }
        std::os::unix::fs::symlink(root.join("space"), data.join("pg_tblspc/16400")).expect("linked");
        for path in [base.join("16384"), elsewhere.join("16401")] {
            let mut file = File::create(path).expect("made");
            file.write_all(&vec![1; 1 << 20]).and_then(|()| file.sync_all()).expect("written");
        }
        data
    }

    #[test]
    fn cached_copies_of_all_relations_are_dropped() {
        // A file system that has a page cache: that of the program, not one in memory.
        let root = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
        let data = data_directory(root.path());
        let dropped = drop_page_cache(&data, Bytes::MAX).expect("dropped");
        assert_eq!(dropped.files, 2);
        assert!(dropped.bytes.is_none_or(|bytes| bytes == 2 << 20), "{dropped:?}");
        let again = drop_page_cache(&data, Bytes::MAX).expect("dropped");
        assert!(again.bytes.is_none_or(|bytes| bytes == 0), "{again:?}");
        let content = std::fs::read(data.join("base/5/16384")).expect("read");
        assert!(content.len() == 1 << 20 && content.iter().all(|byte| *byte == 1));
    }

    #[test]
    fn it_ends_when_enough_is_dropped() {
        let root = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
        let data = data_directory(root.path());
        let dropped = drop_page_cache(&data, 4096).expect("dropped");
        assert!(dropped.bytes.is_none() || dropped.files == 1, "{dropped:?}");
        drop_page_cache(&root.path().join("nowhere"), 1).expect_err("no such directory");
    }
}
