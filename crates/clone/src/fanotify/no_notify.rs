//! Opening files so that nobody is told.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;

use onecopy_postgres::Directory;

use super::event::{EventBuffer, take_event};
use super::group::{MarkTarget, mark, new_group};
use crate::CloneError;

/// Opens files whose accesses raise no event in any group, even if their file is marked. The kernel gives such
/// descriptors only with an event; so this one makes an event (FAN_OPEN, in a group of its own) and keeps the
/// descriptor. Only a truncation is told of through any descriptor: do none.
#[derive(Debug)]
pub struct NoNotifyOpener {
    read: Mutex<OwnedFd>,
    write: Mutex<OwnedFd>,
}

impl NoNotifyOpener {
    /// A new one.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: no right to (CAP_SYS_ADMIN).
    pub fn new() -> Result<NoNotifyOpener, CloneError> {
        let flags = libc::FAN_CLASS_NOTIF | libc::FAN_UNLIMITED_QUEUE | libc::FAN_UNLIMITED_MARKS;
        let group = |mode| new_group(flags, mode).map_err(CloneError::kernel("open files quietly"));
        Ok(NoNotifyOpener { read: Mutex::new(group(libc::O_RDONLY)?), write: Mutex::new(group(libc::O_RDWR)?) })
    }

    /// Opens the regular file at `path` below a directory (no link) for reading, or for reading and writing.
    ///
    /// # Errors
    /// [`CloneError::File`]; not found, for one, when it has vanished.
    pub fn open(&self, directory: &Directory, path: &Path, write: bool) -> Result<File, CloneError> {
        let group = if write { &self.write } else { &self.read };
        let group = group.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Armed or not, this descriptor is used for no access, only to name the file whatever happens to its path.
        let named = if write { directory.open_write(path) } else { directory.open_read(path) };
        let opened = named.and_then(|named| self.open_in(&group, &named));
        opened.map_err(|error| CloneError::file("open", directory.path().join(path))(error))
    }

    fn open_in(&self, group: &OwnedFd, named: &File) -> std::io::Result<File> {
        let wanted = named.metadata()?;
        mark(group, libc::FAN_MARK_ADD, libc::FAN_OPEN, MarkTarget::File(named.as_fd()))?;
        let opened = File::open(format!("/proc/self/fd/{}", named.as_raw_fd()));
        mark(group, libc::FAN_MARK_REMOVE, libc::FAN_OPEN, MarkTarget::File(named.as_fd()))?;
        opened?;
        let mut quiet = None;
        // Others may have opened the file too, in this call's time or at the end of an earlier one's.
        for file in opened_files(group)? {
            let found = file.metadata()?;
            if (found.dev(), found.ino()) == (wanted.dev(), wanted.ino()) {
                quiet = Some(file);
            }
        }
        quiet.ok_or_else(|| std::io::Error::other("the kernel told of no opening"))
    }
}

/// The files of all events that wait in `group`.
fn opened_files(group: &OwnedFd) -> std::io::Result<Vec<File>> {
    let mut buffer = EventBuffer::default();
    let mut files = Vec::new();
    loop {
        let length = match rustix::io::read(group, &mut buffer.bytes[..]) {
            Ok(length) => length,
            Err(rustix::io::Errno::AGAIN) => return Ok(files),
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        let mut rest = &buffer.bytes[..length];
        while let Some((raw, after)) = take_event(rest) {
            rest = after;
            if raw.number >= 0 {
                // SAFETY: the kernel made this descriptor for this event, and it stands in its answer once.
                files.push(unsafe { File::from_raw_fd(raw.number) });
            }
        }
    }
}
