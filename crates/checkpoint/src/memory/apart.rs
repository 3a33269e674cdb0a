//! A thread that may touch the file of this process's own mount.
//!
//! Who asks for something waits for the server, and a close, also by a death, for all write-back. A process that is
//! killed then keeps its descriptors until somebody answers, those of its keeper's connection with them: the keeper
//! never hears that it should send somebody. So the file is touched by a thread with a table of descriptors of its own:
//! when that one waits, the others end, and close what is theirs. Not so with what is mapped, which all have in common:
//! a server that is killed in the moment in which it asks what is resident may still wait.

use std::io;
use std::path::Path;

use crate::CheckpointError;

/// The one descriptor that the thread shares: it may say something to standard error. What is standard input of a
/// keeper is its lock.
const SHARED: libc::c_uint = 2;

/// Does `work` on the file in a thread of its own, while `meanwhile` is done here; what both say. The work may use no
/// descriptors but those that it opens.
pub(super) fn apart<T: Send, U>(
    place: &Path,
    work: impl FnOnce() -> Result<T, CheckpointError> + Send,
    meanwhile: impl FnOnce() -> U,
) -> (Result<T, CheckpointError>, U) {
    std::thread::scope(|scope| {
        let worker = std::thread::Builder::new().name("memory-file".to_owned()).spawn_scoped(scope, || {
            leave_descriptors().map_err(CheckpointError::io("leave the descriptors for", place))?;
            work()
        });
        let here = meanwhile();
        let done = match worker.map_err(CheckpointError::io("start a thread for", place)) {
            Ok(worker) => worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(error) => Err(error),
        };
        (done, here)
    })
}

/// Gives this thread a table of its own, which has standard error alone, close_range(2).
fn leave_descriptors() -> io::Result<()> {
    for (first, last, flags) in [(0, SHARED - 1, libc::CLOSE_RANGE_UNSHARE), (SHARED + 1, libc::c_uint::MAX, 0)] {
        // SAFETY: the table is no longer another's, and this thread uses none of what was in it.
        if unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;

    use onecopy_testing::TestDirectory;

    use super::*;

    /// Device and inode of each descriptor of a thread.
    fn descriptors(thread: &str) -> Vec<(i32, u64, u64)> {
        let directory = format!("/proc/{thread}/fd");
        let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
        let looked = entries.filter_map(|path| {
            let found = std::fs::metadata(&path).ok()?;
            Some((path.file_name()?.to_str()?.parse().ok()?, found.dev(), found.ino()))
        });
        looked.collect()
    }

    /// Spec: D6
    #[test]
    fn t5_a_file_of_the_own_mount_is_in_no_table_with_what_a_keeper_listens_to() {
        let directory = TestDirectory::new().unwrap();
        let place = directory.join("ram");
        std::fs::write(&place, b"").unwrap();
        let (connection, heard) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = std::fs::metadata(&place).unwrap();
        let is_it = |found: &(i32, u64, u64)| (found.1, found.2) == (file.dev(), file.ino());
        let (opened, is_opened) = std::sync::mpsc::channel();
        let (looked, is_looked) = std::sync::mpsc::channel::<()>();
        let path = &place;
        let (worked, ()) = apart(
            path,
            move || {
                let own = File::open(path).unwrap();
                let number = own.as_raw_fd();
                opened.send((number, descriptors("thread-self"))).unwrap();
                is_looked.recv().unwrap();
                Ok(())
            },
            move || {
                let (number, theirs) = is_opened.recv().unwrap();
                // Beside it, only that in which the others were read.
                assert!(theirs.iter().any(|found| found.0 == number && is_it(found)), "{theirs:?}");
                assert!(theirs.iter().filter(|found| is_it(found)).count() == 1, "{theirs:?}");
                let others = theirs.iter().filter(|found| found.0 != number && found.0 != 2);
                assert!(others.count() <= 1, "{theirs:?}");
                assert!(!descriptors("thread-self").iter().any(is_it), "this thread has it, too");
                looked.send(()).unwrap();
            },
        );
        worked.unwrap();
        // What this thread has was not closed.
        assert!(connection.peer_addr().is_ok() && heard.peer_addr().is_ok());
    }
}
