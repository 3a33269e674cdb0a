//! The option that says which cluster is meant.

use std::path::{Path, PathBuf};

use clap::Args;
use onecopy_host::{DIRECTORY_DEFAULT, DIRECTORY_VARIABLE, Directory};

/// Which cluster is meant.
#[derive(Debug, Args)]
pub struct DirectoryOption {
    /// The cluster's directory [default: $ONECOPY_DIR, else ./onecopy-data]
    #[arg(long, value_name = "DIRECTORY")]
    dir: Option<PathBuf>,
}

impl DirectoryOption {
    /// Whether the user has said which.
    pub fn is_named(&self) -> bool {
        self.dir.is_some() || std::env::var_os(DIRECTORY_VARIABLE).is_some_and(|value| !value.is_empty())
    }

    /// The directory, which may not exist.
    pub fn resolve(&self) -> anyhow::Result<Directory> {
        let named = self
            .dir
            .clone()
            .or_else(|| std::env::var_os(DIRECTORY_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from));
        Ok(Directory::new(named.as_deref().unwrap_or(Path::new(DIRECTORY_DEFAULT)))?)
    }
}
