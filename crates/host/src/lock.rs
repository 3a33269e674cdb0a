//! One daemon a cluster: an advisory lock on a file of the directory, which the kernel gives back when its holder dies.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::HostError;

/// More than the digits of a process number; what else the file holds is not read.
const PROCESS_NUMBER_BYTES_MAX: u64 = 16;

/// The lock, held until it is dropped.
#[derive(Debug)]
pub struct DirectoryLock {
    /// Open file description that carries the lock.
    _file: File,
}

/// Who has the lock.
#[derive(Debug)]
pub enum LockState {
    /// Nobody had it; now the caller has.
    Taken(DirectoryLock),
    /// A living process has it; its number, if it has written it already.
    HeldBy(Option<u32>),
}

impl DirectoryLock {
    /// Takes the lock of `path` when it is free and writes this process's number into it.
    ///
    /// # Errors
    /// [`HostError::File`] when the file cannot be opened, locked or written.
    pub fn take(path: &Path) -> Result<LockState, HostError> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            .open(path)
            .map_err(HostError::file("open", path))?;
        match file.try_lock() {
            Ok(()) => {
                file.set_len(0).map_err(HostError::file("empty", path))?;
                file.rewind().map_err(HostError::file("rewind", path))?;
                writeln!(file, "{}", std::process::id()).map_err(HostError::file("write", path))?;
                Ok(LockState::Taken(DirectoryLock { _file: file }))
            }
            Err(TryLockError::WouldBlock) => Ok(LockState::HeldBy(holder(&mut file))),
            Err(TryLockError::Error(source)) => Err(HostError::file("lock", path)(source)),
        }
    }
}

/// The number in the file; none while the holder has not written it.
fn holder(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(PROCESS_NUMBER_BYTES_MAX).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_holder_is_told_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        std::fs::write(&path, "4194303 and more than a number\n").unwrap();
        let LockState::Taken(first) = DirectoryLock::take(&path).unwrap() else { panic!("a free lock was refused") };
        let LockState::HeldBy(holder) = DirectoryLock::take(&path).unwrap() else { panic!("the lock was given twice") };
        assert_eq!(holder, Some(std::process::id()));
        drop(first);
        assert!(matches!(DirectoryLock::take(&path).unwrap(), LockState::Taken(_)));
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = DirectoryLock::take(Path::new("/nonexistent/onecopy/lock")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/onecopy/lock"), "{error}");
    }
}
