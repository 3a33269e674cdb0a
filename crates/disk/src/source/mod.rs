//! Sources: bytes of a fixed size that never change. A disk's base is one, and so is a [`View`](crate::View) of a disk.
//!
//! | source | what |
//! |---|---|
//! | [`RawFile`] | a raw image or a block device of this machine |
//! | [`View`](crate::View) | a snapshot of another disk |
//! | [`NbdClient`] | an export of an NBD server, of ours or another's |
//! | [`LocalCopy`] | any of them, copied here on demand and in the background |

mod base;
mod identity;
mod local_copy;
mod nbd;
mod raw_file;
mod specification;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use base::{open, pin};
pub use local_copy::{LocalCopy, LocalCopyOptions};
pub use nbd::{NbdClient, NbdClientOptions};
pub use raw_file::RawFile;
pub use specification::{BaseSpecification, TlsFiles};

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
