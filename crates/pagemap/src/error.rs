//! What can go wrong with a page map.

use std::path::PathBuf;

/// An error of a page map.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum PageMapError {
    #[error("a disk of {blocks} blocks is too large for a page map: at most {max} blocks of 4 KiB (16 TiB)")]
    TooLarge { blocks: u64, max: u64 },
    #[error("cannot {action} the page map {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("the page map {path} is not of this disk as it is now: {reason}; it is built again by a scan")]
    Foreign { path: PathBuf, reason: String },
    #[error("the page map {path} is damaged: {reason}; it is built again by a scan")]
    Damaged { path: PathBuf, reason: &'static str },
}
