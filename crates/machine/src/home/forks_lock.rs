//! Keeping a machine, and what its forks are made of, from going while that is done.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use onecopy_directory::is_same_file;

use super::MachineHome;
use crate::MachineError;

/// How long a fork waits while its parent forgets checkpoints.
const FORGET_TIMEOUT: Duration = Duration::from_secs(60);

/// How often it looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

impl MachineHome {
    /// Held shared while a fork of it is made, and alone by who forgets what that may need.
    fn forks_lock(&self) -> PathBuf {
        self.root.join("forks.lock")
    }

    /// While this is held, neither its checkpoints nor it itself go. Blocks while some are being forgotten, a minute at
    /// most.
    ///
    /// # Errors
    /// [`MachineError::Busy`], [`MachineError::File`].
    pub fn keep_for_forks(&self) -> Result<File, MachineError> {
        let path = self.forks_lock();
        let begun = Instant::now();
        loop {
            let lock = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
            let lock = lock.map_err(MachineError::file("open", &path))?;
            match lock.try_lock_shared() {
                // Removed with the machine, it keeps nothing.
                Ok(()) if !is_same_file(&lock, &path) => {}
                Ok(()) => return Ok(lock),
                Err(TryLockError::WouldBlock) if begun.elapsed() < FORGET_TIMEOUT => std::thread::sleep(LOOK_INTERVAL),
                Err(TryLockError::WouldBlock) => {
                    return Err(MachineError::Busy {
                        doing: format!("checkpoints of {} are being forgotten", self.name),
                    });
                }
                Err(TryLockError::Error(error)) => return Err(MachineError::file("lock", &path)(error)),
            }
        }
    }

    /// Held by the command that takes a checkpoint for a fork: one at a time is taken, and others wait for theirs.
    ///
    /// # Errors
    /// [`MachineError::File`].
    pub fn take_turn_to_fork(&self) -> Result<File, MachineError> {
        let path = self.root.join("fork.lock");
        let lock = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
        let lock = lock.and_then(|lock| lock.lock().map(|()| lock));
        lock.map_err(MachineError::file("lock", &path))
    }

    /// The same for who deletes it.
    ///
    /// # Errors
    /// [`MachineError::Busy`] while a fork of it is made or checkpoints are forgotten, [`MachineError::File`].
    pub fn keep_from_new_forks(&self) -> Result<File, MachineError> {
        let alone = self.keep_from_forks().map_err(MachineError::file("lock", self.forks_lock()))?;
        alone.ok_or_else(|| {
            let doing = format!("a fork of {} is being made, or its checkpoints are being forgotten", self.name);
            MachineError::Busy { doing }
        })
    }

    /// While this is held no fork of it is made; none while one is being made.
    pub(crate) fn keep_from_forks(&self) -> std::io::Result<Option<File>> {
        let path = self.forks_lock();
        loop {
            let lock = OpenOptions::new().create(true).append(true).mode(0o600).open(&path)?;
            match lock.try_lock() {
                Ok(()) if !is_same_file(&lock, &path) => {}
                Ok(()) => return Ok(Some(lock)),
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }
}
