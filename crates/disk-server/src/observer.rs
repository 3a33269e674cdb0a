//! A disk's page map: taken from its file at the opening, filled by what passes, saved at the close.
//!
//! A server's disk is closed and opened again whenever its machine is paused and goes on. The map stays in memory then,
//! and goes on if nobody else opened the disk in between; it is written to its file only when the server ends.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use onecopy_disk::{Direction, Observer, Opened};
use onecopy_pagemap::{Bounds, ContentHash, Identity, PageMap};

use crate::protocol::PageMapStatus;

/// The page map's file in a disk's directory.
const PAGES: &str = "pages";

/// The page map of one opening of a disk.
#[derive(Default)]
pub struct ObservedPages {
    /// That of the opening before, in the same process, until the disk is open: a chain of all would never be freed.
    before: Mutex<Option<Arc<ObservedPages>>>,
    /// Whether somebody will call [`ObservedPages::save`] after the close.
    is_kept: bool,
    opened: OnceLock<OpenedPages>,
    is_closed: AtomicBool,
    scanned_bytes: AtomicU64,
}

struct OpenedPages {
    map: Arc<PageMap>,
    origin: String,
    path: PathBuf,
    identity: Identity,
}

impl ObservedPages {
    /// For an opening by a server, which keeps the map in memory from one opening to the next.
    pub(crate) fn kept(before: Option<Arc<ObservedPages>>) -> ObservedPages {
        let before = before.filter(|before| before.is_closed.load(Ordering::Acquire));
        ObservedPages { before: Mutex::new(before), is_kept: true, ..ObservedPages::default() }
    }

    /// Writes a kept map to its file after the close; nothing when the disk was not closed in order, or others have
    /// written theirs since.
    pub(crate) fn save(&self) {
        if let Some(opened) = self.opened.get()
            && self.is_closed.load(Ordering::Acquire)
            && !opened.path.exists()
        {
            opened.save();
        }
    }

    /// The page map, once the disk is open.
    pub fn map(&self) -> Option<&PageMap> {
        self.opened.get().map(|opened| &*opened.map)
    }

    /// Its figures, once the disk is open.
    pub fn status(&self) -> Option<PageMapStatus> {
        let opened = self.opened.get()?;
        Some(PageMapStatus {
            origin: opened.origin.clone(),
            figures: opened.map.statistics(),
            scanned_bytes: self.scanned_bytes.load(Ordering::Relaxed),
            seed: opened.map.seed(),
        })
    }

    /// How far the background scan is.
    pub(crate) fn scanned_bytes(&self) -> u64 {
        self.scanned_bytes.load(Ordering::Relaxed)
    }

    /// The background scan has come this far.
    pub(crate) fn set_scanned_bytes(&self, bytes: u64) {
        self.scanned_bytes.store(bytes, Ordering::Relaxed);
    }
}

impl Observer for ObservedPages {
    fn opened(&self, disk: &Opened<'_>) {
        let before = self.before.lock().unwrap_or_else(PoisonError::into_inner).take();
        let kept = before.as_ref().and_then(|before| before.goes_on_as(disk));
        if let (Some(_), Some(before)) = (&kept, &before) {
            self.set_scanned_bytes(before.scanned_bytes());
        }
        match kept.map_or_else(|| open(disk), Ok) {
            Ok(opened) => {
                if self.opened.set(opened).is_err() {
                    tracing::error!("a page map was given a second opening");
                }
            }
            Err(error) => tracing::warn!(%error, "the disk is served without a page map"),
        }
    }

    fn closing(&self) {
        self.is_closed.store(true, Ordering::Release);
        if let Some(opened) = self.opened.get().filter(|_| !self.is_kept) {
            opened.save();
        }
    }

    fn transferred(&self, block: u64, hash: ContentHash, guest_address: Option<u64>, _direction: Direction) {
        if let Some(map) = self.map() {
            map.record(block, hash, guest_address);
        }
    }

    fn invalidated(&self, blocks: Range<u64>) {
        if let Some(map) = self.map() {
            map.forget(blocks);
        }
    }

    fn knows(&self, block: u64) -> bool {
        // Without a map nothing need be hashed.
        self.map().is_none_or(|map| map.knows(block))
    }

    fn placed(&self, block: u64, guest_address: u64) {
        if let Some(map) = self.map() {
            map.hint(block, guest_address);
        }
    }
}

