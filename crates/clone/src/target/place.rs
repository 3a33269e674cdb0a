//! Where a clone lies, and whose it is.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use onecopy_postgres::{PostgresError, ServiceUser};

use crate::CloneError;
use crate::plan::Plan;

/// Where a clone lies, and whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its data directory.
    pub directory: PathBuf,
    /// Where its tablespaces go, one directory for each, named by its OID.
    pub tablespaces: PathBuf,
    /// The account of its server.
    pub user: ServiceUser,
}

impl Place {
    /// That of a plan, with absolute paths.
    ///
    /// # Errors
    /// [`PostgresError::UnknownServiceUser`], [`CloneError::File`].
    pub fn of(plan: &Plan) -> Result<Place, CloneError> {
        let absolute = |path: &Path| std::path::absolute(path).map_err(CloneError::file("resolve", path));
        Ok(Place {
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

    /// Writes a file of the server's account, new or over an old one; not durable by itself.
    pub(crate) fn write(&self, path: &Path, content: &[u8], mode: u32) -> Result<(), CloneError> {
        let written = self.create(path, mode)?.write_all(content);
        written.map_err(CloneError::file("write", self.directory.join(path)))
    }

    /// Makes an empty file of the server's account, or empties an old one.
    pub(crate) fn create(&self, path: &Path, mode: u32) -> Result<File, CloneError> {
        let path = self.directory.join(path);
        let mut options = File::options();
        // A link that somebody laid is never written through.
        options.write(true).create(true).truncate(true).mode(mode).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(&path).map_err(CloneError::file("create", &path))?;
        self.user.own_file(&file, &path)?;
        file.set_permissions(fs::Permissions::from_mode(mode)).map_err(CloneError::file("set the mode of", &path))?;
        Ok(file)
    }

    /// Makes a directory of the server's account; one that exists gets owner and mode.
    pub(crate) fn make_directory(&self, path: &Path, mode: u32) -> Result<(), CloneError> {
        let path = self.directory.join(path);
        match fs::create_dir(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(CloneError::file("create", &path)(error));
            }
            _ => self.user.own(&path)?,
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(CloneError::file("set the mode of", &path))
    }
}
