//! A disk that is had only while a machine runs on it.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::{Disk, DiskError, Geometry, OpenOptions};

/// Takes a disk's lease when a machine's first ring starts, and gives it back when the last one stops: so another host
/// process can take over in between, and this one can go on when nobody did.
pub struct Attachment {
    directory: PathBuf,
    options: Box<dyn Fn() -> OpenOptions + Send + Sync>,
    users: Mutex<Users>,
}

/// The disk while somebody uses it, and how many do.
#[derive(Default)]
struct Users {
    count: usize,
    disk: Option<Disk>,
}

impl Attachment {
    /// Names the disk; nothing is opened. `options` is asked at each [`attach`](Attachment::attach).
    pub fn new(directory: impl Into<PathBuf>, options: impl Fn() -> OpenOptions + Send + Sync + 'static) -> Attachment {
        Attachment { directory: directory.into(), options: Box::new(options), users: Mutex::default() }
    }

    /// The disk's directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// What the disk is, also while somebody else has it.
    ///
    /// # Errors
    /// There is no disk.
    pub fn geometry(&self) -> Result<Geometry, DiskError> {
        Disk::geometry(&self.directory)
    }

    /// Takes the lease and opens the disk, with all that others wrote in the meantime; gives the open disk when it is
    /// attached already. Each call that succeeds is undone by one [`detach`](Attachment::detach): servers share a disk.
    ///
    /// # Errors
    /// [`DiskError::Leased`] when another holder did not give it back in time, and all that opening can meet.
    pub fn attach(&self) -> Result<Disk, DiskError> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let disk = match &users.disk {
            Some(disk) => disk.clone(),
            None => Disk::open(&self.directory, (self.options)())?,
        };
        users.disk = Some(disk.clone());
        users.count += 1;
        Ok(disk)
    }

    /// The last one that detaches drains, flushes and closes the disk and gives the lease back. Nothing to do when it
    /// is not attached.
    ///
    /// # Errors
    /// What closing met; the disk is detached nevertheless.
    pub fn detach(&self) -> Result<(), DiskError> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.count = users.count.saturating_sub(1);
        if users.count > 0 {
            return Ok(());
        }
        users.disk.take().map_or(Ok(()), |disk| disk.close())
    }

    /// The disk, while it is attached.
    pub fn current(&self) -> Option<Disk> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner).disk.clone()
    }
}
