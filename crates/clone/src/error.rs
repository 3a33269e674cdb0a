//! What can go wrong when a clone is made.

use std::io;
use std::path::{Path, PathBuf};

use onecopy_postgres::PostgresError;

/// What went wrong, on what, why, and what to do.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum CloneError {
    #[error("cannot {action} {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("the clone's files do not fit the image: {files} files or their bitmap for {wanted} of the image")]
    Filling { files: usize, wanted: usize },
    #[error("the kernel refuses to {action}: {source}")]
    Kernel { action: &'static str, source: io::Error },
    #[error(
        "a clone's server cannot keep its data's fanotify group open: the kernel refuses io_uring: {source} (set the \
         sysctl kernel.io_uring_disabled to 0 or 1, let a container's seccomp filter allow io_uring_setup and \
         io_uring_register, or use --mode copy)"
    )]
    Pin { source: io::Error },
    #[error(transparent)]
    Postgres(#[from] PostgresError),
    #[error("cannot {action} on the source: {source}")]
    Sql { action: &'static str, source: tokio_postgres::Error },
    #[error("cannot clone {path}: {reason}")]
    CannotClone { path: PathBuf, reason: String },
    #[error("the clone service of {directory}: {reason}")]
    Service { directory: PathBuf, reason: String },
    #[error("{server} cannot be cloned: {reason}")]
    Unsuitable { server: String, reason: String },
    #[error(transparent)]
    Shared(std::sync::Arc<CloneError>),
    #[error(
        "{path} cannot be cloned lazily: {needed} files would be open at once and this process may have {allowed}; \
         raise the limit of open files (LimitNOFILE= of its unit, ulimit -n) or use --mode copy"
    )]
    TooManyFiles { path: PathBuf, needed: u64, allowed: u64 },
    #[error("the method {method} is not possible: {reason}")]
    Impossible { method: crate::methods::MethodName, reason: String },
    #[error(
        "process {process_id} has {path} open since before it was watched, and does not close it; it may have stopped: \
         end that process"
    )]
    Unarmed { process_id: u32, path: PathBuf },
    #[error("{path} was made since the source's processes were last examined; try again")]
    NewDirectory { path: PathBuf },
    #[error("the source's accesses waited for {waited_ms} ms and were let go; the freeze is void")]
    FreezeTimeout { waited_ms: u64 },
    #[error("the standby has not replayed {position} within {waited_s} s, where its processes would close their files")]
    BarrierTimeout { position: String, waited_s: u64 },
    #[error("the source is being frozen already")]
    FreezeUnderWay,
    #[error("keys in {path}: {reason}")]
    Keys { path: PathBuf, reason: String },
    #[error("the host {peer}: {reason}")]
    Network { peer: String, reason: String },
    #[error("the host {peer}: no trust: {reason}")]
    Trust { peer: String, reason: String },
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
