//! Keeping what was not kept: copies out of the page cache, while the machine runs.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{self, SyncSender};

use super::{GuestMemory, apart, fuse, residency};
use crate::{CheckpointError, PAGE_BYTES};

/// Pages that are copied out of the page cache with one read.
const COPY_PAGES: usize = 64;

/// What a copy out of the page cache has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Pages copied.
    pub copied: u64,
    /// Pages whose content is in no page cache either: it is lost, and no epoch can be cut. Some of them may be there
    /// while writing back fails: then it is to be done again.
    pub missing: u64,
}

/// Pages as the page cache had them after so many failures.
struct Read {
    pages: Vec<u32>,
    content: Vec<u8>,
    failures: u64,
}

pub(super) fn memory_resident(place: &Path, file: &File, size_bytes: u64) -> Result<Vec<bool>, CheckpointError> {
    let pages = usize::try_from(size_bytes).expect("it is mapped") / PAGE_BYTES;
    residency::resident(file, pages).map_err(CheckpointError::io("ask for the page cache of", place))
}

impl GuestMemory {
    /// Keeps from now on what is written back, and copies out of the page cache what was not kept before, while the
    /// machine runs. Again and again it only does what is left.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn keep(&self) -> Result<Kept, CheckpointError> {
        // First: a page that is written back while it is being copied is kept as it is written, and not copied.
        self.store.pages().state.set_keeping();
        let (read, are_read) = mpsc::sync_channel(1);
        let work = move || self.read_dropped(&fuse::opened(&self.place)?, &read);
        let (worked, copied) = apart::apart(&self.place, work, || {
            let mut copied = 0;
            for Read { pages, content, failures } in are_read {
                for (page, content) in pages.iter().zip(content.as_chunks().0) {
                    copied += u64::from(self.store.copy_out(*page, content, failures)?);
                }
            }
            Ok(copied)
        });
        let copied = copied?;
        worked?;
        Ok(Kept { copied, missing: self.store.pages().dropped() })
    }

    /// Sends what the page cache has of pages that are not kept, until nobody takes it any more.
    fn read_dropped(&self, file: &File, read: &SyncSender<Read>) -> Result<(), CheckpointError> {
        let failed = |error: io::Error| CheckpointError::io("copy pages out of", &self.place)(error);
        // Pages that are not there would come as errors, with their neighbours.
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random).map_err(|error| failed(error.into()))?;
        let resident = memory_resident(&self.place, file, self.store.size_bytes)?;
        let wanted: Vec<u32> = {
            let pages = self.store.pages();
            let all = (0u32..).zip(resident);
            all.filter_map(|(page, is_resident)| (is_resident && pages.is_dropped(page)).then_some(page)).collect()
        };
        for run in wanted.chunk_by(|one, other| one + 1 == *other).flat_map(|run| run.chunks(COPY_PAGES)) {
            let mut content = vec![0; run.len() * PAGE_BYTES];
            let failures = self.store.pages().failures();
            match file.read_exact_at(&mut content, u64::from(run[0]) * PAGE_BYTES as u64) {
                Ok(()) => {}
                // The page cache has let go of one meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::EIO) => continue,
                Err(error) => return Err(failed(error)),
            }
            if read.send(Read { pages: run.to_vec(), content, failures }).is_err() {
                break;
            }
        }
        Ok(())
    }
}
