//! A copy of a source in the disk's directory, filled by those who read and by the background.
//!
//! ```text
//!   read ── here? ── yes ──────────────────────────> base (a sparse file)
//!            └─ no ──> fetch the clusters around it ──> base, then map, then the reader
//!   background: what is left, in order ──────────────> the same way
//!   each second: base is made durable, then the map ([`map`])
//!   all here: read back, compared with the hashes of what came, then the map says whole: the source is needed no more
//! ```
//!
//! Killed at any moment it goes on from the last second: what the map calls here was durable before.

mod background;
mod fill;
mod header;
mod map;
mod pace;
#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use self::fill::Claims;
use self::header::CLUSTER_BYTES;
use self::map::{Cluster, Map};
use self::pace::Pace;
use super::{Extent, Hydration, Needed, Remembered, Source, SourceError};
use crate::storage;

/// The copy's data.
const DATA_FILE: &str = "base";
/// What of it is here.
const MAP_FILE: &str = "base.map";

/// A reader beside the writer waits so long for the source before it looks whether the writer has by now what is read.
pub(super) const LOOK_AGAIN_INTERVAL: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// How a source is copied.
#[derive(Clone, Copy, Debug)]
pub struct LocalCopyOptions {
    /// Whether the background copies what nobody reads.
    pub background: bool,
    /// Bytes a second for the background; none is no bound.
    pub limit_bytes_per_second: Option<u64>,
}

impl Default for LocalCopyOptions {
    fn default() -> LocalCopyOptions {
        LocalCopyOptions { background: true, limit_bytes_per_second: None }
    }
}

/// What an open copy does with its files.
#[derive(Clone, Copy)]
enum Role {
    /// It keeps what is fetched.
    Writer,
    /// It reads what another one keeps. A read waits so long for what neither the writer nor the source has; none is
    /// for ever.
    Beside { patience: Option<Duration> },
}

/// What the readers and the background share.
struct Shared {
    map: Map,
    data: File,
    data_name: String,
    /// The source; none when it is needed no more.
    remote: Mutex<Option<Arc<dyn Source>>>,
    role: Role,
    claims: Mutex<Claims>,
    /// Told when clusters were fetched, or could not be.
    fetched: Condvar,
    pace: Pace,
    needed: Mutex<Option<Needed>>,
    faults: AtomicU64,
    /// Bytes that came over.
    fetched_bytes: AtomicU64,
    rate_bytes_per_second: AtomicU64,
    /// A failure of our own files: from then on nothing is kept any more.
    trouble: Mutex<Option<String>>,
}

/// A copy of a source, as far as it has come.
pub struct LocalCopy {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl LocalCopy {
    /// Opens the copy in `directory`, or begins one there. `remote` opens the source; it is told what the copy
    /// remembers of it, and not called when all is here. Only one at a time may write to a directory.
    ///
    /// # Errors
    /// The source or the files cannot be opened, or are not what they were.
    pub fn open(
        directory: &Path,
        remote: impl FnOnce(Option<&Remembered>) -> Result<Arc<dyn Source>, SourceError>,
        options: LocalCopyOptions,
    ) -> Result<LocalCopy, SourceError> {
        let map_path = directory.join(MAP_FILE);
        let (map, remote) = match Map::open(&map_path, true)? {
            Some(map) if map.is_whole() => (map, None),
            Some(map) => {
                let remote = remote(Some(&map.remembered()))?;
                (map, Some(remote))
            }
            None => {
                let remote = remote(None)?;
                let remembered = Remembered { size_bytes: remote.size_bytes(), identity: remote.identity() };
                make_data(directory, remembered.size_bytes)?;
                Map::create(&map_path, &remembered)?;
                let map = Map::open(&map_path, true)?;
                let map = map.ok_or_else(|| SourceError::new(map_path.display().to_string(), "it is not there"))?;
                (map, Some(remote))
            }
        };
        let copy = LocalCopy::with(directory, map, remote, Role::Writer, options)?;
        if copy.shared.remote().is_some() {
            let threads = background::start(&copy.shared, options.background);
            let threads = threads.map_err(|error| copy.shared.error(error))?;
            *copy.threads.lock().unwrap_or_else(PoisonError::into_inner) = threads;
        }
        Ok(copy)
    }

