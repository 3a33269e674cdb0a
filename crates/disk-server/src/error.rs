//! What can fail around the process that serves a disk.

use std::io;
use std::path::PathBuf;

use onecopy_disk::{DiskError, nbd};
use onecopy_pagemap::PageMapError;

/// Why a disk cannot be served, or its server not be asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum DiskServerError {
    #[error("disk {directory}: {source}")]
    Disk { directory: PathBuf, source: DiskError },
    #[error(
        "{address} can be reached from other hosts, and NBD would be in the clear there, without asking who comes: \
         give --tls-authority, --tls-certificate and --tls-key, or, in a network that nobody else can enter, \
         --nbd-unencrypted"
    )]
    Unencrypted { address: nbd::Address },
    #[error(transparent)]
    PageMap(#[from] PageMapError),
    #[error(
        "{directory} is served by another onecopy{}; stop it with: onecopy disk stop {directory}", 
        process_id.map(|number| format!(" (process {number})")).unwrap_or_default()
    )]
    Served { directory: PathBuf, process_id: Option<u32> },
    #[error("nobody serves the disk {directory}; start with: onecopy disk serve {directory}")]
    NotServed { directory: PathBuf },
    #[error("cannot lock {path}: {reason}")]
    Lock { path: PathBuf, reason: String },
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{0}")]
    Refused(String),
    #[error(
        "the disk server of {directory} sent a reply that cannot be parsed: {reason}; if it is of another version, \
         stop it with `onecopy disk stop {directory}` and serve the disk again"
    )]
    InvalidReply { directory: PathBuf, reason: String },
}

impl DiskServerError {
    /// Wraps a failed operation; for `map_err`.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> DiskServerError {
        let path = path.into();
        move |source| DiskServerError::Io { action, path, source }
    }

    /// Names the disk; for `map_err`.
    pub(crate) fn disk(directory: impl Into<PathBuf>) -> impl FnOnce(DiskError) -> DiskServerError {
        let directory = directory.into();
        move |source| DiskServerError::Disk { directory, source }
    }
}
