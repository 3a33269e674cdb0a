//! One pass over a data directory.

use std::fs::{self, DirEntry, FileType};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::entry::{Place, Treatment, Unlogged};
use super::{FileIdentity, Image, ImageDirectory, ImageFile, SmallEntry, Tablespace};
use crate::CloneError;

/// The most that files may hold together which are copied while all accesses of the source wait.
pub const SMALL_FILES_BYTES_MAX: u64 = 64 << 20;
/// Permission bits of a file's mode.
const PERMISSIONS: u32 = 0o7777;
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
    /// Lists what a clone of this data directory needs. Entries that vanish meanwhile are left out.
    ///
    /// # Errors
    /// [`CloneError::File`], also where this is no data directory; [`CloneError::CannotClone`] names an entry that is not handled: a
    /// link where PostgreSQL has a directory or a file, a tablespace inside the data directory, small files that are not small.
    pub fn scan(data_directory: &Path) -> Result<Scan, CloneError> {
        let version_file = data_directory.join("PG_VERSION");
        let major_version = fs::read_to_string(&version_file).map_err(CloneError::file("read", &version_file))?;
        let mut walk = Walk { data_directory, major_version: major_version.trim().to_owned(), found: Scan::default() };
        walk.directory(Path::new(""), Place::Top)?;
        check_small(data_directory, &walk.found.small)?;
        Ok(walk.found)
    }
}

fn check_small(data_directory: &Path, small: &[SmallEntry]) -> Result<(), CloneError> {
    let total_bytes: u64 = small.iter().map(|file| file.size_bytes).sum();
    match small.iter().max_by_key(|file| file.size_bytes) {
        Some(largest) if total_bytes > SMALL_FILES_BYTES_MAX => Err(CloneError::CannotClone {
            path: data_directory.join(&largest.path),
            reason: format!(
                "files that are not PostgreSQL's relations hold {total_bytes} bytes, more than {SMALL_FILES_BYTES_MAX}; \
                 this one is the largest: move it out of the data directory"
            ),
        }),
        _ => Ok(()),
    }
}

struct Walk<'a> {
    data_directory: &'a Path,
    major_version: String,
    found: Scan,
}

impl Walk<'_> {
    /// Lists a directory; `path` is from the data directory.
    fn directory(&mut self, path: &Path, place: Place) -> Result<(), CloneError> {
        let absolute = self.data_directory.join(path);
        let Some(entries) = unless_gone(fs::read_dir(&absolute)).map_err(CloneError::file("list", &absolute))? else {
            return Ok(());
        };
        let entries = entries.collect::<io::Result<Vec<DirEntry>>>().map_err(CloneError::file("list", &absolute))?;
        let names: Vec<String> = entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        let unlogged = match place {
            Place::Database => Unlogged::learn(names.iter().map(String::as_str)),
            _ => Unlogged::default(),
        };
        for (entry, name) in entries.iter().zip(&names) {
            let path = path.join(entry.file_name());
            let kind = entry.file_type().map_err(CloneError::file("read", &path))?;
            match kind {
                _ if kind.is_file() && unlogged.drops(name) => {}
                _ if kind.is_file() => self.file(entry, path, place.treat(name))?,
                _ if kind.is_dir() => self.subdirectory(entry, path, place.enter(name, &self.major_version))?,
                _ if kind.is_symlink() => self.link(path, place, name)?,
                // Sockets of servers, pipes of people.
                _ => {}
            }
        }
        Ok(())
    }

    fn file(&mut self, entry: &DirEntry, path: PathBuf, treatment: Treatment) -> Result<(), CloneError> {
        if treatment == Treatment::Skip {
            return Ok(());
        }
        let Some(metadata) = unless_gone(entry.metadata()).map_err(CloneError::file("read", &path))? else {
            return Ok(());
        };
        let (size_bytes, mode) = (metadata.len(), metadata.mode() & PERMISSIONS);
        if treatment == Treatment::Copy {
            self.found.small.push(SmallEntry { path, mode, size_bytes });
        } else {
            self.found.image.files.push(ImageFile { path, size_bytes, mode, identity: FileIdentity::of(&metadata) });
        }
        Ok(())
    }

    fn subdirectory(&mut self, entry: &DirEntry, path: PathBuf, place: Option<Place>) -> Result<(), CloneError> {
        let Some(place) = place else { return Ok(()) };
        let Some(metadata) = unless_gone(entry.metadata()).map_err(CloneError::file("read", &path))? else {
            return Ok(());
        };
        let mode = metadata.mode() & PERMISSIONS;
        self.found.image.directories.push(ImageDirectory { path: path.clone(), mode });
        if place == Place::Hollow { Ok(()) } else { self.directory(&path, place) }
    }

    fn link(&mut self, path: PathBuf, place: Place, name: &str) -> Result<(), CloneError> {
        let absolute = self.data_directory.join(&path);
        let Some(metadata) = unless_gone(fs::metadata(&absolute)).map_err(CloneError::file("read", &absolute))? else {
            // It leads nowhere: the source has no use of it either.
            return Ok(());
        };
        if place == Place::Tablespaces {
            return self.tablespace(path, name);
        }
        let entered = place.enter(name, &self.major_version);
        match place {
            _ if file_type_is_other(metadata.file_type()) => Ok(()),
            _ if metadata.is_dir() && entered.is_none() => Ok(()),
            _ if metadata.is_dir() && entered.is_some_and(Place::may_be_link) => {
                self.found.image.directories.push(ImageDirectory { path, mode: DIRECTORY_MODE });
                Ok(())
            }
            Place::Top | Place::Other if metadata.is_file() => {
                // A certificate, or configuration that is kept elsewhere.
                if place.treat(name) == Treatment::Copy {
                    let (size_bytes, mode) = (metadata.len(), metadata.mode() & PERMISSIONS);
                    self.found.small.push(SmallEntry { path, mode, size_bytes });
                }
                Ok(())
            }
            _ => Err(CloneError::CannotClone {
                path: absolute,
                reason: "it is a symbolic link; only pg_wal and tablespaces may be links".to_owned(),
            }),
        }
    }

    fn tablespace(&mut self, path: PathBuf, name: &str) -> Result<(), CloneError> {
        let absolute = self.data_directory.join(&path);
        let cannot = |reason: &str| CloneError::CannotClone { path: absolute.clone(), reason: reason.to_owned() };
        let oid = name.parse().map_err(|_| cannot("a link in pg_tblspc whose name is no OID"))?;
        let location = fs::canonicalize(&absolute).map_err(CloneError::file("resolve", &absolute))?;
        let inside = fs::canonicalize(self.data_directory).map_err(CloneError::file("resolve", self.data_directory))?;
        if location.starts_with(&inside) {
            return Err(cannot("the tablespace lies inside the data directory"));
        }
        self.found.image.tablespaces.push(Tablespace { oid, location });
        self.directory(&path, Place::Tablespace)
    }
}

/// Neither file nor directory.
fn file_type_is_other(kind: FileType) -> bool {
    !kind.is_file() && !kind.is_dir()
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
