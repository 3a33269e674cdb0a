//! What of a source's files is in the kernel's page cache, by cachestat(2) of Linux 6.5: it counts pages without
//! touching one, so that no access is seen by anybody. A kernel that can fill files on demand has it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use onecopy_postgres::Directory;

use super::ranges::{self, Run};
use crate::ByteRange;
use crate::image::{FileNumber, Image};

/// Number of the system call on every architecture (`include/uapi/asm-generic/unistd.h`); the C library does not know
/// it yet.
const CACHESTAT: libc::c_long = 451;

/// The grain in which a file is looked at: what the background reads at once.
const GRAIN_BYTES: u64 = 256 << 10;

/// A grain with less than this part in the page cache is not hot: some page of it was read once. Of four.
const CACHED_QUARTERS_MIN: u64 = 1;

/// Grains that are looked at, hot or not: 256 GiB. A call takes about a microsecond.
const GRAINS_MAX: u64 = 1 << 20;

/// What is asked: `struct cachestat_range`.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    length: u64,
}

/// The answer: `struct cachestat`. Only the first is used.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// The ranges of an image's files that the page cache holds, at most `ranges_max`, most of them in it first.
///
/// # Errors
/// The kernel has no such call.
pub(super) fn cached_ranges(
    image: &Image,
    data_directory: &Path,
    ranges_max: usize,
) -> io::Result<Vec<(FileNumber, ByteRange)>> {
    let directory = Directory::open(data_directory)?;
    let mut runs = Vec::new();
    let mut grains_left = GRAINS_MAX;
    for (number, file) in (0..).map(FileNumber).zip(&image.files) {
        // What has been removed meanwhile is not hot.
        let Ok(opened) = directory.open_read(&file.path) else { continue };
        let whole = Run { file: number, start: 0, length_bytes: file.size_bytes, heat: 0 };
        if cached_bytes(&opened, whole.start, whole.length_bytes)? == 0 {
            continue;
        }
        let mut start = 0;
        while start < file.size_bytes && grains_left > 0 {
            grains_left -= 1;
            let length_bytes = GRAIN_BYTES.min(file.size_bytes - start);
            // Up to 4: all of it is there.
            let quarters = cached_bytes(&opened, start, length_bytes)? * 4 / length_bytes;
            if quarters >= CACHED_QUARTERS_MIN {
                runs.push(Run { file: number, start, length_bytes, heat: quarters.min(4) as u8 });
            }
            start += GRAIN_BYTES;
        }
    }
    let mut ranges = ranges::in_order(runs);
    ranges.truncate(ranges_max);
    Ok(ranges)
}

/// How many bytes of a range are in the page cache.
fn cached_bytes(file: &File, offset: u64, length: u64) -> io::Result<u64> {
    let (asked, mut counted) = (CachestatRange { offset, length }, Cachestat::default());
    // SAFETY: the kernel reads `asked` and writes `counted`, which have the layouts that it expects and live until it
    // returns; the descriptor belongs to `file`, which is borrowed.
    let result = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const asked, &raw mut counted, 0_u32) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(counted.cached * page_bytes())
}

/// The kernel's page.
fn page_bytes() -> u64 {
    // SAFETY: the call takes a number and gives one.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // It is known on every Linux.
    u64::try_from(bytes).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::{FileIdentity, ImageFile};
    use rustix::fs::{Advice, fadvise};
    use std::os::unix::fs::FileExt;

    /// Each file with its size; all in one directory.
    fn image(files: &[(&str, u64)]) -> Image {
        let identity = FileIdentity { device: 0, inode: 0, born_nanoseconds: 0 };
        let file = |(path, size_bytes): &(&str, u64)| ImageFile {
            path: path.into(),
            size_bytes: *size_bytes,
            mode: 0o600,
            identity,
        };
        Image { files: files.iter().map(file).collect(), ..Image::default() }
    }

    #[test]
    fn what_was_read_is_found_and_what_was_not_is_not() {
        let directory = tempfile::tempdir().expect("a directory");
        let sizes = [("read", 3 * GRAIN_BYTES), ("cold", GRAIN_BYTES), ("gone", GRAIN_BYTES), ("empty", 0)];
        let made = sizes.iter().filter(|(name, _)| *name != "gone").map(|(name, size)| {
            let file = File::create(directory.path().join(name)).expect("made");
            file.write_all_at(&vec![1; *size as usize], 0).expect("written");
            file.sync_all().expect("synced");
            file
        });
        let (made, begun) = (made.collect::<Vec<File>>(), std::time::Instant::now());
        let drop_all = || made.iter().try_for_each(|file| fadvise(file, 0, None, Advice::DontNeed)).expect("dropped");
        drop_all();
        // A page that the kernel is just busy with stays.
        while !cached_ranges(&image(&sizes), directory.path(), 10).expect("asked").is_empty() {
            assert!(begun.elapsed().as_secs() < 60, "what is not needed stays");
            drop_all();
        }
        let file = File::open(directory.path().join("read")).expect("opened");
        fadvise(&file, 0, None, Advice::Random).expect("no more than is asked for");
        let mut buffer = vec![0; GRAIN_BYTES as usize];
        file.read_exact_at(&mut buffer, 2 * GRAIN_BYTES).expect("read");
        let found = cached_ranges(&image(&sizes), directory.path(), 10).expect("asked");
        assert_eq!(found, [(FileNumber(0), ByteRange::new(2 * GRAIN_BYTES, GRAIN_BYTES))]);
    }
}