    /// Begins the copy of a source that is not there yet, of this size: whoever opens it waits for it.
    ///
    /// # Errors
    /// The files cannot be made.
    pub fn begin(directory: &Path, size_bytes: u64) -> Result<(), SourceError> {
        make_data(directory, size_bytes)?;
        Map::create(&directory.join(MAP_FILE), &Remembered { size_bytes, identity: None })
    }

    /// Reads what is here of a copy that somebody else writes, also what comes later, and the rest from the source.
    /// Keeps nothing. None when the copy was not begun yet. While the source is away its reads must fail after 10 s or
    /// so: then it is seen whether the writer has by now what is read. A read waits for either as long as `patience`,
    /// or for ever.
    ///
    /// # Errors
    /// As [`open`](LocalCopy::open).
    pub fn open_beside(
        directory: &Path,
        remote: impl FnOnce(Option<&Remembered>) -> Result<Arc<dyn Source>, SourceError>,
        patience: Option<Duration>,
    ) -> Result<Option<LocalCopy>, SourceError> {
        let Some(map) = Map::open(&directory.join(MAP_FILE), false)? else { return Ok(None) };
        let remote = if map.is_whole() { None } else { Some(remote(Some(&map.remembered()))?) };
        LocalCopy::with(directory, map, remote, Role::Beside { patience }, LocalCopyOptions::default()).map(Some)
    }

    fn with(
        directory: &Path,
        map: Map,
        remote: Option<Arc<dyn Source>>,
        role: Role,
        options: LocalCopyOptions,
    ) -> Result<LocalCopy, SourceError> {
        let path = directory.join(DATA_FILE);
        let is_writer = matches!(role, Role::Writer);
        let data = storage::open(&path, OpenOptions::new().write(is_writer)).map_err(SourceError::file(&path))?;
        if let Some(remote) = &remote
            && remote.size_bytes() != map.size_bytes()
        {
            let reason = format!("it has {} bytes and had {}", remote.size_bytes(), map.size_bytes());
            return Err(SourceError::new(remote.describe(), reason));
        }
        let shared = Shared {
            map,
            data,
            data_name: path.display().to_string(),
            remote: Mutex::new(remote),
            role,
            claims: Mutex::default(),
            fetched: Condvar::new(),
            pace: Pace::new(options.limit_bytes_per_second),
            needed: Mutex::default(),
            faults: AtomicU64::new(0),
            fetched_bytes: AtomicU64::new(0),
            rate_bytes_per_second: AtomicU64::new(0),
            trouble: Mutex::default(),
        };
        Ok(LocalCopy { shared: Arc::new(shared), threads: Mutex::default() })
    }
}

/// Makes the file for the data, as large as the source and empty.
fn make_data(directory: &Path, size_bytes: u64) -> Result<(), SourceError> {
    let path = directory.join(DATA_FILE);
    let make = || {
        let file = storage::create(&path)?;
        file.set_len(size_bytes)?;
        file.sync_all()
    };
    make().map_err(SourceError::file(&path))
}

impl Shared {
    fn error(&self, reason: impl ToString) -> SourceError {
        SourceError::new(self.data_name.clone(), reason)
    }

    fn trouble(&self) -> MutexGuard<'_, Option<String>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_broken(&self) -> bool {
        self.map.is_frozen()
    }

    fn is_writer(&self) -> bool {
        matches!(self.role, Role::Writer)
    }

    /// Makes all that is here durable.
    fn persist(&self) {
        if !self.is_writer() || self.is_broken() {
            return;
        }
        if let Err(error) = self.map.persist(|| self.data.sync_data()) {
            *self.trouble() = Some(format!("{}: {error}; nothing is kept any more", self.data_name));
            tracing::error!(file = self.data_name, %error, "a copy of a base could not be made durable");
        }
    }

