//! What can fail around a directory.

use std::io;
use std::path::PathBuf;

use onecopy_postgres::PostgresError;

/// An operation on a directory that failed.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// A file or directory operation failed.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// What was tried, as a verb.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A Unix socket would have a path that the kernel refuses, and the short directory cannot be used either.
    #[error("the socket directory {path} belongs to another account; remove it or give a shorter directory with --dir")]
    SocketDirectoryForeign {
        /// The short directory.
        path: PathBuf,
    },
    /// The account of the servers cannot have the directory.
    #[error(transparent)]
    Postgres(#[from] PostgresError),
}

impl DirectoryError {
    /// Wraps a failed file operation; for `map_err`.
    pub fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> DirectoryError {
        let path = path.into();
        move |source| DirectoryError::File { action, path, source }
    }
}