impl ObservedPages {
    /// The map for the opening after this one, if that is the next one of all.
    fn goes_on_as(&self, disk: &Opened<'_>) -> Option<OpenedPages> {
        let opened = self.opened.get()?;
        let is_next = opened.identity.generation.checked_add(1) == Some(disk.generation);
        let is_same = opened.identity.uuid == uuid(disk.uuid) && opened.map.seed() == disk.seed;
        (is_next && is_same).then(|| OpenedPages {
            map: Arc::clone(&opened.map),
            origin: "kept".to_owned(),
            path: opened.path.clone(),
            identity: Identity { generation: disk.generation, ..opened.identity },
        })
    }
}

impl OpenedPages {
    fn save(&self) {
        if let Err(error) = self.map.save(&self.path, &self.identity) {
            // Only time is lost: the next opening scans.
            tracing::warn!(%error, "the page map is not saved");
        }
    }
}

/// The map of the generation before, if nobody opened the disk in between; else an empty one.
fn open(disk: &Opened<'_>) -> Result<OpenedPages, onecopy_pagemap::PageMapError> {
    let path = disk.directory.join(PAGES);
    let identity = Identity { uuid: uuid(disk.uuid), generation: disk.generation };
    let before = Identity { generation: disk.generation.wrapping_sub(1), ..identity };
    let bounds = Bounds::for_disk(disk.size_bytes);
    let (map, origin) = match PageMap::load(&path, disk.size_bytes, disk.seed, bounds, &before) {
        Ok(Some(map)) => (map, "loaded".to_owned()),
        Ok(None) => (PageMap::new(disk.size_bytes, disk.seed, bounds)?, "empty".to_owned()),
        Err(error) => {
            tracing::info!(%error, "the page map begins empty");
            (PageMap::new(disk.size_bytes, disk.seed, bounds)?, error.to_string())
        }
    };
    Ok(OpenedPages { map: Arc::new(map), origin, path, identity })
}

/// The bytes of a disk's number. One that is none gives zeros: then only the seed, which is as random, tells disks
/// apart.
fn uuid(text: &str) -> [u8; 16] {
    u128::from_str_radix(text, 16).unwrap_or(0).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use onecopy_pagemap::content_hash;

    use super::*;

    const UUID: &str = "0123456789abcdef0123456789abcdef";

    fn opened(directory: &Path, generation: u64) -> ObservedPages {
        let pages = ObservedPages::default();
        pages.opened(&Opened { directory, uuid: UUID, seed: 1, size_bytes: 1 << 20, generation });
        pages
    }

    /// It outlives an orderly end and a pause, and is never believed after a crash, of another disk, when somebody
    /// opened the disk in between, or damaged.
    ///
    /// Spec: A8
    #[test]
    fn n4_a_page_map_is_believed_after_a_clean_close_and_when_nobody_came_between() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let first = opened(path, 1);
        first.transferred(3, content_hash(1, b"three"), Some(0x7000), Direction::Write);
        first.closing();
        let second = opened(path, 2);
        assert_eq!(second.status().unwrap().origin, "loaded");
        assert!(second.knows(3) && !second.knows(4));
        // The second one dies.
        assert_eq!(opened(path, 3).status().unwrap().origin, "empty");
        second.closing();
        drop(second);
        let later = opened(path, 4);
        assert!(later.status().unwrap().origin.contains("generation"), "{:?}", later.status());
        assert!(!later.knows(3));
    }

    /// Spec: A8
    #[test]
    fn n4_a_servers_page_map_goes_on_in_memory_unless_somebody_came_between() {
        let directory = tempfile::tempdir().unwrap();
        let open = |generation, before: Option<&Arc<ObservedPages>>| {
            let pages = Arc::new(ObservedPages::kept(before.cloned()));
            let directory = directory.path();
            pages.opened(&Opened { directory, uuid: UUID, seed: 1, size_bytes: 1 << 20, generation });
            pages
        };
        let first = open(1, None);
        first.transferred(3, content_hash(1, b"three"), None, Direction::Write);
        first.set_scanned_bytes(7);
        first.closing();
        assert!(!directory.path().join(PAGES).exists());
        let second = open(2, Some(&first));
        assert!(second.knows(3) && second.status().unwrap().origin == "kept");
        assert_eq!(second.scanned_bytes(), 7);
        // It was not closed: what passed since cannot have been seen by all.
        assert!(!open(3, Some(&second)).knows(3));
        second.closing();
        assert!(!open(4, Some(&second)).knows(3));
        second.save();
        assert!(open(3, None).knows(3));
    }
}
