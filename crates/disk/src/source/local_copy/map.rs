//! What of a source is here already, in a file beside the copy: `base.map`.
//!
//! ```text
//!   page 0   header: magic, version, cluster size, source's size, whether whole, source's identity, checksum
//!   page 1.. 1022 entries of 4 bytes, then 8 bytes XXH3-64 of them
//! ```
//!
//! An entry tells of one cluster of 64 KiB: 0 it is not here, 1 it is all zeros, 2 nothing needs it, else it is here
//! and this is its hash. All numbers are little-endian. An entry is durable only after its cluster's data is, so a page
//! that does not match its checksum, torn by a power cut, may be taken for "not here": it costs another copy, never a
//! wrong byte.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use xxhash_rust::xxh3::xxh3_64;

use super::super::{Remembered, SourceError};
use super::header::{self, CLUSTER_BYTES, PAGE_BYTES};
use crate::storage;

const ENTRIES_PER_PAGE: usize = (PAGE_BYTES - 8) / 4;

const ABSENT: u32 = 0;
const ZERO: u32 = 1;
const UNNEEDED: u32 = 2;

/// What is known of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cluster {
    /// It must come from the source.
    Absent,
    /// It is all zeros; nothing is in the file.
    Zero,
    /// Nothing needed it when its turn came.
    Unneeded,
    /// It is in the file; its hash.
    Here(u32),
}

impl Cluster {
    fn of(entry: u32) -> Cluster {
        match entry {
            ABSENT => Cluster::Absent,
            ZERO => Cluster::Zero,
            UNNEEDED => Cluster::Unneeded,
            hash => Cluster::Here(hash),
        }
    }

    fn entry(self) -> u32 {
        match self {
            Cluster::Absent => ABSENT,
            Cluster::Zero => ZERO,
            Cluster::Unneeded => UNNEEDED,
            Cluster::Here(hash) => hash,
        }
    }

    /// What a cluster with these bytes is.
    pub(super) fn with(bytes: &[u8]) -> Cluster {
        static ZEROS: [u8; 4096] = [0; 4096];
        if bytes.chunks(ZEROS.len()).all(|part| part == &ZEROS[..part.len()]) {
            return Cluster::Zero;
        }
        // The first few values mean something else.
        Cluster::Here(((xxh3_64(bytes) >> 32) as u32).max(UNNEEDED + 1))
    }

    /// Whether it can be read without the source.
    pub(super) fn is_here(self) -> bool {
        matches!(self, Cluster::Zero | Cluster::Here(_))
    }
}

/// The map, in memory and in its file.
pub(super) struct Map {
    file: File,
    size_bytes: u64,
    identity: Option<String>,
    entries: Vec<AtomicU32>,
    /// Pages of entries that differ from the file.
    changed: Vec<AtomicBool>,
    /// Bytes in clusters that are not absent.
    done_bytes: AtomicU64,
    is_whole: AtomicBool,
    /// Something could not be made durable. The kernel tells that once, and not what was lost: from then on only that
    /// counts which the file had before.
    is_frozen: AtomicBool,
    /// Held while the file is written: a page's older entries must never go over its newer ones.
    writing: Mutex<()>,
}

impl Map {
    /// Makes the map of a source of which nothing is here; whole in its place or not at all.
    pub(super) fn create(path: &Path, remembered: &Remembered) -> Result<(), SourceError> {
        let failed = SourceError::file(path);
        let write = || -> io::Result<()> {
            let unfinished = path.with_extension("map.unfinished");
            let file = storage::create(&unfinished)?;
            let pages = clusters(remembered.size_bytes).div_ceil(ENTRIES_PER_PAGE as u64);
            // Pages that were never written have no right checksum, which means the same as no entries.
            file.set_len((1 + pages) * PAGE_BYTES as u64)?;
            file.write_all_at(&header::encode(remembered, false), 0)?;
            file.sync_all()?;
            fs::rename(&unfinished, path)?;
            File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
        };
        write().map_err(|error| failed(error.to_string()))
    }

