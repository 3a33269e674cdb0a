//! Who has a disk: one holder at a time, on one host or on several that share the directory.
//!
//! The lock is on the open file `lease`, so it ends with its holder however that ends. The file's text tells the
//! lease's generation, which grows with every taking, and who took it: a newcomer names the one it waits for, and one
//! that takes the lease again sees whether somebody else had it in between.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::{DiskError, storage};

/// The file's name.
pub(crate) const NAME: &str = "lease";

/// How long to sleep between two tries: a hand-over waits at most this longer than it must.
const TRY_INTERVAL: Duration = Duration::from_millis(1);

/// More than the text has.
const TEXT_BYTES_MAX: u64 = 4096;

/// A disk's lease, held until it is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    /// Its lock is the lease.
    _file: File,
    generation: u64,
}

impl Lease {
    /// Takes the lease, waiting for another holder up to `timeout`.
    pub(crate) fn take(directory: &Path, timeout: Duration) -> Result<Lease, DiskError> {
        let path = directory.join(NAME);
        let file = storage::open(&path, OpenOptions::new().write(true).create(true));
        let mut file = file.map_err(|error| DiskError::io("open", &path, error))?;
        let deadline = Instant::now() + timeout;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(TRY_INTERVAL),
                Err(TryLockError::WouldBlock) => return Err(held(directory, &path)),
                Err(TryLockError::Error(error)) => return Err(DiskError::io("lock", &path, error)),
            }
        }
        let text = storage::read_all(&file, TEXT_BYTES_MAX).map_err(|error| DiskError::io("read", &path, error))?;
        let last = generation(&String::from_utf8_lossy(&text), &path)?;
        let no_next = || DiskError::format(&path, format!("there is no generation behind {last}"));
        let generation = last.checked_add(1).ok_or_else(no_next)?;
        write(&mut file, generation).map_err(|error| DiskError::io("write", &path, error))?;
        Ok(Lease { _file: file, generation })
    }

    /// How often the lease has been taken, this time included.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }
}

fn held(directory: &Path, path: &Path) -> DiskError {
    let text = storage::read_whole(path, TEXT_BYTES_MAX).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let holder = text.lines().nth(1).filter(|line| !line.is_empty()).unwrap_or("somebody who has not said who it is");
    DiskError::Leased { directory: directory.to_owned(), holder: holder.to_owned() }
}

/// The first line's number; a file without text was never held.
fn generation(text: &str, path: &Path) -> Result<u64, DiskError> {
    match text.lines().next() {
        None => Ok(0),
        Some(line) => line.parse().map_err(|_| DiskError::format(path, format!("{line:?} is no generation"))),
    }
}

/// Lines of a fixed length are overwritten in place: a crash leaves the old text or the new one, as sectors do.
fn write(file: &mut File, generation: u64) -> std::io::Result<()> {
    let mut text = format!("{generation:020}\n{}\n", holder());
    text.truncate(SECTOR);
    file.rewind()?;
    file.write_all(format!("{text:\n<SECTOR$}").as_bytes())?;
    file.sync_data()
}

/// What is written at once.
const SECTOR: usize = 512;

fn holder() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("process {} ({}) on host {}", std::process::id(), name.trim_end(), host.trim_end())
}

/// Keeps a snapshot from being deleted while another disk or process reads it, or from being read while it is deleted.
#[derive(Debug)]
pub(crate) struct SnapshotLock {
    _file: File,
    path: PathBuf,
}

impl SnapshotLock {
    fn open(directory: &Path, number: u32) -> Result<(File, PathBuf), DiskError> {
        let path = directory.join(format!("snapshot.{number}.lock"));
        let file = storage::open(&path, OpenOptions::new().write(true).create(true));
        Ok((file.map_err(|error| DiskError::io("open", &path, error))?, path))
    }

    /// The reader's side: any number at once.
    pub(crate) fn shared(directory: &Path, name: &str, number: u32) -> Result<SnapshotLock, DiskError> {
        let (file, path) = SnapshotLock::open(directory, number)?;
        let outcome = file.try_lock_shared();
        locked(file, path, name, outcome)
    }

    /// The deleter's side.
    pub(crate) fn exclusive(directory: &Path, name: &str, number: u32) -> Result<SnapshotLock, DiskError> {
        let (file, path) = SnapshotLock::open(directory, number)?;
        let outcome = file.try_lock();
        locked(file, path, name, outcome)
    }

    /// Removes the lock's file: its snapshot is gone.
    pub(crate) fn remove(self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "a deleted snapshot's lock file stays behind");
        }
    }
}

fn locked(file: File, path: PathBuf, name: &str, outcome: Result<(), TryLockError>) -> Result<SnapshotLock, DiskError> {
    match outcome {
        Ok(()) => Ok(SnapshotLock { _file: file, path }),
        Err(TryLockError::WouldBlock) => Err(DiskError::SnapshotInUse { name: name.to_owned() }),
        Err(TryLockError::Error(error)) => Err(DiskError::io("lock", &path, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_behind_the_last_generation_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(NAME), u64::MAX.to_string()).unwrap();
        let error = Lease::take(directory.path(), Duration::ZERO).unwrap_err();
        assert!(matches!(error, DiskError::Format { .. }), "{error}");
        assert_eq!(std::fs::read_to_string(directory.path().join(NAME)).unwrap(), u64::MAX.to_string());
    }
}
