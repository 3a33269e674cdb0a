//! What can fail around the process that serves a disk.

use std::io;
use std::path::PathBuf;

use onecopy_disk::{DiskError, nbd};
use onecopy_pagemap::PageMapError;

/// Why a disk cannot be served, or its server not be asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskServerError {
    /// The disk itself.
    #[error("disk {directory}: {source}")]
    Disk {
        /// Its directory.
        directory: PathBuf,
        /// What failed.
        source: DiskError,
    },
    /// NBD clients of other hosts would come in the clear, and nobody has said that they may.
    #[error(
        "{address} can be reached from other hosts, and NBD would be in the clear there, without asking who comes: \
         give --tls-authority, --tls-certificate and --tls-key, or, in a network that nobody else can enter, \
         --nbd-unencrypted"
    )]
    Unencrypted {
        /// Where.
        address: nbd::Address,
    },
    /// The page map.
    #[error(transparent)]
    PageMap(#[from] PageMapError),
    /// Another process serves the disk behind this control socket.
    #[error(
        "{directory} is served by another onecopy{}; stop it with: onecopy disk stop {directory}", 
        process_id.map(|number| format!(" (process {number})")).unwrap_or_default()
    )]
    Served {
        /// The disk's directory.
        directory: PathBuf,
        /// The other process, if it has told its number.
        process_id: Option<u32>,
    },
    /// Nobody listens behind the control socket.
    #[error("nobody serves the disk {directory}; start with: onecopy disk serve {directory}")]
    NotServed {
        /// The disk's directory.
        directory: PathBuf,
    },
    /// The lock of the control socket.
    #[error("cannot lock {path}: {reason}")]
    Lock {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A socket, file or thread.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The server refused or failed; its own words.
    #[error("{0}")]
    Refused(String),
    /// The server's reply cannot be parsed.
    #[error(
        "the disk server of {directory} sent a reply that cannot be parsed: {reason}; if it is of another version, \
         stop it with `onecopy disk stop {directory}` and serve the disk again"
    )]
    InvalidReply {
        /// The disk's directory.
        directory: PathBuf,
        /// What was wrong.
        reason: String,
    },
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
