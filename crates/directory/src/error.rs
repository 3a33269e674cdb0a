//! What can fail around a directory.

use std::io;
use std::path::PathBuf;

use onecopy_postgres::PostgresError;

/// An operation on a directory that failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum DirectoryError {
    #[error("cannot {action} {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("the socket directory {path} belongs to another account; remove it or give a shorter directory with --dir")]
    SocketDirectoryForeign { path: PathBuf },
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
