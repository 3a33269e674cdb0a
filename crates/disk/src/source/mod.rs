//! Sources: bytes of a fixed size that never change. A disk's base is one, and so is a [`View`] of a disk.
//!
//! | source | what |
//! |---|---|
//! | [`RawFile`] | a raw image or a block device of this machine |
//! | [`View`] | a snapshot of another disk |
//! | [`NbdClient`] | an export of an NBD server, of ours or another's |
//! | [`LocalCopy`] | any of them, copied here on demand and in the background |

mod identity;
mod local_copy;
mod nbd;
mod raw_file;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::identity::Identity;
use self::local_copy::LOOK_AGAIN_INTERVAL;
use crate::View;
use crate::format::header::SIZE_BYTES_MAX;
pub use local_copy::{LocalCopy, LocalCopyOptions};
pub use nbd::{NbdClient, NbdClientOptions};
pub use raw_file::RawFile;

/// Why a source could not give its bytes.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{source_name}: {reason}")]
pub struct SourceError {
    /// Which source.
    pub source_name: String,
    /// Why.
    pub reason: String,
}

impl SourceError {
    pub(crate) fn new(source_name: impl Into<String>, reason: impl ToString) -> SourceError {
        SourceError { source_name: source_name.into(), reason: reason.to_string() }
    }

    /// For `map_err`: what failed with the file.
    fn file<E: ToString>(path: &Path) -> impl Fn(E) -> SourceError {
        let path = path.display().to_string();
        move |error| SourceError::new(path.clone(), error)
    }
}

/// A run of bytes of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where, in bytes.
    pub range: Range<u64>,
    /// Whether it is known to be zeros.
    pub is_zero: bool,
}

/// How far the copy of a remote source has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hydration {
    /// Bytes that are here, or known to be zeros, or needed no more.
    pub copied_bytes: u64,
    /// Bytes that shall be here.
    pub total_bytes: u64,
    /// Limit of the background copy in bytes a second.
    pub limit_bytes_per_second: Option<u64>,
    /// Bytes that came over in the last seconds, a second.
    pub rate_bytes_per_second: u64,
    /// Reads that had to wait for the source.
    pub faults: u64,
    /// Whether all is here and was read back and found right: the source is needed no more.
    pub is_whole: bool,
    /// Why the source cannot be reached now, if it cannot.
    pub trouble: Option<String>,
}

/// Whether a disk still shows any of these bytes of its base, in its current content, a snapshot or a retained epoch.
/// Asked by the background copy; what is not needed is not copied. Once false for a range it must stay false.
pub type Needed = Arc<dyn Fn(Range<u64>) -> bool + Send + Sync>;

/// What a copy remembers of its source while that is away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// Its size.
    pub size_bytes: u64,
    /// Its [`identity`](Source::identity).
    pub identity: Option<String>,
}

/// Bytes of a fixed size that never change.
pub trait Source: Send + Sync {
    /// How many bytes there are.
    fn size_bytes(&self) -> u64;

    /// Reads; past the end are zeros. May block for as long as another host takes.
    ///
    /// # Errors
    /// The bytes could not be had; what `into` holds is undefined.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError>;

    /// Reads what is in memory; `false` when it would have to wait, and `into` is then undefined.
    ///
    /// # Errors
    /// As [`read`](Source::read).
    fn try_read(&self, _offset: u64, _into: &mut [u8]) -> Result<bool, SourceError> {
        Ok(false)
    }

    /// Whether a read of this range needs no other host.
    fn is_local(&self, _offset: u64, _length: u64) -> bool {
        true
    }

    /// What is known of a range: extents in order, without gaps, that cover it.
    ///
    /// # Errors
    /// The source could not be asked.
    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, SourceError> {
        Ok(vec![Extent { range, is_zero: false }])
    }

    /// How far its copy has come, when it is one.
    fn hydration(&self) -> Option<Hydration> {
        None
    }

    /// Bounds the background copy, in bytes a second; none is no bound.
    fn set_hydration_limit(&self, _bytes_per_second: Option<u64>) {}

    /// Lets the background copy leave out what is needed no more.
    fn set_needed(&self, _needed: Needed) {}

    /// Why it cannot be reached now, if it cannot.
    fn trouble(&self) -> Option<String> {
        None
    }

    /// A text by which it is known again: another one means other bytes. None when it has no such text.
    fn identity(&self) -> Option<String> {
        None
    }

    /// Ends background work and reads that wait for another host, with an error. What is here stays durable. Later
    /// reads of what is not here fail.
    fn close(&self) {}

    /// What it is, for messages.
    fn describe(&self) -> String;
}

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

