//! What can go wrong with machine checkpoints.

use std::io;
use std::path::{Path, PathBuf};

/// Why an operation on a checkpoint or on a machine's memory failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A size that no guest's memory can have here.
    #[error("memory of {size_bytes} bytes is not possible: whole pages of 4096 bytes, at most 1 TiB")]
    Size {
        /// The size asked for.
        size_bytes: u64,
    },
    /// The descriptor that was kept over the death of a server holds no state of such a memory.
    #[error(
        "the kept state of the memory is none: {what}; begin without it, every resident page counts as changed then"
    )]
    State {
        /// What is wrong with it.
        what: String,
    },
    /// An epoch that never was, was released, or went when its room was needed.
    #[error("epoch {epoch} of the memory is not kept")]
    UnknownEpoch {
        /// Its number.
        epoch: u64,
    },
    /// More epochs kept than there may be.
    #[error("{kept} epochs of the memory are kept already: release some")]
    TooManyEpochs {
        /// How many are.
        kept: usize,
    },
    /// The content of some pages is in the kernel's page cache at most, so no epoch can show it.
    #[error("{pages} pages of the memory are not kept: let them be copied out of the page cache first")]
    NotKept {
        /// How many.
        pages: u64,
    },
    /// The content of a page is in the kernel's page cache at most.
    #[error("page {page} of the memory is not kept")]
    PageNotKept {
        /// Its number.
        page: u32,
    },
    /// The kernel's side of the file speaks another language.
    #[error(
        "the kernel's FUSE is {major}.{minor}; needed is 7.40 (Linux 6.9) or newer, for requests that are sent again"
    )]
    Protocol {
        /// Its major version.
        major: u32,
        /// Its minor version.
        minor: u32,
    },
    /// A file is not what this version writes.
    #[error("{path} is damaged: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A checkpoint that is not there, or lacks one that it stands on.
    #[error("there is no checkpoint {number}")]
    UnknownCheckpoint {
        /// Its number.
        number: u64,
    },
    /// Changes since a checkpoint that is not the last one.
    #[error("checkpoint {number} is not the last one, which is {last:?}: a next one cannot stand on it")]
    NotLast {
        /// Its number.
        number: u64,
        /// The last one's, if there is one.
        last: Option<u64>,
    },
    /// There are checkpoints in the place of new ones.
    #[error("{path} is there already")]
    Exists {
        /// What is there.
        path: PathBuf,
    },
    /// Another process writes checkpoints there.
    #[error("{path} is held by another process")]
    Held {
        /// Where its lock is.
        path: PathBuf,
    },
    /// Checkpoints that were opened for reading.
    #[error("the checkpoints in {path} were opened for reading")]
    ReadOnly {
        /// Their directory.
        path: PathBuf,
    },
    /// A checkpoint has no room.
    #[error(
        "{path} has {free_bytes} bytes free, and a checkpoint takes up to {wanted_bytes}: make room in its file system"
    )]
    NoSpace {
        /// Where it would be.
        path: PathBuf,
        /// What is free there.
        free_bytes: u64,
        /// What it takes at most.
        wanted_bytes: u64,
    },
    /// Nothing of ours is mounted where a memory shall be.
    #[error("{path} is no guest's memory: nothing is mounted there, or not for this process")]
    NotMounted {
        /// Where it would be.
        path: PathBuf,
    },
    /// A page that cannot be the next one of a checkpoint.
    #[error("page {page} is not between {end}, where the ones before it end, and the {pages} pages of the memory")]
    PageOrder {
        /// Its number.
        page: u32,
        /// The first that may follow.
        end: u64,
        /// How many there are.
        pages: u64,
    },
    /// More than a checkpoint has room for.
    #[error("{devices_bytes} bytes of devices and {disk_bytes} of a disk's name are too many for a checkpoint")]
    TooLong {
        /// The devices' state.
        devices_bytes: usize,
        /// The name of the disk's epoch.
        disk_bytes: usize,
    },
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried, as in "read".
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl CheckpointError {
    pub(crate) fn damaged(path: &Path, what: impl Into<String>) -> CheckpointError {
        CheckpointError::Damaged { path: path.to_owned(), what: what.into() }
    }

    /// The error of one system call, with what it was for.
    pub(crate) fn io<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> CheckpointError {
        move |source| CheckpointError::Io { action, path: path.to_owned(), source: source.into() }
    }
}
