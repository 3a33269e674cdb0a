//! What can go wrong with a disk.

use std::io;
use std::path::{Path, PathBuf};

use crate::source::SourceError;

/// What there is in a disk's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// A file, or something else that is no directory.
    File,
    /// A directory without a disk's header.
    Directory,
}

/// What is wrong with it, and what to do.
fn no_disk(directory: &Path, found: &Found) -> String {
    let directory = directory.display();
    match found {
        Found::Nothing => {
            format!("there is no {directory}; a disk is made with: onecopy disk create {directory} --size SIZE")
        }
        Found::File => format!(
            "{directory} is no disk: a disk is a directory, this is none; if it is a raw image, a disk over it is made \
             with: onecopy disk create DIRECTORY --base {directory}"
        ),
        Found::Directory => format!(
            "{directory} is no disk: the directory has no file `header`; name a disk's directory, or make one with: \
             onecopy disk create DIRECTORY --size SIZE"
        ),
    }
}

/// Why an operation on a disk failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum DiskError {
    #[error("{length} bytes at {offset} are not whole sectors within the disk's {size_bytes} bytes")]
    OutOfRange { offset: u64, length: u64, size_bytes: u64 },
    #[error("segments of {segments_bytes} bytes do not describe {data_bytes} bytes of data")]
    Segments { segments_bytes: u64, data_bytes: u64 },
    #[error("the disk is closed")]
    Closed,
    #[error("no space left for the disk's data")]
    Full,
    #[error("the disk is read only since a failure: {reason}")]
    ReadOnly { reason: String },
    #[error(
        "the storage below {directory} failed earlier ({reason}): what was written and not flushed is lost; when the \
         storage is sound and no machine that saw the failure runs any more, remove the file `failed` there"
    )]
    Failed { directory: PathBuf, reason: String },
    #[error("the request's worker has panicked")]
    Panicked,
    #[error("the request was withdrawn")]
    Withdrawn,
    #[error("{directory} is held by {holder}")]
    Leased { directory: PathBuf, holder: String },
    #[error("{directory} exists and is not empty")]
    Exists { directory: PathBuf },
    #[error("{}", no_disk(.directory, .found))]
    NoDisk { directory: PathBuf, found: Found },
    #[error("a disk of {size_bytes} bytes is not possible: whole blocks of 4096 bytes, at most 8 TiB")]
    Size { size_bytes: u64 },
    #[error("{path}: {what}")]
    Format { path: PathBuf, what: String },
    #[error("epoch {epoch} is not retained")]
    UnknownEpoch { epoch: u64 },
    #[error("{retained} epochs are retained already: release some")]
    TooManyEpochs { retained: usize },
    #[error("there is no snapshot {name:?}")]
    UnknownSnapshot { name: String },
    #[error("there is a snapshot {name:?} already")]
    SnapshotExists { name: String },
    #[error("snapshot {name:?} is in use")]
    SnapshotInUse { name: String },
    #[error("{name:?} is no name for a snapshot: 1 to 128 printable characters without '/'")]
    SnapshotName { name: String },
    #[error("{snapshots} snapshots are the most a disk keeps")]
    TooManySnapshots { snapshots: usize },
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error("{action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

impl DiskError {
    /// The error of one system call, with what it was for; a full file system gets a variant of its own.
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> DiskError {
        match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => DiskError::Full,
            _ => DiskError::Io { action, path: path.to_owned(), source },
        }
    }

    pub(crate) fn format(path: &Path, what: impl Into<String>) -> DiskError {
        DiskError::Format { path: path.to_owned(), what: what.into() }
    }

    /// The errno that a server answers with: `EINVAL`, `ENOSPC`, `EROFS`, `ESHUTDOWN` or `EIO`.
    pub fn errno(&self) -> i32 {
        match self {
            DiskError::OutOfRange { .. } | DiskError::Segments { .. } => libc::EINVAL,
            DiskError::Full => libc::ENOSPC,
            DiskError::ReadOnly { .. } => libc::EROFS,
            DiskError::Closed => libc::ESHUTDOWN,
            _ => libc::EIO,
        }
    }
}
