//! The frozen content where nothing has changed it yet: in the source's own files.

use std::fs::File;
use std::io::{ErrorKind, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::image::FileNumber;
use crate::{Origin, OriginError};

/// The files of an image on the source, open: what is removed meanwhile keeps its content. Reads raise no event.
///
/// Only whoever follows the freeze may read: it alone knows that a range is still as it was.
#[derive(Debug)]
pub struct SourceFiles {
    files: Vec<Mutex<Option<Arc<File>>>>,
}

impl SourceFiles {
    /// Files in the image's order; none: not to be had.
    pub(super) fn new(files: Vec<Option<Arc<File>>>) -> SourceFiles {
        SourceFiles { files: files.into_iter().map(Mutex::new).collect() }
    }

    /// Closes a file that is whole: its space may be given back if the source has removed it.
    pub fn release(&self, file: FileNumber) {
        if let Some(slot) = self.files.get(file.0 as usize) {
            lock(slot).take();
        }
    }

    /// Whether this file can be read: not released, and found when the process was started anew.
    pub fn is_open(&self, file: FileNumber) -> bool {
        self.get(file).is_ok()
    }

    /// How many links the source's file has: 0 when it was removed.
    ///
    /// # Errors
    /// [`OriginError`].
    pub fn links(&self, file: FileNumber) -> Result<u64, OriginError> {
        use std::os::unix::fs::MetadataExt;
        Ok(self.get(file)?.metadata()?.nlink())
    }

    /// The open file, for whoever asks the kernel about it (which pages are cached).
    ///
    /// # Errors
    /// [`OriginError::Lost`]: it was released, or removed before this process was started anew.
    pub fn get(&self, file: FileNumber) -> Result<Arc<File>, OriginError> {
        let found = self.files.get(file.0 as usize).and_then(|slot| lock(slot).clone());
        found.ok_or_else(|| OriginError::Lost(format!("file {} of the image is not open", file.0)))
    }
}

fn lock(slot: &Mutex<Option<Arc<File>>>) -> MutexGuard<'_, Option<Arc<File>>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Origin for SourceFiles {
    fn read(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), OriginError> {
        self.get(file)?.read_exact_at(buffer, offset_bytes).map_err(|error| match error.kind() {
            // Truncated, and nobody was asked before.
            ErrorKind::UnexpectedEof => {
                OriginError::Lost(format!("file {} of the image has become shorter than it was at the freeze", file.0))
            }
            _ => OriginError::Io(error),
        })
    }

    fn read_now(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<bool, OriginError> {
        let wanted = buffer.len();
        let source = self.get(file)?;
        match preadv2(&source, &mut [IoSliceMut::new(buffer)], offset_bytes, ReadWriteFlags::NOWAIT) {
            // A part is in memory, or it is shorter than it was: the waiting read finds out.
            Ok(length) => Ok(length == wanted),
            Err(Errno::AGAIN | Errno::INTR | Errno::OPNOTSUPP) => Ok(false),
            Err(error) => Err(OriginError::Io(error.into())),
        }
    }

    fn has(&self, file: FileNumber) -> bool {
        self.is_open(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_survives_removal_until_released() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        std::fs::write(&path, vec![7; 20_000]).expect("written");
        let files = SourceFiles::new(vec![Some(Arc::new(File::open(&path).expect("open"))), None]);
        let only = FileNumber(0);
        assert_eq!(files.links(only).expect("open"), 1);
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(files.links(only).expect("open"), 0);
        let mut page = vec![0; 8192];
        files.read(only, 8192, &mut page).expect("read");
        assert!(page.iter().all(|byte| *byte == 7));
        page.fill(0);
        assert!(files.read_now(only, 0, &mut page).expect("read"), "just written: in memory");
        assert!(page.iter().all(|byte| *byte == 7));
        assert!(!files.read_now(only, 16_384, &mut page).expect("tried"), "beyond the end");
        let beyond = files.read(only, 16_384, &mut page);
        assert!(matches!(beyond, Err(OriginError::Lost(_))), "{beyond:?}");
        files.release(only);
        for gone in [only, FileNumber(1), FileNumber(2)] {
            assert!(matches!(files.read(gone, 0, &mut page), Err(OriginError::Lost(_))));
            assert!(!files.is_open(gone));
        }
    }
}
