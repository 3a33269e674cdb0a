//! The major versions that clones are proven on.

use std::path::{Path, PathBuf};

use anyhow::Context;
use onecopy_postgres::Binaries;

/// Where `make setup` unpacks what the system lacks, unless these variables name other places.
const ROOT_VARIABLE: &str = "ONECOPY_POSTGRESQL_ROOT";
const ROOT_DEFAULT: &str = "/opt/onecopy";
const SEVENTEEN_VARIABLE: &str = "ONECOPY_POSTGRESQL_17";

/// A major version of PostgreSQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// The system's own.
    Fifteen,
    /// Beside it, as the ones below.
    Sixteen,
    /// Of the next release of Debian.
    Seventeen,
    /// The newest.
    Eighteen,
}

impl Version {
    /// Its number.
    pub fn major(self) -> u32 {
        match self {
            Version::Fifteen => 15,
            Version::Sixteen => 16,
            Version::Seventeen => 17,
            Version::Eighteen => 18,
        }
    }

    /// Its programs.
    ///
    /// # Errors
    ///
    /// It is not installed; the remedy is named.
    pub fn binaries(self) -> anyhow::Result<Binaries> {
        let below = Path::new("usr/lib/postgresql").join(self.major().to_string()).join("bin");
        let root = std::env::var_os(ROOT_VARIABLE).map_or_else(|| ROOT_DEFAULT.into(), PathBuf::from);
        let unpacked = root.join(format!("postgresql-{}", self.major()));
        let unpacked = match std::env::var_os(SEVENTEEN_VARIABLE) {
            Some(named) if self == Version::Seventeen => named.into(),
            _ => unpacked,
        };
        let places = [unpacked.join(&below), unpacked.join("bin"), Path::new("/").join(&below)];
        let there = places.iter().find(|place| place.join("postgres").exists());
        let directory = there.with_context(|| format!("no PostgreSQL {} in {places:?}: make setup", self.major()))?;
        Ok(Binaries::in_directory(directory)?)
    }
}
