//! The only way for root into a directory that a server's account may write.
//!
//! That account can put a symbolic link, a hard link, a fifo or another directory in the place of any name there, at
//! any instant: so can every superuser of SQL. So nothing there is reached by a path from `/`: the directory is opened
//! once, the kernel resolves names below it without a link and without a step out of it (openat2(2), Linux 5.6), and
//! what was opened is looked at before it is used. Owner and mode are set on what is open. `docs/decisions/0021` tells
//! what is trusted.
//!
//! A process that is not root has no more rights than the account: nothing is looked at then, the kernel judges.

mod errors;
mod path_walk;
mod tree;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Statx, StatxFlags, Uid, chownat, fchmod,
    fchown, fstat, mkdirat, openat, openat2, readlinkat, renameat, statx, symlinkat, unlinkat,
};
use rustix::io::Errno;

use crate::ServiceUser;
use errors::{absent_is_fine, explained, is_link, refused};
use path_walk::{may_write, open_by_names, own_link, walk};
pub(crate) use tree::{make_directory, remove_tree};

/// What a file or a directory may have of a mode: no bit by which a program runs as somebody else.
const PERMISSIONS: u32 = 0o777;
/// The kernel asks to try again where a directory was renamed at this moment (openat2(2)).
const TRIES_MAX: u32 = 1000;
/// A file of more bytes is not read into memory: whoever may write it decides how large it is.
const READ_BYTES_MAX: u64 = 64 << 20;
/// Directories nested deeper are neither listed nor removed: whoever may make them decides how deep they are.
pub const DEPTH_MAX: usize = 64;
const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::RDONLY).union(OFlags::CLOEXEC);
/// A fifo or a device is never waited for.
const FILE: OFlags = OFlags::NONBLOCK.union(OFlags::NOCTTY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// An open directory, and whose it is.
#[derive(Debug)]
pub struct Directory {
    descriptor: OwnedFd,
    path: PathBuf,
    /// The account that may write it.
    user_id: u32,
    group_id: u32,
    /// It is root's, and so is the way to it: what is in it is what root has put there.
    is_trusted: bool,
    /// A data directory, in which PostgreSQL lays links of its own.
    is_top: bool,
}

impl Directory {
    /// Opens the directory of a server that somebody else has started: it belongs to the account of that server.
    ///
    /// # Errors
    /// Those of open(2); one that belongs to root and stands where another account could have put it.
    pub fn open(path: &Path) -> io::Result<Directory> {
        let opened = open_by_names(CWD, path)?;
        let found = fstat(&opened)?;
        if !is_root() || found.st_uid != 0 {
            return Ok(Directory::new(opened, path, (found.st_uid, found.st_gid), false));
        }
        let (opened, is_exposed) = walk(&std::path::absolute(path)?, None)?;
        let found = fstat(&opened)?;
        if is_exposed || found.st_uid != 0 {
            return Err(refused("it belongs to root and stands where another account may have put it"));
        }
        Ok(Directory::new(opened, path, (found.st_uid, found.st_gid), !may_write(&found, None)))
    }

    /// Opens a directory of this account, or one that this account could not have put there.
    ///
    /// # Errors
    /// Those of open(2); a symbolic link that this account may have laid, a directory that it may have put there and
    /// that is not its own.
    pub fn open_for(path: &Path, user: &ServiceUser) -> io::Result<Directory> {
        let account = (user.user_id(), user.group_id());
        if !is_root() {
            let opened = openat(CWD, path, DIRECTORY, Mode::empty())?;
            return Ok(Directory::new(opened, path, account, false));
        }
        let (opened, is_exposed) = walk(&std::path::absolute(path)?, Some(account))?;
        let found = fstat(&opened)?;
        let is_own = found.st_uid == account.0;
        if !is_own && is_exposed {
            return Err(refused(&format!("{path:?} does not belong to {}, who may have put it there", user.name())));
        }
        let is_trusted = !may_write(&found, Some(account));
        Ok(Directory::new(opened, path, account, is_trusted))
    }

    fn new(descriptor: OwnedFd, path: &Path, account: (u32, u32), is_trusted: bool) -> Directory {
        let (path, (user_id, group_id)) = (path.to_owned(), account);
        Directory { descriptor, path, user_id, group_id, is_trusted, is_top: true }
    }

    /// The path that it was opened by, for messages: what lies there now may be something else.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A name of the open directory itself, whatever lies at its path now; good while this lives.
    pub fn by_descriptor(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()))
    }

    /// Opens a directory below; through PostgreSQL's own links, those of tablespaces and of `pg_wal`, where they lead
    /// to a directory of the same account.
    ///
    /// # Errors
    /// Those of openat2(2); a link, a directory that the account could not list.
    pub fn open_directory(&self, relative: &Path) -> io::Result<Directory> {
        match self.open_beneath(relative, DIRECTORY) {
            Err(error) if is_link(&error) => match own_link(relative).filter(|_| self.is_top) {
                Some((link, rest)) => self.through_link(link)?.open_directory(rest),
                None => Err(error),
            },
            opened => self.below(opened?, relative),
        }
    }

    /// Opens a directory right in it, as one of the account that it belongs to: what root has made and not given away
    /// yet is root's.
    ///
    /// # Errors
    /// Those of openat2(2); a link.
    pub fn open_child(&self, name: &OsStr) -> io::Result<Directory> {
        let opened = openat(&self.descriptor, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()).map_err(explained)?;
        let found = fstat(&opened)?;
        Ok(Directory::new(opened, &self.path.join(name), (found.st_uid, found.st_gid), false))
    }

    fn below(&self, descriptor: OwnedFd, relative: &Path) -> io::Result<Directory> {
        let found = fstat(&descriptor)?;
        self.check_readable(&found)?;
        let is_trusted = self.is_trusted && found.st_uid == 0;
        let (path, (user_id, group_id)) = (self.path.join(relative), (self.user_id, self.group_id));
        Ok(Directory { descriptor, path, user_id, group_id, is_trusted, is_top: false })
    }

    /// The directory that one of PostgreSQL's own links leads to.
    fn through_link(&self, link: &Path) -> io::Result<Directory> {
        let (parent, name) = self.parent_of(link)?;
        let target = readlinkat(&parent, name, Vec::new())?;
        let opened = open_by_names(&parent, Path::new(OsStr::from_bytes(target.to_bytes())))?;
        if is_root() && fstat(&opened)?.st_uid != self.user_id {
            return Err(refused(&format!("{link:?} leads to {target:?}, which does not belong to the same account")));
        }
        self.below(opened, link)
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// Those of openat2(2); a link, what is no regular file, a file of somebody else that the account could not read
    /// itself.
    pub fn open_read(&self, relative: &Path) -> io::Result<File> {
        let file = File::from(self.open_file(relative, OFlags::RDONLY)?);
        self.check_readable(&regular(&file)?)?;
        Ok(file)
    }

    /// Opens a file for reading and writing.
    ///
    /// # Errors
    /// Those of openat2(2); a link, what is no regular file, a file of somebody else or one that has a second name.
    pub fn open_write(&self, relative: &Path) -> io::Result<File> {
        let file = File::from(self.open_file(relative, OFlags::RDWR)?);
        self.check_own(&regular(&file)?)?;
        Ok(file)
    }

    /// Opens a file to write behind its end; makes it, and makes it anew where something is that is no such file.
    ///
    /// # Errors
    /// As [`Directory::create_new`].
    pub fn open_append(&self, relative: &Path, user: &ServiceUser, mode: u32) -> io::Result<File> {
        let there = self.open_file(relative, OFlags::WRONLY | OFlags::APPEND).map(File::from);
        if let Ok(file) = there
            && regular(&file).and_then(|found| self.check_own(&found)).is_ok()
        {
            return Ok(file);
        }
        absent_is_fine(self.remove_file(relative))?;
        self.create(relative, user, mode, OFlags::WRONLY | OFlags::APPEND)
    }

    /// All of a file.
    ///
    /// # Errors
    /// As [`Directory::open_read`]; a file of more than 64 MiB.
    pub fn read(&self, relative: &Path) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        self.open_read(relative)?.take(READ_BYTES_MAX + 1).read_to_end(&mut content)?;
        match content.len() as u64 <= READ_BYTES_MAX {
            true => Ok(content),
            false => Err(refused(&format!("it has more than {READ_BYTES_MAX} bytes"))),
        }
    }

    /// All of a text.
    ///
    /// # Errors
    /// As [`Directory::open_read`].
    pub fn read_to_string(&self, relative: &Path) -> io::Result<String> {
        String::from_utf8(self.read(relative)?).map_err(io::Error::other)
    }

    /// Makes a file of this account; the name must be free.
    ///
    /// # Errors
    /// Those of openat2(2), fchown(2) and fchmod(2).
    pub fn create_new(&self, relative: &Path, user: &ServiceUser, mode: u32) -> io::Result<File> {
        self.create(relative, user, mode, OFlags::RDWR)
    }

    fn create(&self, relative: &Path, user: &ServiceUser, mode: u32, access: OFlags) -> io::Result<File> {
        let (parent, name) = self.parent_to_change(relative)?;
        let flags = access | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&parent, name, flags, Mode::RUSR | Mode::WUSR)?;
        give(&file, user)?;
        if mode & PERMISSIONS != 0o600 {
            set_mode(&file, mode)?;
        }
        Ok(File::from(file))
    }

    /// Writes a file of this account, over one that may be there: it is whole or not there, and not durable by itself.
    ///
    /// # Errors
    /// As [`Directory::create_new`].
    pub fn write(&self, relative: &Path, content: &[u8], user: &ServiceUser, mode: u32) -> io::Result<File> {
        // Whatever lies there, a fifo or another name of a foreign file, is not opened.
        absent_is_fine(self.remove_file(relative))?;
        let mut file = self.create_new(relative, user, mode)?;
        file.write_all(content)?;
        Ok(file)
    }

    /// Makes a directory of this account; one that is there gets the mode.
    ///
    /// # Errors
    /// Those of mkdirat(2); what is there is no directory of this account.
    pub fn make_directory(&self, relative: &Path, user: &ServiceUser, mode: u32) -> io::Result<()> {
        let (parent, name) = self.parent_to_change(relative)?;
        match mkdirat(&parent, name, Mode::RWXU) {
            Err(error) if error != Errno::EXIST => return Err(error.into()),
            _ => {}
        }
        let made = openat(&parent, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()).map_err(explained)?;
        let found = fstat(&made)?;
        if is_root() && found.st_uid != user.user_id() {
            // Ours, or somebody's who lost the race for the name: with nothing in it, it is nobody's loss.
            if found.st_uid != 0 || !is_empty(&made)? {
                return Err(refused(&format!("it is there and does not belong to {}", user.name())));
            }
            give(&made, user)?;
        }
        set_mode(&made, mode)
    }

    /// Lays a symbolic link of this account; the name must be free.
    ///
    /// # Errors
    /// Those of symlinkat(2).
    pub fn lay_link(&self, target: &Path, relative: &Path, user: &ServiceUser) -> io::Result<()> {
        let (parent, name) = self.parent_to_change(relative)?;
        symlinkat(target, &parent, name)?;
        if !is_root() {
            return Ok(());
        }
        let link = openat(&parent, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let found = fstat(&link)?;
        // Anything else has taken the name meanwhile, and is not ours to give.
        if FileType::from_raw_mode(found.st_mode) == FileType::Symlink && found.st_uid == 0 && found.st_nlink == 1 {
            let (owner, group) = (Uid::from_raw(user.user_id()), Gid::from_raw(user.group_id()));
            chownat(&link, c"", Some(owner), Some(group), AtFlags::EMPTY_PATH)?;
        }
        Ok(())
    }

    /// What a symbolic link says.
    ///
    /// # Errors
    /// Those of readlinkat(2).
    pub fn read_link(&self, relative: &Path) -> io::Result<PathBuf> {
        let (parent, name) = self.parent_of(relative)?;
        Ok(OsString::from_vec(readlinkat(&parent, name, Vec::new())?.into_bytes()).into())
    }

    /// Gives a name to what has another one, over what has it.
    ///
    /// # Errors
    /// Those of renameat(2).
    pub fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let ((from_parent, from_name), (to_parent, to_name)) =
            (self.parent_to_change(from)?, self.parent_to_change(to)?);
        Ok(renameat(&from_parent, from_name, &to_parent, to_name)?)
    }

    /// Removes a name that is no directory's.
    ///
    /// # Errors
    /// Those of unlinkat(2).
    pub fn remove_file(&self, relative: &Path) -> io::Result<()> {
        let (parent, name) = self.parent_to_change(relative)?;
        Ok(unlinkat(&parent, name, AtFlags::empty())?)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// Those of unlinkat(2).
    pub fn remove_directory(&self, relative: &Path) -> io::Result<()> {
        let (parent, name) = self.parent_to_change(relative)?;
        Ok(unlinkat(&parent, name, AtFlags::REMOVEDIR)?)
    }

    /// Whether it belongs to this account.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn belongs_to(&self, user: &ServiceUser) -> io::Result<bool> {
        Ok(fstat(&self.descriptor)?.st_uid == user.user_id())
    }

    /// Removes what is in it, of which `goes` says that it shall go: no more than its account could. What is in a
    /// directory of somebody else stays, and what is mounted there.
    ///
    /// # Errors
    /// Those of openat2(2) and unlinkat(2); directories nested deeper than [`DEPTH_MAX`].
    pub fn remove_content(&self, goes: impl Fn(&OsStr) -> bool) -> io::Result<()> {
        tree::empty(self.descriptor.as_fd(), self.user_id, 0, &goes)
    }

    /// The names in it, in the kernel's order.
    ///
    /// # Errors
    /// Those of getdents64(2).
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        names_in(&self.descriptor)
    }

    /// What a name right in it is; a link is not followed.
    ///
    /// # Errors
    /// Those of statx(2).
    pub fn look_at(&self, name: &OsStr) -> io::Result<Statx> {
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        Ok(statx(&self.descriptor, name, AtFlags::SYMLINK_NOFOLLOW, wanted)?)
    }

    /// Makes the names in it durable.
    ///
    /// # Errors
    /// Those of fsync(2).
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.descriptor)?)
    }

    /// The same, for a change of its names. What lies in a directory of somebody else is not for the account to change.
    fn parent_to_change<'a>(&self, relative: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
        let (parent, name) = self.parent_of(relative)?;
        let is_below = relative.parent().is_some_and(|parent| !parent.as_os_str().is_empty());
        if is_below && is_root() {
            let owner = fstat(&parent)?.st_uid;
            if owner != self.user_id && !(self.is_trusted && owner == 0) {
                return Err(refused("its directory belongs to somebody else"));
            }
        }
        Ok((parent, name))
    }

    /// The directory of a path below, and the last name of that path.
    fn parent_of<'a>(&self, relative: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
        let name = relative.file_name().ok_or_else(|| refused("the path has no name at its end"))?;
        let parent = match relative.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => self.open_directory(parent)?.descriptor,
            _ => self.descriptor.try_clone()?,
        };
        Ok((parent, name))
    }

    fn open_file(&self, relative: &Path, access: OFlags) -> io::Result<OwnedFd> {
        match self.open_beneath(relative, access | FILE) {
            Err(error) if is_link(&error) && self.is_top => match own_link(relative) {
                Some((link, rest)) => self.through_link(link)?.open_file(rest, access),
                None => Err(error),
            },
            opened => opened,
        }
    }

    fn open_beneath(&self, relative: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        for _ in 0..TRIES_MAX {
            match openat2(&self.descriptor, relative, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                opened => return opened.map_err(explained),
            }
        }
        Err(Errno::AGAIN.into())
    }

    /// Root reads nothing for the account that it could not read itself: another name of a foreign file (hard link), a
    /// mount of root's.
    fn check_readable(&self, found: &Stat) -> io::Result<()> {
        if !is_root() || self.is_trusted || found.st_uid == self.user_id {
            return Ok(());
        }
        let is_directory = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        let wanted = if is_directory { 0o5 } else { 0o4 };
        let shift = if found.st_gid == self.group_id { 3 } else { 0 };
        if (found.st_mode >> shift) & wanted == wanted {
            return Ok(());
        }
        Err(refused("it belongs to somebody else and the server's account may not read it"))
    }

    /// Root writes no file for the account that is not its own alone.
    fn check_own(&self, found: &Stat) -> io::Result<()> {
        if !is_root() || self.is_trusted {
            return Ok(());
        }
        if found.st_uid != self.user_id {
            return Err(refused("it belongs to somebody else"));
        }
        if found.st_nlink > 1 { Err(refused("it has a second name (hard link)")) } else { Ok(()) }
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

fn regular(file: &File) -> io::Result<Stat> {
    let found = fstat(file)?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => Ok(found),
        _ => Err(refused("it is no regular file")),
    }
}

fn give(made: impl AsFd, user: &ServiceUser) -> io::Result<()> {
    if is_root() {
        fchown(made, Some(Uid::from_raw(user.user_id())), Some(Gid::from_raw(user.group_id())))?;
    }
    Ok(())
}

fn set_mode(file: impl AsFd, mode: u32) -> io::Result<()> {
    Ok(fchmod(file, Mode::from_raw_mode(mode & PERMISSIONS))?)
}

fn names_in(directory: impl AsFd) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let name = entry?.file_name().to_bytes().to_owned();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name));
        }
    }
    Ok(names)
}

fn is_empty(directory: impl AsFd) -> io::Result<bool> {
    Ok(names_in(directory)?.is_empty())
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(test)]
mod tests;