/// Records in the disk's directory which raw image or snapshot becomes its base, so that another one in its place is
/// noticed. For an export there is nothing to record: its server says what it is. Called when a disk is made.
///
/// # Errors
/// The base is not there, or the record cannot be written.
pub fn pin(specification: &BaseSpecification, directory: &Path) -> Result<(), SourceError> {
    match specification {
        BaseSpecification::Raw { path } => Identity::of_image(&directory.join(path))?.record(directory),
        BaseSpecification::Disk { directory: other, snapshot } => {
            let other = directory.join(other);
            let (uuid, snapshot) = View::which(&other, snapshot).map_err(SourceError::file(&other))?;
            Identity::of_snapshot(&uuid, &snapshot).record(directory)
        }
        BaseSpecification::Nbd { .. } => Ok(()),
    }
}

/// Refuses the size that a source tells of itself when no disk can have it: maps and buffers are made after it.
fn check_size(size_bytes: u64) -> Result<(), String> {
    if size_bytes <= SIZE_BYTES_MAX {
        return Ok(());
    }
    Err(format!("it has {size_bytes} bytes, and a disk has 8 TiB at most"))
}

/// Opens what a disk's header names as its base, for the holder of the disk. `directory` is the disk's; with `copy` the
/// source is copied there, on demand and, once its limit was set ([`Source::set_hydration_limit`]), in the background;
/// a copy that is whole already needs the source no more.
///
/// # Errors
/// The base is not there, is none, or is not the one that it was.
pub fn open(specification: &BaseSpecification, directory: &Path, copy: bool) -> Result<Arc<dyn Source>, SourceError> {
    if copy {
        let remote =
            |remembered: Option<&Remembered>| original(specification, directory, remembered, ReadPolicy::default());
        // The background begins when it is told its limit: before that it could be faster than it may.
        let held = LocalCopyOptions { limit_bytes_per_second: Some(0), ..LocalCopyOptions::default() };
        return Ok(Arc::new(LocalCopy::open(directory, remote, held)?));
    }
    original(specification, directory, None, ReadPolicy::default())
}

/// How the disk of somebody else is read.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReadPolicy {
    /// A read waits so long for a base that is away; none is for ever.
    pub(crate) patience: Option<Duration>,
    /// No base is another server's export, or a device of this machine: its header may be another machine's.
    pub(crate) only_files: bool,
}

/// Opens the base of a disk that somebody else may hold: nothing is written, and what is not in the holder's copy, now
/// or later, comes from the source.
///
/// # Errors
/// As [`open`].
pub(crate) fn open_beside(
    specification: &BaseSpecification,
    directory: &Path,
    copy: bool,
    policy: ReadPolicy,
) -> Result<Arc<dyn Source>, SourceError> {
    if copy {
        let again = ReadPolicy { patience: Some(LOOK_AGAIN_INTERVAL), ..policy };
        let remote = |remembered: Option<&Remembered>| original(specification, directory, remembered, again);
        if let Some(begun) = LocalCopy::open_beside(directory, remote, policy.patience)? {
            return Ok(Arc::new(begun));
        }
    }
    original(specification, directory, None, policy)
}

/// The base itself. When a copy remembers it, a server that cannot be reached now is waited for later.
fn original(
    specification: &BaseSpecification,
    directory: &Path,
    remembered: Option<&Remembered>,
    policy: ReadPolicy,
) -> Result<Arc<dyn Source>, SourceError> {
    match specification {
        BaseSpecification::Raw { path } => {
            let path = directory.join(path);
            Identity::of_image(&path)?.check(&path.display().to_string(), directory)?;
            let file = RawFile::open(&path)?;
            if policy.only_files && !file.metadata().map_err(SourceError::file(&path))?.is_file() {
                return Err(SourceError::new(path.display().to_string(), "it is a device, and only files are read"));
            }
            Ok(Arc::new(file))
        }
        BaseSpecification::Disk { directory: other, snapshot } => {
            let other = directory.join(other);
            let (view, uuid, found) = View::open_known(&other, snapshot, policy).map_err(SourceError::file(&other))?;
            // Only now the snapshot stays: one that is looked at before could be replaced until it is opened.
            let place = format!("{}@{snapshot}", other.display());
            Identity::of_snapshot(&uuid, &found).check(&place, directory)?;
            Ok(Arc::new(view))
        }
        BaseSpecification::Nbd { url, .. } if policy.only_files => {
            Err(SourceError::new(url.clone(), "it is another server's export, and only files are read"))
        }
        BaseSpecification::Nbd { url, tls } => {
            let options =
                NbdClientOptions { tls: tls.clone(), source_timeout: policy.patience, ..NbdClientOptions::default() };
            let client = match remembered {
                Some(remembered) => NbdClient::resume(url, options, remembered)?,
                None => NbdClient::connect(url, options)?,
            };
            Ok(Arc::new(client))
        }
    }
}
