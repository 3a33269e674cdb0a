//! QEMU's process: our child, or one that an earlier process has started.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitStatus;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::unix::AsyncFd;
use tokio::process::Child;

use crate::{HypervisorError, MachineDirectory, handle};

/// `struct flock` has its kinds of locks as short numbers, 0 to 2.
const WRITE_LOCK: libc::c_short = libc::F_WRLCK as libc::c_short;
const UNLOCKED: libc::c_short = libc::F_UNLCK as libc::c_short;

/// How often it is looked at whether a process that the kernel does not tell us of has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The process that holds the lock on the machine's process id file, as QEMU does while it lives.
pub(crate) fn running(directory: &MachineDirectory) -> Result<Option<u32>, HypervisorError> {
    let path = directory.process_id_file();
    // A lock for writing is asked about: the file must be open for writing.
    let file = match OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(HypervisorError::file("open", path)(error)),
    };
    // SAFETY: all of the structure is numbers, for which zero is one: a lock of the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = WRITE_LOCK;
    // SAFETY: the descriptor is open, and the kernel writes into the structure only, which lives.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut lock) } != 0 {
        return Err(HypervisorError::file("look at the lock of", path)(io::Error::last_os_error()));
    }
    // Source: fcntl_locking(2). A lock of an open file description, which is not QEMU's, has -1 for its process.
    let is_held = lock.l_type != UNLOCKED;
    Ok(u32::try_from(lock.l_pid).ok().filter(|&process_id| is_held && process_id != 0))
}

/// A process and what is needed to signal it: never another one that has got its number.
#[derive(Debug)]
pub(crate) struct Process {
    process_id: u32,
    handle: OwnedFd,
}

/// Tells when the process has ended.
#[derive(Debug)]
pub(crate) enum Watch {
    /// Our child: its status is known.
    Child(Child),
    /// Another's.
    Adopted(AsyncFd<OwnedFd>),
}

impl Process {
    /// The process `process_id`, which is not reaped before this returns.
    ///
    /// # Errors
    /// There is none.
    fn open(process_id: u32) -> io::Result<Process> {
        let number = i32::try_from(process_id).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Process { process_id, handle: rustix::process::pidfd_open(number, PidfdFlags::NONBLOCK)? })
    }

    /// Our child.
    pub(crate) fn of_child(child: Child) -> io::Result<(Process, Watch)> {
        let process_id = child.id().ok_or(io::ErrorKind::NotFound)?;
        Ok((Process::open(process_id)?, Watch::Child(child)))
    }

    /// The process that runs the machine in `directory`, if one does.
    pub(crate) fn of_directory(directory: &MachineDirectory) -> Result<Option<(Process, Watch)>, HypervisorError> {
        let Some(process_id) = running(directory)? else { return Ok(None) };
        let process = match Process::open(process_id) {
            Ok(process) => process,
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => return Ok(None),
            // Whether it has ended is not known.
            Err(error) => return Err(HypervisorError::file("open the process of", directory.process_id_file())(error)),
        };
        // It may have ended in between, and its number been given to another one.
        if running(directory)? != Some(process_id) {
            return Ok(None);
        }
        let watched = handle::watched(&process.handle)
            .map_err(HypervisorError::file("watch the process of", directory.process_id_file()))?;
        Ok(Some((process, Watch::Adopted(watched))))
    }

    /// Its number.
    pub(crate) fn id(&self) -> u32 {
        self.process_id
    }

    /// Kills it; one that has ended is killed already.
    pub(crate) fn kill(&self) {
        let _ended = rustix::process::pidfd_send_signal(&self.handle, Signal::KILL);
    }
}

impl Watch {
    /// Waits until it has ended; how, if that is known.
    pub(crate) async fn ended(&mut self) -> Option<ExitStatus> {
        match self {
            Watch::Child(child) => loop {
                match child.wait().await {
                    Ok(status) => return Some(status),
                    Err(error) if error.raw_os_error() == Some(libc::ECHILD) => return None,
                    Err(_) => tokio::time::sleep(POLL_INTERVAL).await,
                }
            },
            // The descriptor becomes readable at the end of the process.
            Watch::Adopted(watched) => {
                while watched.readable().await.is_err() {
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_in_the_place_of_the_number_names_no_process() {
        let directory = tempfile::tempdir().unwrap();
        let machine = MachineDirectory::new(directory.path()).unwrap();
        assert_eq!(running(&machine).unwrap(), None);
        let elsewhere = directory.path().join("elsewhere");
        std::fs::write(&elsewhere, "").unwrap();
        std::os::unix::fs::symlink(&elsewhere, machine.process_id_file()).unwrap();
        assert!(matches!(running(&machine), Err(HypervisorError::File { .. })));
    }

    #[test]
    fn a_lock_without_a_process_is_nobody() {
        let directory = tempfile::tempdir().unwrap();
        let machine = MachineDirectory::new(directory.path()).unwrap();
        let held = std::fs::File::create(machine.process_id_file()).unwrap();
        // SAFETY: all of the structure is numbers, for which zero is one.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = WRITE_LOCK;
        // SAFETY: the descriptor is open, and the structure lives.
        let locked = unsafe { libc::fcntl(held.as_raw_fd(), libc::F_OFD_SETLK, &lock) };
        assert_eq!(locked, 0);
        assert_eq!(running(&machine).unwrap(), None);
    }
}
