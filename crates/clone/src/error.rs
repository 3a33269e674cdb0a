//! What can go wrong when a clone is made.

use std::io;
use std::path::{Path, PathBuf};

use onecopy_postgres::PostgresError;

/// What went wrong, on what, why, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum CloneError {
    /// A file cannot be used.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// What is to be filled does not fit its image.
    #[error("the clone's files do not fit the image: {files} files or their bitmap for {wanted} of the image")]
    Filling {
        /// Files that were given.
        files: usize,
        /// Files of the image.
        wanted: usize,
    },
    /// The kernel refused to tell of accesses.
    #[error("the kernel refuses to {action}: {source}")]
    Kernel {
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// A clone's server could not be made to wait for its data.
    #[error(
        "a clone's server cannot keep its data's fanotify group open: the kernel refuses io_uring: {source} (set the \
         sysctl kernel.io_uring_disabled to 0 or 1, let a container's seccomp filter allow io_uring_setup and \
         io_uring_register, or use --mode copy)"
    )]
    Pin {
        /// Why not.
        source: io::Error,
    },
    /// The server said no.
    #[error(transparent)]
    Postgres(#[from] PostgresError),
    /// The server refused a statement.
    #[error("cannot {action} on the source: {source}")]
    Sql {
        /// What was tried.
        action: &'static str,
        /// The server's words.
        source: tokio_postgres::Error,
    },
    /// Something in the data directory that clones do not handle.
    #[error("cannot clone {path}: {reason}")]
    CannotClone {
        /// What it is.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A clone service refused, failed or cannot be reached.
    #[error("the clone service of {directory}: {reason}")]
    Service {
        /// Where it is met; its log is there, too.
        directory: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A server cannot be cloned as it is.
    #[error("{server} cannot be cloned: {reason}")]
    Unsuitable {
        /// Who, host, port and user.
        server: String,
        /// Why not, and what to do.
        reason: String,
    },
    /// What several clones failed by together.
    #[error(transparent)]
    Shared(std::sync::Arc<CloneError>),
    /// This process may not have as many open files as there would be.
    #[error(
        "{path} cannot be cloned lazily: {needed} files would be open at once and this process may have {allowed}; \
         raise the limit of open files (LimitNOFILE= of its unit, ulimit -n) or use --mode copy"
    )]
    TooManyFiles {
        /// The source's data directory.
        path: PathBuf,
        /// How many, with those that are open already and those that are kept free.
        needed: u64,
        /// How many may be.
        allowed: u64,
    },
    /// A method that was asked for is not possible here.
    #[error("the method {method} is not possible: {reason}")]
    Impossible {
        /// The method.
        method: crate::methods::MethodName,
        /// Why not.
        reason: String,
    },
    /// Somebody would write unseen.
    #[error(
        "process {process_id} has {path} open since before it was watched, and does not close it; it may have stopped: \
         end that process"
    )]
    Unarmed {
        /// Who.
        process_id: u32,
        /// Which file.
        path: PathBuf,
    },
    /// A database was made while the source was about to be frozen.
    #[error("{path} was made since the source's processes were last examined; try again")]
    NewDirectory {
        /// Its directory.
        path: PathBuf,
    },
    /// The freeze is over before it was used.
    #[error("the source's accesses waited for {waited_ms} ms and were let go; the freeze is void")]
    FreezeTimeout {
        /// How long.
        waited_ms: u64,
    },
    /// A standby is too far behind.
    #[error("the standby has not replayed {position} within {waited_s} s, where its processes would close their files")]
    BarrierTimeout {
        /// Where in the write-ahead log.
        position: String,
        /// How long.
        waited_s: u64,
    },
    /// Two at once.
    #[error("the source is being frozen already")]
    FreezeUnderWay,
    /// A host's keys cannot be made or used.
    #[error("keys in {path}: {reason}")]
    Keys {
        /// Where.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Another host cannot be asked.
    #[error("the host {peer}: {reason}")]
    Network {
        /// Its address.
        peer: String,
        /// What is wrong.
        reason: String,
    },
}

impl CloneError {
    /// For `map_err`: `action` on `path` failed.
    pub fn file(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> CloneError {
        let path = path.as_ref().to_owned();
        move |source| CloneError::File { action, path, source }
    }

    /// For `map_err`: the kernel refused `action`.
    pub fn kernel(action: &'static str) -> impl FnOnce(io::Error) -> CloneError {
        move |source| CloneError::Kernel { action, source }
    }

    /// For `map_err`: the source refused `action`.
    pub fn sql(action: &'static str) -> impl FnOnce(tokio_postgres::Error) -> CloneError {
        move |source| CloneError::Sql { action, source }
    }
}
