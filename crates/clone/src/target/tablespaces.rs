//! Tablespaces of a clone: directories of their own, because the source's stand where its links point.

use std::path::{Path, PathBuf};

use super::marker::remove_if_there;
use super::{CloneLocation, remove_tablespaces};
use crate::CloneError;
use crate::image::Tablespace;

/// Where a data directory links to its tablespaces.
pub(crate) const TABLESPACES_DIRECTORY: &str = "pg_tblspc";
const MODE: u32 = 0o700;

impl CloneLocation {
    /// Where the link of a tablespace lies, from the clone's directory.
    fn tablespace_link(tablespace: &Tablespace) -> PathBuf {
        Path::new(TABLESPACES_DIRECTORY).join(tablespace.oid.to_string())
    }

    /// Where it points.
    fn tablespace_directory(&self, tablespace: &Tablespace) -> PathBuf {
        self.tablespaces.join(tablespace.oid.to_string())
    }

    /// Makes a tablespace's directory and the link to it; what is there already stays.
    pub(crate) fn make_tablespace(&self, tablespace: &Tablespace) -> Result<(), CloneError> {
        self.user.create_directory(&self.tablespaces)?;
        // Also one that was there, empty: only what belongs to the account is ever removed.
        self.make_top(&self.tablespaces, MODE)?;
        self.make_top(&self.tablespace_directory(tablespace), MODE)?;
        self.link_tablespace(tablespace)
    }

    /// Lays the link, instead of one that may be there.
    pub(crate) fn link_tablespace(&self, tablespace: &Tablespace) -> Result<(), CloneError> {
        let (link, directory) = (CloneLocation::tablespace_link(tablespace), self.tablespace_directory(tablespace));
        let data_directory = self.open()?;
        if data_directory.read_link(&link).is_ok_and(|found| found == directory) {
            return Ok(());
        }
        let absolute = self.directory.join(&link);
        remove_if_there(data_directory.remove_file(&link), &absolute)?;
        data_directory.lay_link(&directory, &link, &self.user).map_err(CloneError::file("link", absolute))
    }

    /// Removes a tablespace that the source has no more.
    pub(crate) fn remove_tablespace(&self, tablespace: &Tablespace) -> Result<(), CloneError> {
        let link = CloneLocation::tablespace_link(tablespace);
        remove_if_there(self.open()?.remove_file(&link), &self.directory.join(&link))?;
        remove_tablespaces(&self.tablespace_directory(tablespace), &self.user)
    }
}
