//! Discarding a clone's directories: only those that belong to the account of its server, which could remove them itself.
//!
//! Where tablespaces are is told by a marker that this account may write, and it may replace directories above them by links, while root
//! removes. So whose a directory is is asked of the open directory, and what is in it is reached through that alone.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use onecopy_postgres::ServiceUser;
use rustix::fs::{AtFlags, Mode, OFlags, open, openat, unlinkat};

use super::marker::UNFINISHED_MARKER_FILE;
use super::tablespaces::remove_if_there;
use super::{MARKER_FILE, Place};
use crate::CloneError;

/// Removes a clone's directory and its tablespaces; what is gone already is removed. The marker goes last: an interrupted removal can
/// still be told from a directory of somebody else.
///
/// # Errors
/// [`CloneError::File`], also for a directory that does not belong to the account of the clone's server; nothing of it is removed then.
pub fn remove(place: &Place) -> Result<(), CloneError> {
    let directory = Doomed::open(&place.directory, &place.user, OFlags::empty())?;
    remove_tablespaces(&place.tablespaces, &place.user)?;
    let Some(directory) = directory else { return Ok(()) };
    directory.empty(|name| name != MARKER_FILE)?;
    directory.empty(|_| true)?;
    directory.remove()
}

/// Removes the directory with a clone's tablespaces; one that is gone already is removed.
///
/// # Errors
/// As [`remove`], also for a link.
pub fn remove_tablespaces(directory: &Path, user: &ServiceUser) -> Result<(), CloneError> {
    let Some(directory) = Doomed::open(directory, user, OFlags::NOFOLLOW)? else { return Ok(()) };
    directory.empty(|_| true)?;
    directory.remove()
}

/// A directory that is being removed.
struct Doomed {
    path: PathBuf,
    above: File,
    directory: File,
}

impl Doomed {
    /// None when it is not there.
    fn open(path: &Path, user: &ServiceUser, flags: OFlags) -> Result<Option<Doomed>, CloneError> {
        let failed = |error: std::io::Error| CloneError::file("remove", path)(error);
        let flags = flags | OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(failed(std::io::Error::other("it has no name")));
        };
        let opened = open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .and_then(|above| Ok((openat(&above, name, flags, Mode::empty())?, above)));
        let (directory, above) = match opened {
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            opened => opened.map_err(|error| failed(error.into()))?,
        };
        let (directory, above) = (File::from(directory), File::from(above));
        if directory.metadata().map_err(failed)?.uid() != user.user_id() {
            return Err(failed(std::io::Error::other(format!("it does not belong to {}", user.name()))));
        }
        Ok(Some(Doomed { path: path.to_owned(), above, directory }))
    }

    /// Removes what is in it, of which `goes` says that it shall go.
    fn empty(&self, goes: impl Fn(&OsStr) -> bool) -> Result<(), CloneError> {
        // By this name it is the open directory, whatever lies at its path now.
        let directory = PathBuf::from(format!("/proc/self/fd/{}", self.directory.as_raw_fd()));
        for entry in fs::read_dir(&directory).map_err(CloneError::file("read", &self.path))? {
            let entry = entry.map_err(CloneError::file("read", &self.path))?;
            if !goes(&entry.file_name()) {
                continue;
            }
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let path = entry.path();
            let removed = if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            remove_if_there(removed, &self.path.join(entry.file_name()))?;
        }
        Ok(())
    }

    /// Removes it when it is empty, or the link by which it is reached.
    fn remove(self) -> Result<(), CloneError> {
        let name = self.path.file_name().unwrap_or_default();
        let removed = match unlinkat(&self.above, name, AtFlags::REMOVEDIR) {
            Err(rustix::io::Errno::NOTDIR) => unlinkat(&self.above, name, AtFlags::empty()),
            removed => removed,
        };
        remove_if_there(removed.map_err(std::io::Error::from), &self.path)
    }
}

/// Removes a directory of a clone that has no marker yet, and so nothing else: one in which something lies is left.
///
/// # Errors
/// [`CloneError::File`], also when something lies there.
pub fn remove_unmarked(directory: &Path) -> Result<(), CloneError> {
    let unfinished = directory.join(UNFINISHED_MARKER_FILE);
    remove_if_there(fs::remove_file(&unfinished), &unfinished)?;
    remove_if_there(fs::remove_dir(directory), directory)
}