    /// Reads the map; none when there is none.
    pub(super) fn open(path: &Path, is_writer: bool) -> Result<Option<Map>, SourceError> {
        let failed = SourceError::file(path);
        let file = match storage::open(path, OpenOptions::new().write(is_writer)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error.to_string())),
        };
        let mut page = [0; PAGE_BYTES];
        file.read_exact_at(&mut page, 0).map_err(|error| failed(error.to_string()))?;
        let (remembered, is_whole) = header::parse(&page).map_err(|what| failed(what.to_owned()))?;
        let count = clusters(remembered.size_bytes) as usize;
        let map = Map {
            file,
            size_bytes: remembered.size_bytes,
            identity: remembered.identity,
            entries: (0..count).map(|_| AtomicU32::new(ABSENT)).collect(),
            changed: (0..count.div_ceil(ENTRIES_PER_PAGE)).map(|_| AtomicBool::new(false)).collect(),
            done_bytes: AtomicU64::new(0),
            is_whole: AtomicBool::new(is_whole),
            is_frozen: AtomicBool::new(false),
            writing: Mutex::new(()),
        };
        for page in 0..map.changed.len() {
            map.load(page).map_err(|error| failed(error.to_string()))?;
        }
        if is_whole && map.has_absent() {
            // Damage: what a page of entries said is lost. It comes again.
            map.is_whole.store(false, Ordering::Release);
        }
        Ok(Some(map))
    }

    /// Takes a page of entries from the file; one that is not right has none.
    fn load(&self, page: usize) -> io::Result<()> {
        let bytes = self.read_page(page)?.unwrap_or([0; PAGE_BYTES]);
        self.take(page, &bytes);
        Ok(())
    }

    /// A page of entries in the file; none when it was never written, or is being written.
    fn read_page(&self, page: usize) -> io::Result<Option<[u8; PAGE_BYTES]>> {
        let mut bytes = [0; PAGE_BYTES];
        self.file.read_exact_at(&mut bytes, page_offset(page))?;
        let (entries, checksum) = bytes.split_at(PAGE_BYTES - 8);
        Ok((checksum == xxh3_64(entries).to_le_bytes()).then_some(bytes))
    }

    fn take(&self, page: usize, bytes: &[u8; PAGE_BYTES]) {
        let first = page * ENTRIES_PER_PAGE;
        let here = first..(first + ENTRIES_PER_PAGE).min(self.entries.len());
        for (cluster, entry) in here.zip(bytes.as_chunks::<4>().0) {
            self.put(cluster as u64, Cluster::of(u32::from_le_bytes(*entry)));
        }
        self.changed[page].store(false, Ordering::Release);
    }

    /// Takes back what differs from the file. What was found wrong stays absent, whatever the file says of it.
    fn forget_changes(&self, page: usize) {
        let bytes = self.read_page(page).ok().flatten().unwrap_or([0; PAGE_BYTES]);
        let first = page * ENTRIES_PER_PAGE;
        let here = first..(first + ENTRIES_PER_PAGE).min(self.entries.len());
        for (cluster, entry) in here.zip(bytes.as_chunks::<4>().0) {
            let durable = Cluster::of(u32::from_le_bytes(*entry));
            if self.get(cluster as u64) != durable {
                self.put(cluster as u64, Cluster::Absent);
            }
        }
        self.changed[page].store(false, Ordering::Release);
    }

    /// Takes what the copy's writer has made durable since this was opened, as far as it is told beside a cluster.
    /// Whether the copy was finished before: then what is not here now never comes.
    pub(super) fn look_again(&self, cluster: u64) -> io::Result<bool> {
        // The writer's order is the other one: behind a header that says whole, pages are the last ones.
        let mut header = [0; PAGE_BYTES];
        self.file.read_exact_at(&mut header, 0)?;
        let page = cluster as usize / ENTRIES_PER_PAGE;
        if let Some(bytes) = self.read_page(page)? {
            self.take(page, &bytes);
        }
        // A header that is being written says nothing.
        match header::parse(&header) {
            Ok((remembered, is_whole)) if remembered == self.remembered() => {
                self.is_whole.store(is_whole, Ordering::Release);
                Ok(is_whole)
            }
            _ => Ok(false),
        }
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub(super) fn clusters(&self) -> u64 {
        self.entries.len() as u64
    }

    pub(super) fn remembered(&self) -> Remembered {
        Remembered { size_bytes: self.size_bytes, identity: self.identity.clone() }
    }

    pub(super) fn done_bytes(&self) -> u64 {
        self.done_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn is_whole(&self) -> bool {
        self.is_whole.load(Ordering::Acquire)
    }

    /// A cluster's bytes in the source; the last one may be shorter than the others.
    pub(super) fn range(&self, cluster: u64) -> std::ops::Range<u64> {
        let start = cluster * CLUSTER_BYTES;
        start..(start + CLUSTER_BYTES).min(self.size_bytes)
    }

    pub(super) fn get(&self, cluster: u64) -> Cluster {
        Cluster::of(self.entries[cluster as usize].load(Ordering::Acquire))
    }

    /// Whether what is noted from now on is forgotten at once: nothing more can be kept.
    pub(super) fn is_frozen(&self) -> bool {
        self.is_frozen.load(Ordering::SeqCst)
    }

    /// Notes what a cluster is. Its data must be in the file by now, though not yet durable.
    pub(super) fn set(&self, cluster: u64, state: Cluster) {
        self.put(cluster, state);
        // Behind that: either this finds the map frozen, or the one that freezes it finds the entry.
        if self.is_frozen() {
            self.put(cluster, Cluster::Absent);
        }
    }

    fn put(&self, cluster: u64, state: Cluster) {
        let before = Cluster::of(self.entries[cluster as usize].swap(state.entry(), Ordering::SeqCst));
        if before == state {
            return;
        }
        let range = self.range(cluster);
        match (before, state) {
            (Cluster::Absent, _) => self.done_bytes.fetch_add(range.end - range.start, Ordering::Relaxed),
            (_, Cluster::Absent) => self.done_bytes.fetch_sub(range.end - range.start, Ordering::Relaxed),
            _ => 0,
        };
        self.changed[cluster as usize / ENTRIES_PER_PAGE].store(true, Ordering::Release);
    }

    /// Makes all entries so far durable, after `sync_data` has made all data so far durable. When that fails, whatever
    /// is noted and not durable is forgotten, also what is noted meanwhile and later: a failed write-back may have lost
    /// its data.
    pub(super) fn persist(&self, sync_data: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.write_changed(sync_data)
    }

    fn write_changed(&self, sync_data: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        if self.is_frozen() {
            return Err(io::Error::other("it could not be made durable before, and nothing more of it is kept"));
        }
        // Taken before the data is made durable: entries set later wait for the next time.
        let pages: Vec<(usize, [u8; PAGE_BYTES])> = (0..self.changed.len())
            .filter(|page| self.changed[*page].swap(false, Ordering::AcqRel))
            .map(|page| (page, self.encoded(page)))
            .collect();
        if pages.is_empty() {
            return Ok(());
        }
        let write = || -> io::Result<()> {
            sync_data()?;
            for (page, bytes) in &pages {
                self.file.write_all_at(bytes, page_offset(*page))?;
            }
            self.file.sync_data()
        };
        write().inspect_err(|_| {
            self.is_frozen.store(true, Ordering::SeqCst);
            for page in 0..self.changed.len() {
                self.forget_changes(page);
            }
        })
    }

    fn encoded(&self, page: usize) -> [u8; PAGE_BYTES] {
        let mut bytes = [0; PAGE_BYTES];
        let first = page * ENTRIES_PER_PAGE;
        let here = &self.entries[first..(first + ENTRIES_PER_PAGE).min(self.entries.len())];
        for (entry, place) in here.iter().zip(bytes.as_chunks_mut::<4>().0) {
            *place = entry.load(Ordering::Acquire).to_le_bytes();
        }
        let checksum = xxh3_64(&bytes[..PAGE_BYTES - 8]);
        bytes[PAGE_BYTES - 8..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Whether any cluster must still come from the source.
    pub(super) fn has_absent(&self) -> bool {
        (0..self.clusters()).any(|cluster| self.get(cluster) == Cluster::Absent)
    }

    /// Makes all durable and notes that the source is needed no more; false when it is needed after all.
    pub(super) fn finish(&self, sync_data: impl FnOnce() -> io::Result<()>) -> io::Result<bool> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.write_changed(sync_data)?;
        if self.has_absent() {
            return Ok(false);
        }
        self.file.write_all_at(&header::encode(&self.remembered(), true), 0)?;
        self.file.sync_data()?;
        self.is_whole.store(true, Ordering::Release);
        Ok(true)
    }
}

fn clusters(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(CLUSTER_BYTES)
}

fn page_offset(page: usize) -> u64 {
    (1 + page as u64) * PAGE_BYTES as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(directory: &Path, size_bytes: u64) -> std::path::PathBuf {
        let path = directory.join("base.map");
        Map::create(&path, &Remembered { size_bytes, identity: Some("snapshot a".into()) }).unwrap();
        path
    }

    #[test]
    fn entries_come_back_only_when_they_were_made_durable() {
        let directory = tempfile::tempdir().unwrap();
        let path = made(directory.path(), 100 << 20 | 512);
        assert!(Map::open(&directory.path().join("nothing"), true).unwrap().is_none());
        let map = Map::open(&path, true).unwrap().unwrap();
        assert_eq!((map.clusters(), map.range(1600)), (1601, 100 << 20..100 << 20 | 512));
        assert_eq!(map.remembered().identity.as_deref(), Some("snapshot a"));
        map.set(0, Cluster::Zero);
        map.set(1, Cluster::with(&[5; 65536]));
        map.set(1600, Cluster::Unneeded);
        assert_eq!(map.done_bytes(), 2 * CLUSTER_BYTES + 512);
        map.persist(|| Ok(())).unwrap();
        map.set(2, Cluster::Zero);
        drop(map);
        let map = Map::open(&path, true).unwrap().unwrap();
        let states: Vec<Cluster> = [0, 1, 2, 1600].iter().map(|cluster| map.get(*cluster)).collect();
        assert_eq!(states, [Cluster::Zero, Cluster::with(&[5; 65536]), Cluster::Absent, Cluster::Unneeded]);
        assert_eq!(map.done_bytes(), 2 * CLUSTER_BYTES + 512);
        assert!(!map.is_whole() && !map.finish(|| Ok(())).unwrap());
        for cluster in 2..1600 {
            map.set(cluster, Cluster::Zero);
        }
        assert!(map.finish(|| Ok(())).unwrap());
        assert!(Map::open(&path, false).unwrap().unwrap().is_whole());
    }

    #[test]
    fn what_could_not_be_made_durable_is_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let path = made(directory.path(), 10 << 20);
        let map = Map::open(&path, true).unwrap().unwrap();
        map.set(3, Cluster::Zero);
        map.persist(|| Ok(())).unwrap();
        map.set(4, Cluster::Zero);
        assert!(map.persist(|| Err(io::Error::from_raw_os_error(libc::EIO))).is_err());
        assert_eq!((map.get(3), map.get(4), map.done_bytes()), (Cluster::Zero, Cluster::Absent, CLUSTER_BYTES));
    }

    /// What came while the failure was on its way, beside another page of entries too, and what comes later, is not
    /// believed: the kernel tells a failure once.
    ///
    /// Spec: D4
    #[test]
    fn b26_nothing_is_kept_behind_a_failure_to_make_it_durable() {
        let directory = tempfile::tempdir().unwrap();
        let path = made(directory.path(), 1 << 30);
        let map = Map::open(&path, true).unwrap().unwrap();
        let (durable, meanwhile, later) = (3, 2 * ENTRIES_PER_PAGE as u64, 4 * ENTRIES_PER_PAGE as u64);
        let wrong = durable + 1;
        map.set(durable, Cluster::Zero);
        map.set(wrong, Cluster::Here(77));
        map.persist(|| Ok(())).unwrap();
        // It is not what came: its copy is damaged.
        map.set(wrong, Cluster::Absent);
        map.set(6, Cluster::Zero);
        let fails = || {
            map.set(meanwhile, Cluster::Zero);
            Err(io::Error::from_raw_os_error(libc::EIO))
        };
        assert!(map.persist(fails).is_err());
        map.set(later, Cluster::Zero);
        map.set(5, Cluster::Zero);
        for cluster in [wrong, 5, 6, meanwhile, later] {
            assert_eq!(map.get(cluster), Cluster::Absent, "{cluster}");
        }
        assert_eq!((map.get(durable), map.done_bytes()), (Cluster::Zero, CLUSTER_BYTES));
        assert!(map.persist(|| Ok(())).is_err() && map.finish(|| Ok(())).is_err());
    }

    /// Spec: D4
    #[test]
    fn b26_a_power_cut_while_the_map_is_finished_leaves_a_map() {
        let directory = tempfile::tempdir().unwrap();
        let path = made(directory.path(), 10 << 20);
        let map = Map::open(&path, true).unwrap().unwrap();
        for cluster in 0..map.clusters() {
            map.set(cluster, Cluster::Zero);
        }
        let (mut before, mut after) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
        map.persist(|| Ok(())).unwrap();
        map.file.read_exact_at(&mut before, 0).unwrap();
        assert!(map.finish(|| Ok(())).unwrap());
        map.file.read_exact_at(&mut after, 0).unwrap();
        assert_ne!(before, after);
        // Each of the page's eight sectors is old or new.
        for is_new in 0..=u8::MAX {
            let mut page = before;
            for sector in (0..8).filter(|sector| is_new >> sector & 1 == 1) {
                page[sector * 512..][..512].copy_from_slice(&after[sector * 512..][..512]);
            }
            map.file.write_all_at(&page, 0).unwrap();
            let left = Map::open(&path, true).unwrap().unwrap();
            assert_eq!(left.is_whole(), page == after, "{is_new:08b}");
            assert_eq!((left.size_bytes(), left.remembered()), (map.size_bytes(), map.remembered()));
            assert!(left.finish(|| Ok(())).unwrap());
            assert!(Map::open(&path, false).unwrap().unwrap().is_whole(), "{is_new:08b}");
        }
        map.file.write_all_at(&[!before[20]], 20).unwrap();
        assert!(Map::open(&path, true).is_err());
    }

    #[test]
    fn a_torn_page_of_entries_counts_as_none_and_a_torn_header_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = made(directory.path(), 100 << 20);
        let map = Map::open(&path, true).unwrap().unwrap();
        for cluster in 0..1600 {
            map.set(cluster, Cluster::Zero);
        }
        map.persist(|| Ok(())).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[0; 512], PAGE_BYTES as u64 + 512).unwrap();
        let map = Map::open(&path, true).unwrap().unwrap();
        assert_eq!((map.get(0), map.get(1021), map.get(1022)), (Cluster::Absent, Cluster::Absent, Cluster::Zero));
        file.write_all_at(&[1; 2], 100).unwrap();
        assert!(Map::open(&path, true).is_err());
    }
}
