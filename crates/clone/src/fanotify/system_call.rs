//! What processes are about to do to files, asked of the kernel: for accesses that a dead process had read and not yet
//! written down. Whoever waits for an answer stands in its system call until the answer comes, and the call's arguments
//! can be seen.
//!
//! Source: proc_pid_syscall(5), and each call's own page in section 2.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use onecopy_postgres::processes_of;

use super::event::Access;
use crate::ByteRange;

/// Parts of a vector that the kernel takes at once, at most. Source: Linux, `include/uapi/linux/uio.h`, UIO_MAXIOV.
const VECTOR_PARTS_MAX: u64 = 1024;
/// `struct iovec`: an address, and a length behind it.
const VECTOR_PART_BYTES: usize = 16;
/// A path with its end. Source: Linux, `include/uapi/linux/limits.h`, PATH_MAX.
const PATH_BYTES_MAX: usize = 4096;

/// An access of a file by a system call that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccessUnderWay {
    /// The file's device, as fstat(2) gives it.
    pub device: u64,
    /// The file's inode.
    pub inode: u64,
    /// What is done to it.
    pub access: Access,
}

/// What all processes that can be seen are doing to files at this moment, whether they wait or not. None when that
/// cannot be told of a process of the server in `data_directory`, or no process of it can be seen.
pub fn accesses_under_way(data_directory: &Path) -> Option<Vec<AccessUnderWay>> {
    let of_server = processes_of(data_directory);
    if of_server.is_empty() {
        return None;
    }
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(process_id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        match of_process(process_id) {
            Some(accesses) => found.extend(accesses),
            None if of_server.contains(&process_id) => return None,
            None => {}
        }
    }
    Some(found)
}

/// What a process of one thread is doing, as far as truncations go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// It stands in a truncation: it waits to be let through, or for a lock or the disk on its way.
    Truncation,
    /// It executes, or is ready to and has no processor: in which system call, if any, cannot be told.
    Executing,
    /// Something else, or nothing that can be told.
    Other,
}

/// What a process of one thread, as those of PostgreSQL are, is doing at this moment.
pub fn doing(process_id: u32) -> Doing {
    match fs::read_to_string(format!("/proc/{process_id}/syscall")) {
        Ok(line) => Doing::parse(&line),
        Err(_) => Doing::Other,
    }
}

impl Doing {
    fn parse(line: &str) -> Doing {
        match Call::parse(line) {
            Some(Call { number: libc::SYS_truncate | libc::SYS_ftruncate, .. }) => Doing::Truncation,
            None if line.starts_with("running") => Doing::Executing,
            _ => Doing::Other,
        }
    }
}

/// What the threads of a process are doing to files; nothing when it is gone, none when that cannot be told.
pub(super) fn of_process(process_id: u32) -> Option<Vec<AccessUnderWay>> {
    let threads = match fs::read_dir(format!("/proc/{process_id}/task")) {
        Err(error) if is_gone(&error) => return Some(Vec::new()),
        threads => threads.ok()?,
    };
    let mut found = Vec::new();
    for thread in threads.flatten() {
        found.extend(of_thread(&thread.path())?);
    }
    Some(found)
}

