//! Whole directories of an account: made, emptied, removed.

use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, fstat, openat, openat2, unlinkat};
use rustix::io::Errno;

use super::{DEPTH_MAX, DIRECTORY, Directory, absent_is_fine, explained, is_empty, is_root, names_in, refused};
use crate::ServiceUser;

/// Makes a directory of this account at a path whose parent is there: one that is there stays as it is, but for an
/// empty one that root has made just so, and was killed before it gave it away.
pub(crate) fn make_directory(path: &Path, user: &ServiceUser) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    let parent = Directory::open_for(parent, user)?;
    let make = || parent.make_directory(Path::new(name), user, 0o700);
    match parent.look_at(name) {
        Err(error) if error.kind() == ErrorKind::NotFound => make(),
        Ok(found) if is_root() && found.stx_uid == 0 && found.stx_mode & 0o7777 == 0o700 => {
            let there = openat(&parent, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty());
            if there.is_ok_and(|there| is_empty(&there).unwrap_or(false)) { make() } else { Ok(()) }
        }
        found => found.map(drop),
    }
}

/// Removes a directory of this account with all that is in it, or an empty one that root has made for it; one that is
/// gone is removed.
pub(crate) fn remove_tree(path: &Path, user: &ServiceUser) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(refused("the path has no name at its end"));
    };
    let parent = match Directory::open_for(parent, user) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        parent => parent?,
    };
    let opened = match openat(&parent, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        opened => opened.map_err(explained)?,
    };
    if !is_root() || fstat(&opened)?.st_uid == user.user_id() {
        empty(opened.as_fd(), user.user_id(), 0, &|_| true)?;
    }
    absent_is_fine(unlinkat(&parent, name, AtFlags::REMOVEDIR).map_err(io::Error::from))
}

/// Removes what is in a directory of this account.
pub(super) fn empty(
    directory: BorrowedFd<'_>,
    user_id: u32,
    depth: usize,
    goes: &dyn Fn(&OsStr) -> bool,
) -> io::Result<()> {
    if depth > DEPTH_MAX {
        return Err(refused(&format!("directories are nested deeper than {DEPTH_MAX} in it: remove them by hand")));
    }
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    for name in names_in(directory)?.iter().filter(|name| goes(name)) {
        let removed = match openat2(directory, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty(), resolve) {
            Ok(inside) => {
                if !is_root() || fstat(&inside)?.st_uid == user_id {
                    empty(inside.as_fd(), user_id, depth + 1, &|_| true)?;
                }
                unlinkat(directory, name, AtFlags::REMOVEDIR)
            }
            Err(Errno::NOTDIR | Errno::LOOP) => unlinkat(directory, name, AtFlags::empty()),
            Err(Errno::XDEV) => return Err(refused(&format!("something is mounted at {name:?}: unmount it"))),
            Err(error) => Err(error),
        };
        absent_is_fine(removed.map_err(io::Error::from))?;
    }
    Ok(())
}
