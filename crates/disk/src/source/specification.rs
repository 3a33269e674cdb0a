//! Where a disk's base comes from.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Where a disk's base comes from, as its header keeps it. Relative paths are relative to the disk's directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum BaseSpecification {
    /// A raw image file or block device.
    Raw {
        /// Its path.
        path: PathBuf,
    },
    /// A snapshot of another disk.
    Disk {
        /// The disk's directory.
        directory: PathBuf,
        /// The snapshot's name.
        snapshot: String,
    },
    /// An export of a server that speaks NBD. It must be read only: a base never changes.
    Nbd {
        /// `nbd://host:port/export`, `nbds://...` encrypted, or `nbd+unix:///export?socket=path`.
        url: String,
        /// Certificates, when the connection is encrypted.
        tls: Option<TlsFiles>,
    },
}

/// Certificates for an encrypted connection, as files in PEM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TlsFiles {
    /// Who is trusted.
    pub authority: PathBuf,
    /// Our certificate, when the other side asks for one.
    pub certificate: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
}

impl TlsFiles {
    /// The files in a directory that `onecopy host keys` made.
    pub fn of_host(directory: &Path) -> TlsFiles {
        TlsFiles {
            authority: directory.join("ca.pem"),
            certificate: Some(directory.join("host.pem")),
            key: Some(directory.join("host.key")),
        }
    }
}
