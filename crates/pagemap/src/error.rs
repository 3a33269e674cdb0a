//! What can go wrong with a page map.

use std::path::PathBuf;

/// An error of a page map.
#[derive(Debug, thiserror::Error)]
pub enum PageMapError {
    /// A block's number has 32 bits here.
    #[error("a disk of {blocks} blocks is too large for a page map: at most {max} blocks of 4 KiB (16 TiB)")]
    TooLarge {
        /// What was asked for.
        blocks: u64,
        /// What is possible.
        max: u64,
    },
    /// The file system said no.
    #[error("cannot {action} the page map {path}: {source}")]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The file is of another version, disk or generation: it tells nothing about this disk as it is now.
    #[error("the page map {path} is not of this disk as it is now: {reason}; it is built again by a scan")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What differs.
        reason: String,
    },
    /// The file's bytes contradict themselves.
    #[error("the page map {path} is damaged: {reason}; it is built again by a scan")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: &'static str,
    },
}
