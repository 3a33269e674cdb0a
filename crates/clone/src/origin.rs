//! Where a clone's content comes from: files beside it, or another host.

use crate::image::FileNumber;

/// Why the frozen content of a range cannot be had.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum OriginError {
    #[error("the frozen content is lost: {0}")]
    Lost(String),
    #[error("cannot read the source's file: {0}")]
    Io(#[from] std::io::Error),
}

/// Gives the content that files had at the freeze.
pub trait Origin: Send + Sync {
    /// Reads all of `buffer` at `offset_bytes`, a multiple of [`crate::CHUNK_BYTES`]; the range lies inside the frozen
    /// size. May wait: for a disk, or through a broken connection.
    ///
    /// # Errors
    /// [`OriginError`]; after [`OriginError::Lost`] nothing else comes.
    fn read(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), OriginError>;

    /// The same if it needs no waiting; false when it would.
    ///
    /// # Errors
    /// As [`Origin::read`].
    fn read_now(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<bool, OriginError>;

    /// As [`Origin::read`], for what nobody waits for: must not delay those for whom somebody does. The background
    /// reads by this.
    ///
    /// # Errors
    /// As [`Origin::read`].
    fn read_unhurried(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), OriginError> {
        self.read(file, offset_bytes, buffer)
    }

    /// Whether it has the file's content still. False after a process died that held a file open which the source has
    /// removed meanwhile: whoever can do without it should.
    fn has(&self, _file: FileNumber) -> bool {
        true
    }

    /// Brings a range into this host's page cache, and waits until it is there, if [`Origin::read`] will be quicker for
    /// it; its content is not used, as it may be changing. Called before a thread of low priority keeps others from the
    /// range. Default: nothing.
    fn prefetch(&self, _file: FileNumber, _offset_bytes: u64, _length_bytes: u64) {}
}
