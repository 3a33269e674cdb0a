//! The way from `/` to a directory, and who could have changed it.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2, readlinkat, statat};
use rustix::io::Errno;

use super::{DIRECTORY, refused};

const STICKY: u32 = 0o1000;
/// As many as the kernel follows (path_resolution(7)).
const LINKS_MAX: u32 = 40;

/// Opens a directory by a path that may have links, but none of `/proc` that lead out of all paths: by one of a process
/// that the account has put into a mount namespace of its own, root would come to what is mounted there.
pub(super) fn open_by_names(from: impl AsFd, path: &Path) -> io::Result<OwnedFd> {
    Ok(openat2(from, path, DIRECTORY, Mode::empty(), ResolveFlags::NO_MAGICLINKS)?)
}

/// Opens the directory at an absolute path, and tells whether the account (none: anybody but root) could have put there
/// what lies there. A symbolic link is followed only where the account could not have laid it.
pub(super) fn walk(path: &Path, account: Option<(u32, u32)>) -> io::Result<(OwnedFd, bool)> {
    let root = || openat(CWD, "/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let names = |path: &Path| {
        let kept = |component: Component<'_>| match component {
            Component::Normal(_) | Component::ParentDir => Some(component.as_os_str().to_owned()),
            _ => None,
        };
        path.components().rev().filter_map(kept).collect::<Vec<OsString>>()
    };
    let (mut here, mut rest) = (root()?, names(path));
    let (mut is_exposed, mut links) = (false, 0);
    while let Some(name) = rest.pop() {
        let above = fstat(&here)?;
        let is_open = may_write(&above, account);
        // Where everybody may make names, what is root's stays where it is.
        let stays = |found: &Stat| !is_open || (above.st_uid == 0 && above.st_mode & STICKY != 0 && found.st_uid == 0);
        match openat(&here, &name, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
        {
            Ok(next) => {
                is_exposed |= !stays(&fstat(&next)?);
                here = next;
            }
            Err(Errno::NOTDIR | Errno::LOOP) => {
                let found = statat(&here, &name, AtFlags::SYMLINK_NOFOLLOW)?;
                let target = readlinkat(&here, &name, Vec::new()).map_err(|_| Errno::NOTDIR)?;
                if is_exposed || !stays(&found) {
                    return Err(refused(&format!(
                        "{name:?} on the way is a symbolic link that its account may have laid"
                    )));
                }
                links += 1;
                if links > LINKS_MAX {
                    return Err(Errno::LOOP.into());
                }
                let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
                if target.is_absolute() {
                    here = root()?;
                }
                rest.extend(names(&target));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok((openat(&here, ".", DIRECTORY, Mode::empty())?, is_exposed))
}

/// Whether the account (none: anybody but root) may make names in this directory.
pub(super) fn may_write(directory: &Stat, account: Option<(u32, u32)>) -> bool {
    let by_group = directory.st_mode & 0o020 != 0;
    directory.st_mode & 0o002 != 0
        || match account {
            Some((user_id, group_id)) => directory.st_uid == user_id || (by_group && directory.st_gid == group_id),
            None => directory.st_uid != 0 || (by_group && directory.st_gid != 0),
        }
}

/// One of PostgreSQL's own links at the beginning of a path, and what comes behind it.
pub(super) fn own_link(relative: &Path) -> Option<(&Path, &Path)> {
    let mut components = relative.components();
    let link_end = |rest: &Path| relative.ancestors().nth(rest.components().count());
    if components.next()?.as_os_str() == "pg_tblspc" {
        let oid = components.next()?.as_os_str().to_str()?;
        if oid.is_empty() || !oid.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
    } else if !relative.starts_with("pg_wal") {
        return None;
    }
    let rest = components.as_path();
    Some((link_end(rest)?, rest))
}