    fn remote(&self) -> Option<Arc<dyn Source>> {
        self.remote.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets the source go, which a whole copy needs no more. Who still reads there gets an error: of what was left out,
    /// since it was written anew.
    fn leave_source(&self) {
        if let Some(remote) = self.remote.lock().unwrap_or_else(PoisonError::into_inner).take() {
            remote.close();
        }
    }

    /// Reads clusters that are here.
    fn read_here(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        self.data.read_exact_at(into, offset).map_err(|error| self.error(error))
    }

    /// From `offset` on, how far clusters go that are all here or all not, and which.
    fn run(&self, offset: u64, end: u64) -> (u64, bool) {
        let is_here = self.map.get(offset / CLUSTER_BYTES).is_here();
        let mut next = offset / CLUSTER_BYTES + 1;
        while next * CLUSTER_BYTES < end && self.map.get(next).is_here() == is_here {
            next += 1;
        }
        (end.min(next * CLUSTER_BYTES), is_here)
    }
}

impl Source for LocalCopy {
    fn size_bytes(&self) -> u64 {
        self.shared.map.size_bytes()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        let there = self.size_bytes().saturating_sub(offset).min(into.len() as u64) as usize;
        let (bytes, past_end) = into.split_at_mut(there);
        past_end.fill(0);
        let (mut at, mut rest, mut is_fault) = (offset, bytes, false);
        while !rest.is_empty() {
            let (end, is_here) = self.shared.run(at, at + rest.len() as u64);
            let (part, behind) = rest.split_at_mut((end - at) as usize);
            if is_here {
                self.shared.read_here(at, part)?;
            } else {
                if !std::mem::replace(&mut is_fault, true) {
                    self.shared.faults.fetch_add(1, Ordering::Relaxed);
                }
                self.shared.fault(at, part)?;
            }
            (at, rest) = (end, behind);
        }
        Ok(())
    }

    fn try_read(&self, offset: u64, into: &mut [u8]) -> Result<bool, SourceError> {
        if !self.is_local(offset, into.len() as u64) {
            return Ok(false);
        }
        let there = self.size_bytes().saturating_sub(offset).min(into.len() as u64) as usize;
        let (bytes, past_end) = into.split_at_mut(there);
        past_end.fill(0);
        let is_read = storage::try_read(&self.shared.data, offset, &mut [IoSliceMut::new(bytes)]);
        Ok(is_read.map_err(|error| self.shared.error(error))?.unwrap_or(false))
    }

    fn is_local(&self, offset: u64, length: u64) -> bool {
        let end = offset.saturating_add(length).min(self.size_bytes());
        offset >= end
            || (offset / CLUSTER_BYTES..end.div_ceil(CLUSTER_BYTES)).all(|at| self.shared.map.get(at).is_here())
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, SourceError> {
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let is_past_end = at >= self.size_bytes();
            let end =
                if is_past_end { range.end } else { self.shared.map.range(at / CLUSTER_BYTES).end.min(range.end) };
            let is_zero = is_past_end || self.shared.map.get(at / CLUSTER_BYTES) == Cluster::Zero;
            match extents.last_mut() {
                Some(last) if last.is_zero == is_zero => last.range.end = end,
                _ => extents.push(Extent { range: at..end, is_zero }),
            }
            at = end;
        }
        Ok(extents)
    }

    fn hydration(&self) -> Option<Hydration> {
        let shared = &self.shared;
        let own = shared.trouble().clone();
        Some(Hydration {
            copied_bytes: shared.map.done_bytes(),
            total_bytes: shared.map.size_bytes(),
            limit_bytes_per_second: shared.pace.limit_bytes_per_second(),
            rate_bytes_per_second: shared.rate_bytes_per_second.load(Ordering::Relaxed),
            faults: shared.faults.load(Ordering::Relaxed),
            is_whole: shared.map.is_whole(),
            trouble: own.or_else(|| self.trouble()),
        })
    }

    fn set_hydration_limit(&self, bytes_per_second: Option<u64>) {
        self.shared.pace.set_limit(bytes_per_second);
    }

    fn set_needed(&self, needed: Needed) {
        *self.shared.needed.lock().unwrap_or_else(PoisonError::into_inner) = Some(needed);
    }

    fn trouble(&self) -> Option<String> {
        if self.shared.map.is_whole() { None } else { self.shared.remote()?.trouble() }
    }

    fn identity(&self) -> Option<String> {
        self.shared.map.remembered().identity
    }

    fn close(&self) {
        self.shared.pace.close();
        if let Some(remote) = self.shared.remote() {
            remote.close();
        }
        self.shared.fetched.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!(file = self.shared.data_name, "a thread that copies a base panicked");
            }
        }
        self.shared.persist();
    }

    fn describe(&self) -> String {
        match self.shared.remote() {
            Some(remote) => format!("copy of {}", remote.describe()),
            None => self.shared.data_name.clone(),
        }
    }
}

impl Drop for LocalCopy {
    fn drop(&mut self) {
        self.close();
    }
}