fn of_thread(thread: &Path) -> Option<Vec<AccessUnderWay>> {
    let read = |name: &str| match fs::read_to_string(thread.join(name)) {
        Err(error) if is_gone(&error) => Some(String::new()),
        text => text.ok(),
    };
    // The kernel's own threads do a ring's work: what they do is no system call.
    if read("comm")?.starts_with("iou-") {
        return None;
    }
    match Call::parse(&read("syscall")?) {
        Some(call) => call.accesses(thread),
        None => Some(Vec::new()),
    }
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// A system call that is under way.
#[derive(Debug, PartialEq, Eq)]
struct Call {
    number: i64,
    arguments: [u64; 6],
}

impl Call {
    /// None for a thread that executes, or stands still outside of calls: it waits for no answer.
    fn parse(line: &str) -> Option<Call> {
        let mut words = line.split_ascii_whitespace();
        let number = words.next()?.parse().ok().filter(|number| *number >= 0)?;
        let mut arguments = [0; 6];
        for argument in &mut arguments {
            *argument = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
        }
        Some(Call { number, arguments })
    }

    /// What it does to files; none when that cannot be told.
    fn accesses(&self, thread: &Path) -> Option<Vec<AccessUnderWay>> {
        let [first, second, third, fourth, fifth, _] = self.arguments;
        let range = |start, length_bytes| Access::Range(ByteRange::new(start, length_bytes));
        let whole = Access::Range(ByteRange::WHOLE);
        let of_descriptors: &[(u64, Access)] = match self.number {
            libc::SYS_pread64 | libc::SYS_pwrite64 => &[(first, range(fourth, third))],
            // At the descriptor's own position.
            libc::SYS_preadv2 | libc::SYS_pwritev2 if fourth == u64::MAX => &[(first, whole)],
            libc::SYS_preadv | libc::SYS_pwritev | libc::SYS_preadv2 | libc::SYS_pwritev2 => {
                &[(first, range(fourth, vector_bytes(thread, second, third)?))]
            }
            libc::SYS_read | libc::SYS_write | libc::SYS_readv | libc::SYS_writev => &[(first, whole)],
            libc::SYS_sendfile => &[(first, whole), (second, whole)],
            libc::SYS_copy_file_range | libc::SYS_splice => &[(first, whole), (third, whole)],
            libc::SYS_mmap => &[(fifth, whole)],
            libc::SYS_fallocate => &[(first, range(third, fourth))],
            libc::SYS_ftruncate => &[(first, Access::Truncation { size_bytes: second })],
            libc::SYS_truncate => {
                let path = path_at(thread, first)?;
                return Some(access_of(&path, Access::Truncation { size_bytes: second }).into_iter().collect());
            }
            libc::SYS_io_uring_enter | libc::SYS_io_submit => return None,
            _ => &[],
        };
        let descriptors = of_descriptors.iter().filter_map(|(number, access)| {
            // A descriptor is an int, whatever the rest of the register holds.
            access_of(&thread.join("fd").join((*number as i32).to_string()), *access)
        });
        Some(descriptors.collect())
    }
}

/// None for what is no file, or not there any more.
fn access_of(path: &Path, access: Access) -> Option<AccessUnderWay> {
    let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    Some(AccessUnderWay { device: metadata.dev(), inode: metadata.ino(), access })
}

/// The bytes that a vector of `parts` at this address of a thread's memory speaks of.
fn vector_bytes(thread: &Path, address: u64, parts: u64) -> Option<u64> {
    let mut vector = vec![0; usize::try_from(parts.min(VECTOR_PARTS_MAX)).ok()? * VECTOR_PART_BYTES];
    File::open(thread.join("mem")).ok()?.read_exact_at(&mut vector, address).ok()?;
    let mut lengths = vector.chunks_exact(VECTOR_PART_BYTES).map(|part| part[8..].try_into().map(u64::from_ne_bytes));
    lengths.try_fold(0_u64, |sum, length| Some(sum.saturating_add(length.ok()?)))
}

/// The path at this address of a thread's memory, as this process reaches it.
fn path_at(thread: &Path, address: u64) -> Option<PathBuf> {
    let mut bytes = vec![0; PATH_BYTES_MAX];
    let length = File::open(thread.join("mem")).ok()?.read_at(&mut bytes, address).ok()?;
    let end = bytes[..length].iter().position(|byte| *byte == 0)?;
    let path = Path::new(std::ffi::OsStr::from_bytes(&bytes[..end]));
    Some(match path.strip_prefix("/") {
        Ok(below_root) => thread.join("root").join(below_root),
        Err(_) => thread.join("cwd").join(path),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn calls_are_told_from_what_is_none() {
        let line = "18 0x7 0x55d0 0x2000 0x1c000 0x0 0xffffffffffffffff 0x7ffc 0x7f\n";
        let expected = Call { number: 18, arguments: [7, 0x55d0, 0x2000, 0x1c000, 0, u64::MAX] };
        assert_eq!(Call::parse(line), Some(expected));
        for none in ["", "running\n", "-1 0x7ffc 0x7f\n", "18 0x7\n", "18 7 0 0 0 0 0"] {
            assert_eq!(Call::parse(none), None, "{none:?}");
        }
    }

    #[test]
    fn truncations_are_told_from_other_calls() {
        let call = |number: i64| format!("{number} 0x7 0x2000 0x0 0x0 0x0 0x0 0x7ffc 0x7f\n");
        for (line, expected) in [
            (call(libc::SYS_ftruncate), Doing::Truncation),
            (call(libc::SYS_truncate), Doing::Truncation),
            (call(libc::SYS_pread64), Doing::Other),
            ("running\n".to_owned(), Doing::Executing),
            ("-1 0x7ffc 0x7f\n".to_owned(), Doing::Other),
            (String::new(), Doing::Other),
        ] {
            assert_eq!(Doing::parse(&line), expected, "{line:?}");
        }
    }

    proptest! {
        #[test]
        fn no_line_panics(line: String) {
            let _ = Doing::parse(&line);
        }
    }
}
