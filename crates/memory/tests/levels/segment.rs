//! What the kernel says of a server's shared memory, asked independently of the crate.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};

/// Memory behind the server's shared memory, in bytes: `st_blocks` of the file behind it (stat(2)).
pub fn memory_bytes(data_directory: &Path) -> u64 {
    std::fs::metadata(file_behind(data_directory)).expect("needs root").blocks() * 512
}

/// Takes the middle half of the server's shared memory away, which is pages alone, and tells nobody.
pub fn take_away(data_directory: &Path) {
    let path = file_behind(data_directory);
    let file = std::fs::File::options().read(true).write(true).open(path).expect("needs root");
    let quarter = file.metadata().expect("open").len() / 4 / 4096 * 4096;
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, quarter, 2 * quarter).expect("taken");
}

/// The file behind the largest shared mapping of the server's postmaster.
fn file_behind(data_directory: &Path) -> PathBuf {
    let process = postmaster(data_directory);
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).expect("it lives");
    let shared = maps.lines().filter(|line| line.contains("rw-s")).filter_map(|line| line.split(' ').next());
    let size = |range: &str| {
        let (start, end) = range.split_once('-').expect("a range");
        let number = |text| u64::from_str_radix(text, 16).expect("an address");
        number(end) - number(start)
    };
    let range = shared.max_by_key(|range| size(range)).expect("shared memory");
    PathBuf::from(format!("/proc/{process}/map_files/{range}"))
}

/// The first line of `postmaster.pid`.
fn postmaster(data_directory: &Path) -> u32 {
    let text = std::fs::read_to_string(data_directory.join("postmaster.pid")).expect("it runs");
    text.lines().next().and_then(|line| line.parse().ok()).expect("a number")
}
