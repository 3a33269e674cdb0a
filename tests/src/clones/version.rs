//! The major versions that clones are proven on.

use std::path::{Path, PathBuf};

use anyhow::Context;
use onecopy_postgres::Binaries;

/// Where `make setup` unpacks PostgreSQL 17, unless this environment variable names another place.
const UNPACKED_VARIABLE: &str = "ONECOPY_POSTGRESQL_17";
const UNPACKED_DEFAULT: &str = "/opt/onecopy/postgresql-17";

/// A major version of PostgreSQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// The system's own.
    Fifteen,
    /// Beside it.
    Seventeen,
}

impl Version {
    /// Its number.
    pub fn major(self) -> u32 {
        match self {
            Version::Fifteen => 15,
            Version::Seventeen => 17,
        }
    }

    /// Its programs.
    ///
    /// # Errors
    ///
    /// It is not installed; the remedy is named.
    pub fn binaries(self) -> anyhow::Result<Binaries> {
        let below = Path::new("usr/lib/postgresql").join(self.major().to_string()).join("bin");
        let unpacked = std::env::var_os(UNPACKED_VARIABLE).map_or_else(|| UNPACKED_DEFAULT.into(), PathBuf::from);
        let places = [unpacked.join(&below), Path::new("/").join(&below)];
        let there = places.iter().find(|place| place.join("postgres").exists());
        let directory = there.with_context(|| format!("no PostgreSQL {} in {places:?}: make setup", self.major()))?;
        Ok(Binaries::in_directory(directory)?)
    }
}
