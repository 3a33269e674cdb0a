//! The version guard: `PG_VERSION` of a clone that is not whole points to a descriptor that only its own postmaster
//! has.
//!
//! Whoever else starts a server there, also after the host has crashed, is told that `PG_VERSION` is missing. Only the
//! start of a postmaster reads it.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use onecopy_postgres::InheritedDescriptor;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::CloneLocation;
use super::marker::remove_if_there;
use crate::CloneError;

/// The number under which a clone's postmaster holds what keeps the fanotify group of its files open
/// ([`crate::fanotify::PinnedGroup`]): without a listener its reads wait, they never see what is not there.
pub const PIN_DESCRIPTOR_NUMBER: i32 = 872;
/// The number under which a clone's postmaster finds its version.
pub const VERSION_DESCRIPTOR_NUMBER: i32 = 873;

/// The file that tells PostgreSQL's version.
pub(crate) const VERSION_FILE: &str = "PG_VERSION";

/// The guard of one clone.
#[derive(Debug, Clone)]
pub struct VersionGuard {
    location: CloneLocation,
    major_version: u32,
}

impl VersionGuard {
    /// The guard of this place, laid or not.
    pub fn new(location: CloneLocation, major_version: u32) -> VersionGuard {
        VersionGuard { location, major_version }
    }

    /// Lays the link.
    ///
    /// # Errors
    /// [`CloneError::File`].
    pub fn install(&self) -> Result<(), CloneError> {
        let path = self.location.directory.join(VERSION_FILE);
        let (directory, name) = (self.location.open()?, Path::new(VERSION_FILE));
        remove_if_there(directory.remove_file(name), &path)?;
        let descriptor = format!("/proc/self/fd/{VERSION_DESCRIPTOR_NUMBER}");
        directory.lay_link(Path::new(&descriptor), name, &self.location.user).map_err(CloneError::file("link", &path))
    }

    /// What the postmaster must inherit to pass.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn descriptor(&self) -> Result<InheritedDescriptor, CloneError> {
        let refused = CloneError::kernel("make a file in memory");
        let make = || {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let mut file = File::from(memfd_create("onecopy-version", flags)?);
            writeln!(file, "{}", self.major_version)?;
            fcntl_add_seals(&file, SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE)?;
            Ok(Arc::new(file.into()))
        };
        let descriptor = make().map_err(refused)?;
        Ok(InheritedDescriptor { descriptor, number: VERSION_DESCRIPTOR_NUMBER })
    }

    /// Whether the directory has a guard instead of a version.
    pub fn is_installed(data_directory: &Path) -> bool {
        fs::symlink_metadata(data_directory.join(VERSION_FILE)).is_ok_and(|metadata| metadata.is_symlink())
    }

    /// Puts a real `PG_VERSION` in the guard's place, at once and durably: from here on the directory is anybody's.
    ///
    /// # Errors
    /// [`onecopy_postgres::PostgresError::File`].
    pub fn lift(&self) -> Result<(), CloneError> {
        let path = self.location.directory.join(VERSION_FILE);
        Ok(self.location.user.write_file(&path, format!("{}\n", self.major_version).as_bytes(), 0o600)?)
    }
}
