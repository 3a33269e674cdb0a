//! Where a clone lies, and whose it is.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use onecopy_postgres::{Directory, PostgresError, ServiceUser};

use crate::CloneError;
use crate::plan::Plan;

/// Where a clone lies, and whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloneLocation {
    /// Its data directory.
    pub directory: PathBuf,
    /// Where its tablespaces go, one directory for each, named by its OID.
    pub tablespaces: PathBuf,
    /// The account of its server.
    pub user: ServiceUser,
}

impl CloneLocation {
    /// That of a plan, with absolute paths.
    ///
    /// # Errors
    /// [`PostgresError::UnknownServiceUser`], [`CloneError::File`].
    pub fn of(plan: &Plan) -> Result<CloneLocation, CloneError> {
        let absolute = |path: &Path| std::path::absolute(path).map_err(CloneError::file("resolve", path));
        Ok(CloneLocation {
            directory: absolute(&plan.target)?,
            tablespaces: absolute(&plan.tablespaces)?,
            user: ServiceUser::resolve(Some(&plan.user_name))?,
        })
    }

    /// Refuses a place where something lies: nothing of others is overwritten.
    pub(crate) fn check_free(&self) -> Result<(), CloneError> {
        for directory in [&self.directory, &self.tablespaces] {
            let occupied = match fs::read_dir(directory) {
                Ok(mut entries) => entries.next().is_some(),
                Err(error) => error.kind() != std::io::ErrorKind::NotFound,
            };
            if occupied {
                return Err(PostgresError::DataDirectoryNotEmpty { path: directory.clone() }.into());
            }
        }
        Ok(())
    }

    /// The clone's directory, open: it belongs to the account, or that account could not have put it there.
    pub(crate) fn open(&self) -> Result<Directory, CloneError> {
        Directory::open_for(&self.directory, &self.user).map_err(CloneError::file("open", &self.directory))
    }

    /// Writes a file of the server's account, new or over an old one; not durable by itself.
    pub(crate) fn write(&self, path: &Path, content: &[u8], mode: u32) -> Result<(), CloneError> {
        let written = self.open()?.write(path, content, &self.user, mode);
        written.map(drop).map_err(CloneError::file("write", self.directory.join(path)))
    }

    /// Makes an empty file of the server's account, in the place of an old one.
    pub(crate) fn create(&self, path: &Path, mode: u32) -> Result<File, CloneError> {
        let made = self.open()?.write(path, b"", &self.user, mode);
        made.map_err(CloneError::file("create", self.directory.join(path)))
    }

    /// Makes a directory in the clone's, of the server's account; one that exists gets the mode.
    pub(crate) fn make_directory(&self, path: &Path, mode: u32) -> Result<(), CloneError> {
        let made = self.open()?.make_directory(path, &self.user, mode);
        made.map_err(CloneError::file("create", self.directory.join(path)))
    }

    /// The same for one of the clone's own two, whose parent is there.
    pub(crate) fn make_top(&self, directory: &Path, mode: u32) -> Result<(), CloneError> {
        let made = match (directory.parent(), directory.file_name()) {
            (Some(parent), Some(name)) => Directory::open_for(parent, &self.user)
                .and_then(|parent| parent.make_directory(Path::new(name), &self.user, mode)),
            _ => Err(std::io::ErrorKind::InvalidInput.into()),
        };
        made.map_err(CloneError::file("create", directory))
    }
}
