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
pub enum DiskError {
    /// A request that is not whole sectors, or reaches past the end.
    #[error("{length} bytes at {offset} are not whole sectors within the disk's {size_bytes} bytes")]
    OutOfRange {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        length: u64,
        /// The disk's size.
        size_bytes: u64,
    },
    /// A request whose segments do not add up to its data.
    #[error("segments of {segments_bytes} bytes do not describe {data_bytes} bytes of data")]
    Segments {
        /// Sum of the segments' lengths.
        segments_bytes: u64,
        /// Bytes of data.
        data_bytes: u64,
    },
    /// The disk was closed, or is not attached.
    #[error("the disk is closed")]
    Closed,
    /// The file system that holds the disk is full. The write left what was there before.
    #[error("no space left for the disk's data")]
    Full,
    /// A write to the disk's files failed earlier: what is in them is not known, so nothing is written any more.
    #[error("the disk is read only since a failure: {reason}")]
    ReadOnly {
        /// The failure.
        reason: String,
    },
    /// A synchronization of the disk's files failed under an earlier holder, and nobody has looked at it since.
    #[error(
        "the storage below {directory} failed earlier ({reason}): what was written and not flushed is lost; when the \
         storage is sound and no machine that saw the failure runs any more, remove the file `failed` there"
    )]
    Failed {
        /// The disk's directory.
        directory: PathBuf,
        /// The failure.
        reason: String,
    },
    /// The thread that served a request met a defect of this program.
    #[error("the request's worker has panicked")]
    Panicked,
    /// Its requester has gone before it was done.
    #[error("the request was withdrawn")]
    Withdrawn,
    /// Somebody else has the disk.
    #[error("{directory} is held by {holder}")]
    Leased {
        /// The disk's directory.
        directory: PathBuf,
        /// Who holds it, as far as it says.
        holder: String,
    },
    /// There is something at the place of a new disk.
    #[error("{directory} exists and is not empty")]
    Exists {
        /// The directory.
        directory: PathBuf,
    },
    /// What was named is no disk.
    #[error("{}", no_disk(.directory, .found))]
    NoDisk {
        /// What was named.
        directory: PathBuf,
        /// What is there.
        found: Found,
    },
    /// A size that no disk can have.
    #[error("a disk of {size_bytes} bytes is not possible: whole blocks of 4096 bytes, at most 8 TiB")]
    Size {
        /// The size asked for.
        size_bytes: u64,
    },
    /// A file that is not what this version writes.
    #[error("{path}: {what}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// An epoch that never was, or was released.
    #[error("epoch {epoch} is not retained")]
    UnknownEpoch {
        /// Its number.
        epoch: u64,
    },
    /// More epochs retained than the disk keeps.
    #[error("{retained} epochs are retained already: release some")]
    TooManyEpochs {
        /// How many are.
        retained: usize,
    },
    /// A snapshot that is not there.
    #[error("there is no snapshot {name:?}")]
    UnknownSnapshot {
        /// Its name.
        name: String,
    },
    /// A second snapshot of one name.
    #[error("there is a snapshot {name:?} already")]
    SnapshotExists {
        /// The name.
        name: String,
    },
    /// A snapshot that another disk or process reads.
    #[error("snapshot {name:?} is in use")]
    SnapshotInUse {
        /// Its name.
        name: String,
    },
    /// A name that no snapshot can have.
    #[error("{name:?} is no name for a snapshot: 1 to 128 printable characters without '/'")]
    SnapshotName {
        /// The name asked for.
        name: String,
    },
    /// More snapshots than a disk keeps.
    #[error("{snapshots} snapshots are the most a disk keeps")]
    TooManySnapshots {
        /// The bound.
        snapshots: usize,
    },
    /// The base's bytes could not be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The operating system refused.
    #[error("{action} {path}: {source}")]
    Io {
        /// What was tried, as in "read".
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
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
