//! Discarding a clone's directories: only those that belong to the account of its server, which could remove them
//! itself.
//!
//! Where tablespaces are is told by a marker that this account may write, and it may replace directories above them by
//! links, while root removes. So whose a directory is is asked of the open directory, and what is in it is reached
//! through that alone.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use onecopy_postgres::{Directory, ServiceUser};
use rustix::process::geteuid;

use super::marker::{UNFINISHED_MARKER_FILE, above, is_directory, remove_if_there};
use super::{CloneLocation, MARKER_FILE};
use crate::CloneError;

/// Removes a clone's directory and its tablespaces; what is gone already is removed. The marker goes last: an
/// interrupted removal can still be told from a directory of somebody else.
///
/// # Errors
/// [`CloneError::File`], also for a directory that does not belong to the account of the clone's server; nothing of it
/// is removed then.
pub fn remove(location: &CloneLocation) -> Result<(), CloneError> {
    let directory = RemovedDirectory::open(&location.directory, &location.user, true)?;
    remove_tablespaces(&location.tablespaces, &location.user)?;
    let Some(directory) = directory else { return Ok(()) };
    directory.empty(|name| name != MARKER_FILE)?;
    directory.empty(|_| true)?;
    directory.remove()
}

/// Removes the directory with a clone's tablespaces; one that is gone already is removed.
///
/// # Errors
/// As [`remove`], also for a link: a marker, which the account may write, tells where they are.
pub fn remove_tablespaces(directory: &Path, user: &ServiceUser) -> Result<(), CloneError> {
    let Some(directory) = RemovedDirectory::open(directory, user, false)? else { return Ok(()) };
    directory.empty(|_| true)?;
    directory.remove()
}

/// Removes the directory for a clone's tablespaces that root has made and not given to the account yet: it is root's,
/// and nothing is in it. Only for a path that root itself has written down. Any other is left to [`remove`].
///
/// # Errors
/// [`CloneError::File`]: the way to it leads through what the account may have put there.
pub fn remove_ungiven(directory: &Path, user: &ServiceUser) -> Result<(), CloneError> {
    let (Some(above), Some(name)) = (directory.parent(), directory.file_name()) else { return Ok(()) };
    let above = match Directory::open_for(above, user) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        above => above.map_err(CloneError::file("remove", directory))?,
    };
    if above.look_at(name).is_ok_and(|found| found.stx_uid == 0) {
        // One with something in it stays.
        let _ = above.remove_directory(Path::new(name));
    }
    Ok(())
}

/// A directory that is being removed.
struct RemovedDirectory {
    path: PathBuf,
    above: Directory,
    directory: Directory,
}

impl RemovedDirectory {
    /// None when it is not there.
    fn open(path: &Path, user: &ServiceUser, may_be_link: bool) -> Result<Option<RemovedDirectory>, CloneError> {
        let open = || {
            let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(std::io::Error::other("it has no name"));
            };
            let above = Directory::open_for(above, user)?;
            if !may_be_link && above.read_link(Path::new(name)).is_ok() {
                return Err(std::io::Error::other("it is a symbolic link"));
            }
            let directory = Directory::open_for(path, user)?;
            match directory.belongs_to(user)? {
                true => Ok(RemovedDirectory { path: path.to_owned(), above, directory }),
                false => Err(std::io::Error::other(format!("it does not belong to {}", user.name()))),
            }
        };
        match open() {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some).map_err(CloneError::file("remove", path)),
        }
    }

    /// Removes what is in it, of which `goes` says that it shall go.
    fn empty(&self, goes: impl Fn(&OsStr) -> bool) -> Result<(), CloneError> {
        self.directory.remove_content(goes).map_err(CloneError::file("remove", &self.path))
    }

    /// Removes it when it is empty, or the link by which it is reached.
    fn remove(self) -> Result<(), CloneError> {
        let name = Path::new(self.path.file_name().unwrap_or_default());
        let removed = match self.above.remove_directory(name) {
            Err(error) if error.kind() == ErrorKind::NotADirectory => self.above.remove_file(name),
            removed => removed,
        };
        remove_if_there(removed, &self.path)
    }
}

/// Removes a directory of a clone that has no marker yet, and so nothing else: one in which something lies is left.
///
/// # Errors
/// [`CloneError::File`], also when something lies there.
pub fn remove_unmarked(directory: &Path) -> Result<(), CloneError> {
    let failed = || CloneError::file("remove", directory);
    let Some((above, name)) = above(directory).map_err(failed())? else { return Ok(()) };
    // Root's own is one that was not given away yet, and no marker is in it.
    if above.look_at(name).is_ok_and(|found| is_directory(&found) && (found.stx_uid != 0 || !geteuid().is_root())) {
        let inside = above.open_child(name).map_err(failed())?;
        remove_if_there(
            inside.remove_file(Path::new(UNFINISHED_MARKER_FILE)),
            &directory.join(UNFINISHED_MARKER_FILE),
        )?;
    }
    remove_if_there(above.remove_directory(Path::new(name)), directory)
}
