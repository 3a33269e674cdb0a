//! Who needs the content of a freeze, and which files that is.

use std::collections::HashMap;
use std::sync::Arc;

use crate::ByteRange;
use crate::fill::Filling;
use crate::image::{FileIdentity, FileNumber, Image};

/// Somebody who must have a range's frozen content before the source may change it.
pub trait Follower: Send + Sync {
    /// Whether it has, or no longer needs, all of this range; what lies beyond the frozen size is not needed.
    fn has(&self, file: FileNumber, range: ByteRange) -> bool;

    /// The same for the whole file; cheap.
    fn has_all_of(&self, file: FileNumber) -> bool;

    /// The source accesses the file; cheap.
    fn note_access(&self, _file: FileNumber) {}

    /// Takes the range if that needs no waiting; false when it would.
    ///
    /// # Errors
    /// [`FollowerFailed`]: it will never have it.
    fn take_now(&self, file: FileNumber, range: ByteRange) -> Result<bool, FollowerFailed>;

    /// Takes the range, however long that takes.
    ///
    /// # Errors
    /// [`FollowerFailed`]: it will never have it.
    fn take(&self, file: FileNumber, range: ByteRange) -> Result<(), FollowerFailed>;

    /// Tells it that it is not waited for any more: content may change before it has it. The first reason counts.
    fn give_up(&self, reason: &str);
}

/// A follower has given up.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct FollowerFailed(pub String);

/// The files of one freeze, looked up by what an event's descriptor tells.
#[derive(Debug, Default)]
pub(super) struct FileTable {
    numbers: HashMap<(u64, u64), (FileNumber, i64)>,
}

impl FileTable {
    pub(super) fn of(image: &Image) -> FileTable {
        let numbers = image.files.iter().zip(0..).map(|(file, number)| {
            (file.identity.device_and_inode(), (FileNumber(number), file.identity.born_nanoseconds))
        });
        FileTable { numbers: numbers.collect() }
    }

    pub(super) fn find(&self, identity: FileIdentity) -> Option<FileNumber> {
        let (number, born_nanoseconds) = self.numbers.get(&identity.device_and_inode())?;
        (*born_nanoseconds == identity.born_nanoseconds).then_some(*number)
    }

    /// Without its birth: it may be another file that has got the inode of one that is gone.
    pub(super) fn find_place(&self, place: (u64, u64)) -> Option<FileNumber> {
        self.numbers.get(&place).map(|(number, _)| *number)
    }
}

/// A follower and the files that it follows.
#[derive(Clone)]
pub(super) struct Following {
    pub(super) follower: Arc<dyn Follower>,
    pub(super) table: Arc<FileTable>,
}

impl Following {
    pub(super) fn is(&self, follower: *const ()) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.follower).cast(), follower)
    }
}

impl Follower for Filling {
    fn has(&self, file: FileNumber, range: ByteRange) -> bool {
        self.is_filled(file, range)
    }

    fn has_all_of(&self, file: FileNumber) -> bool {
        self.is_file_filled(file)
    }

    fn note_access(&self, file: FileNumber) {
        Filling::note_access(self, file);
    }

    fn take_now(&self, file: FileNumber, range: ByteRange) -> Result<bool, FollowerFailed> {
        self.try_ensure_now(file, range).map_err(|error| FollowerFailed(error.to_string()))
    }

    fn take(&self, file: FileNumber, range: ByteRange) -> Result<(), FollowerFailed> {
        self.ensure(file, range).map_err(|error| FollowerFailed(error.to_string()))
    }

    fn give_up(&self, reason: &str) {
        self.fail(reason);
    }
}
