//! One pass over a data directory.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use onecopy_postgres::{DEPTH_MAX, Directory};
use rustix::fs::{FileType, Statx};

use super::entry::{DirectoryKind, Treatment, Unlogged};
use super::{FileIdentity, Image, ImageDirectory, ImageFile, SmallEntry, Tablespace};
use crate::CloneError;
use crate::target::{MARKER_FILE, VERSION_FILE};

/// The most that files may hold together which are copied while all accesses of the source wait.
pub const SMALL_FILES_BYTES_MAX: u64 = 64 << 20;
/// What a clone has of a mode: no bit by which a program runs as somebody else.
const PERMISSIONS: u32 = 0o777;
/// Of a directory where the source has a link: what initdb gives it.
const DIRECTORY_MODE: u32 = 0o700;

/// What one pass has found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Scan {
    /// Directories, files that are filled on demand, tablespaces.
    pub image: Image,
    /// Files that are copied at the freeze.
    pub small: Vec<SmallEntry>,
}

impl Image {
    /// Lists what a clone of this data directory needs. Entries that vanish meanwhile are left out, and so are, as
    /// PostgreSQL's own base backup has it, symbolic links that are not PostgreSQL's: what they lead to is not read.
    ///
    /// # Errors
    /// [`CloneError::File`], also where this is no data directory; [`CloneError::CannotClone`] names an entry that is
    /// not handled: a link where PostgreSQL has a directory or a file, a tablespace inside the data directory, small
    /// files that are not small.
    pub fn scan(data_directory: &Path) -> Result<Scan, CloneError> {
        let opened = Directory::open(data_directory).map_err(CloneError::file("read", data_directory))?;
        Image::scan_open(&opened)
    }

    /// The same of a directory that is open.
    pub(crate) fn scan_open(data_directory: &Directory) -> Result<Scan, CloneError> {
        check_whole(data_directory)?;
        let version = data_directory.read_to_string(Path::new("PG_VERSION"));
        let version = version.map_err(CloneError::file("read", data_directory.path().join("PG_VERSION")))?;
        let mut walk = Walk { data_directory, major_version: version.trim().to_owned(), found: Scan::default() };
        walk.directory(data_directory, Path::new(""), DirectoryKind::Top)?;
        check_small(data_directory.path(), &walk.found.small)?;
        Ok(walk.found)
    }
}

/// Refuses a clone that is being filled: what it lacks would be read as zeros, or would have to be brought for another
/// one.
pub(crate) fn check_whole(data_directory: &Directory) -> Result<(), CloneError> {
    let is_link = |found: Statx| FileType::from_raw_mode(found.stx_mode.into()) == FileType::Symlink;
    let is_guarded = data_directory.look_at(VERSION_FILE.as_ref()).is_ok_and(is_link);
    if !is_guarded && data_directory.look_at(MARKER_FILE.as_ref()).is_err() {
        return Ok(());
    }
    let path = data_directory.path().to_owned();
    let reason =
        format!("it is itself a clone that is not whole; wait for it: onecopy clone --watch {}", path.display());
    Err(CloneError::CannotClone { path, reason })
}

fn check_small(data_directory: &Path, small: &[SmallEntry]) -> Result<(), CloneError> {
    let total_bytes: u64 = small.iter().map(|file| file.size_bytes).sum();
    match small.iter().max_by_key(|file| file.size_bytes) {
        Some(largest) if total_bytes > SMALL_FILES_BYTES_MAX => Err(CloneError::CannotClone {
            path: data_directory.join(&largest.path),
            reason: format!(
                "files that are not PostgreSQL's relations hold {total_bytes} bytes, more than \
                 {SMALL_FILES_BYTES_MAX}; this one is the largest: move it out of the data directory"
            ),
        }),
        _ => Ok(()),
    }
}

struct Walk<'a> {
    data_directory: &'a Directory,
    major_version: String,
    found: Scan,
}

