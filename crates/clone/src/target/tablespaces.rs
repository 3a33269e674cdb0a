//! Tablespaces of a clone: directories of their own, because the source's stand where its links point.

use std::fs;
use std::path::{Path, PathBuf};

use super::Place;
use crate::CloneError;
use crate::image::Tablespace;

/// Where a data directory links to its tablespaces.
pub(crate) const TABLESPACES_DIRECTORY: &str = "pg_tblspc";
const MODE: u32 = 0o700;

impl Place {
    /// Where the link of a tablespace lies.
    fn tablespace_link(&self, tablespace: &Tablespace) -> PathBuf {
        self.directory.join(TABLESPACES_DIRECTORY).join(tablespace.oid.to_string())
    }

    /// Where it points.
    fn tablespace_directory(&self, tablespace: &Tablespace) -> PathBuf {
        self.tablespaces.join(tablespace.oid.to_string())
    }

    /// Makes a tablespace's directory and the link to it; what is there already stays.
    pub(crate) fn make_tablespace(&self, tablespace: &Tablespace) -> Result<(), CloneError> {
        self.user.create_directory(&self.tablespaces)?;
        // Also one that was there, empty: only what belongs to the account is ever removed.
        self.make_directory(&self.tablespaces, MODE)?;
        self.make_directory(&self.tablespace_directory(tablespace), MODE)?;
        self.link_tablespace(tablespace)
    }

    /// Lays the link, instead of one that may be there.
    pub(crate) fn link_tablespace(&self, tablespace: &Tablespace) -> Result<(), CloneError> {
        let (link, directory) = (self.tablespace_link(tablespace), self.tablespace_directory(tablespace));
        if fs::read_link(&link).is_ok_and(|found| found == directory) {
            return Ok(());
        }
        remove_if_there(fs::remove_file(&link), &link)?;
        std::os::unix::fs::symlink(&directory, &link).map_err(CloneError::file("link", &link))?;
        Ok(self.user.own(&link)?)
    }

    /// Removes a tablespace that the source has no more.
    pub(crate) fn remove_tablespace(&self, tablespace: &Tablespace) -> Result<(), CloneError> {
        let (link, directory) = (self.tablespace_link(tablespace), self.tablespace_directory(tablespace));
        remove_if_there(fs::remove_file(&link), &link)?;
        remove_if_there(fs::remove_dir_all(&directory), &directory)
    }
}

/// What is gone is removed.
pub(crate) fn remove_if_there(removed: std::io::Result<()>, path: &Path) -> Result<(), CloneError> {
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(CloneError::file("remove", path)(error)),
        _ => Ok(()),
    }
}
