//! How much of processor and disk the background takes from others.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use rustix::process::setpriority_process;

/// The lowest processor priority (setpriority(2)).
const LOWEST: i32 = 19;
/// That of most processes.
const ORDINARY: i32 = 0;
/// `ioprio_set(2)`: `IOPRIO_WHO_PROCESS`.
const WHO_PROCESS: libc::c_int = 1;
/// Best effort, the lowest level. Not the idle class: who waits for a chunk in flight would wait for an idle disk.
const BEST_EFFORT_LOWEST: libc::c_int = (2 << 13) | 7;

/// Makes this thread one that only takes what others leave. Failing is harmless: it is a courtesy.
pub(super) fn lower() {
    // SAFETY: takes three numbers; 0 is the calling thread.
    let refused = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, BEST_EFFORT_LOWEST) } != 0;
    // On Linux the priority is the thread's: 0 is the caller.
    if setpriority_process(None, LOWEST).is_err() || refused {
        tracing::debug!("the background keeps its ordinary priority");
    }
}

/// Does `work` at ordinary priority: others wait for what this thread holds meanwhile.
pub(super) fn ordinary<R>(work: impl FnOnce() -> R) -> R {
    let raised = setpriority_process(None, ORDINARY).is_ok();
    let result = work();
    if raised {
        let _ = setpriority_process(None, LOWEST);
    }
    result
}

/// Has the kernel begin to write `file` to disk, all at once and without waiting; what went wrong is told by
/// [`wait_written_back`].
pub(super) fn start_writing_back(file: &File) {
    // SAFETY: takes a descriptor that `file` keeps open, and three numbers.
    unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Waits until all of `file` is written, and tells of a write that has failed since it was opened. It may still be in
/// the disk's own cache, and what the file system knows of it in memory (sync_file_range(2)).
pub(super) fn wait_written_back(file: &File) -> io::Result<()> {
    let how = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: takes a descriptor that `file` keeps open, and three numbers.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, how) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