impl Walk<'_> {
    /// Lists an open directory; `path` is from the data directory.
    fn directory(&mut self, open: &Directory, path: &Path, directory_kind: DirectoryKind) -> Result<(), CloneError> {
        let names = open.names().map_err(CloneError::file("list", self.absolute(path)))?;
        let texts: Vec<String> = names.iter().map(|name| name.to_string_lossy().into_owned()).collect();
        let unlogged = match directory_kind {
            DirectoryKind::Database => Unlogged::learn(texts.iter().map(String::as_str)),
            _ => Unlogged::default(),
        };
        for (entry, name) in names.iter().zip(&texts) {
            let path = path.join(entry);
            let looked = unless_gone(open.look_at(entry)).map_err(CloneError::file("read", self.absolute(&path)))?;
            let Some(found) = looked else { continue };
            match FileType::from_raw_mode(found.stx_mode.into()) {
                FileType::RegularFile if unlogged.drops(name) => {}
                FileType::RegularFile => self.file(&found, path, directory_kind.treat(name)),
                FileType::Directory => {
                    self.subdirectory(open, &found, path, directory_kind.enter(name, &self.major_version))?
                }
                FileType::Symlink => self.link(path, directory_kind, name)?,
                // Sockets of servers, pipes of people.
                _ => {}
            }
        }
        Ok(())
    }

    fn absolute(&self, path: &Path) -> PathBuf {
        self.data_directory.path().join(path)
    }

    fn file(&mut self, found: &Statx, path: PathBuf, treatment: Treatment) {
        let (size_bytes, mode) = (found.stx_size, u32::from(found.stx_mode) & PERMISSIONS);
        match treatment {
            Treatment::Skip => {}
            Treatment::Copy => self.found.small.push(SmallEntry { path, mode, size_bytes }),
            Treatment::Fill => {
                self.found.image.files.push(ImageFile { path, size_bytes, mode, identity: FileIdentity::told(found) });
            }
        }
    }

    fn subdirectory(
        &mut self,
        above: &Directory,
        found: &Statx,
        path: PathBuf,
        directory_kind: Option<DirectoryKind>,
    ) -> Result<(), CloneError> {
        let Some(directory_kind) = directory_kind else { return Ok(()) };
        let mode = u32::from(found.stx_mode) & PERMISSIONS;
        self.found.image.directories.push(ImageDirectory { path: path.clone(), mode });
        if directory_kind == DirectoryKind::Hollow {
            return Ok(());
        }
        if path.components().count() > DEPTH_MAX {
            let deep = std::io::Error::other(format!("directories are nested deeper than {DEPTH_MAX}"));
            return Err(CloneError::file("list", self.absolute(&path))(deep));
        }
        let name = Path::new(path.file_name().unwrap_or_default());
        let opened = unless_gone(above.open_directory(name)).map_err(CloneError::file("list", self.absolute(&path)))?;
        opened.map_or(Ok(()), |opened| self.directory(&opened, &path, directory_kind))
    }

    /// What a link leads to is looked at for a tablespace alone.
    fn link(&mut self, path: PathBuf, directory_kind: DirectoryKind, name: &str) -> Result<(), CloneError> {
        if directory_kind == DirectoryKind::Tablespaces {
            return self.tablespace(path, name);
        }
        match directory_kind.enter(name, &self.major_version) {
            // Such a link in `pg_wal` is not PostgreSQL's.
            None => Ok(()),
            Some(_) if directory_kind == DirectoryKind::Log => Ok(()),
            Some(entered) if entered.may_be_link() => {
                self.found.image.directories.push(ImageDirectory { path, mode: DIRECTORY_MODE });
                Ok(())
            }
            Some(DirectoryKind::Other) if !is_postgresqls(directory_kind, name) => {
                tracing::warn!(path = %self.absolute(&path).display(), "a symbolic link is not cloned");
                Ok(())
            }
            _ => Err(CloneError::CannotClone {
                path: self.absolute(&path),
                reason: "it is a symbolic link; only pg_wal and tablespaces may be links".to_owned(),
            }),
        }
    }

    fn tablespace(&mut self, path: PathBuf, name: &str) -> Result<(), CloneError> {
        let absolute = self.absolute(&path);
        let cannot = |reason: &str| CloneError::CannotClone { path: absolute.clone(), reason: reason.to_owned() };
        let oid = name.parse().map_err(|_| cannot("a link in pg_tblspc whose name is no OID"))?;
        let opened =
            unless_gone(self.data_directory.open_directory(&path)).map_err(CloneError::file("list", &absolute))?;
        // It leads nowhere: the source has no use of it either.
        let Some(opened) = opened else { return Ok(()) };
        let name_of = |open: &Directory| fs::read_link(open.by_descriptor());
        let location = name_of(&opened).map_err(CloneError::file("resolve", &absolute))?;
        let inside = name_of(self.data_directory).map_err(CloneError::file("resolve", self.data_directory.path()))?;
        if location.starts_with(&inside) {
            return Err(cannot("the tablespace lies inside the data directory"));
        }
        self.found.image.tablespaces.push(Tablespace { oid, location });
        self.directory(&opened, &path, DirectoryKind::Tablespace)
    }
}

/// Whether a name is one of PostgreSQL's directories or of the files in them, and not of a file that somebody keeps
/// beside.
fn is_postgresqls(directory_kind: DirectoryKind, name: &str) -> bool {
    match directory_kind {
        DirectoryKind::Top => name.starts_with("pg_") && !name.contains('.'),
        DirectoryKind::Other => false,
        _ => true,
    }
}

/// None for what was removed since it was listed.
fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
#[path = "scan_tests.rs"]
mod tests;
