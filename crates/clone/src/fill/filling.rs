//! The files of one clone, on their way to the frozen content.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::{Arc, OnceLock};

use super::bitmap::SharedBitmap;
use super::counters::{Counters, FillProgress, Purpose};
use super::in_flight::{Claim, InFlight};
use super::layout::Layout;
use crate::free_space::{SourceDisks, check_free};
use crate::image::{FileNumber, Image};
use crate::{ByteRange, CHUNK_BYTES, CloneError, Origin};

/// Chunks that are read, written and claimed at once, at most: 256 KiB.
pub(super) const RUN_CHUNKS_MAX: u64 = 32;
/// A range of more missing chunks is never filled by a thread that must not be held up: 512 KiB.
const NOW_CHUNKS_MAX: u64 = 64;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Why a range was not filled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum FillError {
    #[error("the clone is given up: {0}")]
    Discarded(Arc<str>),
}

/// Whether the caller may be held up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WaitMode {
    Blocking,
    NoWait,
}

/// One clone's files and where their content comes from.
pub struct Filling {
    image: Arc<Image>,
    files: Vec<File>,
    numbers: HashMap<(u64, u64), FileNumber>,
    /// Where the source works; writing there ends before the source finds no room.
    source_disks: SourceDisks,
    origin: Arc<dyn Origin>,
    layout: Layout,
    bitmap: SharedBitmap,
    in_flight: InFlight,
    /// Chunks that each file lacks.
    missing: Vec<AtomicU64>,
    /// Accesses of each file by the source, each of which had to be asked about.
    accesses: Vec<AtomicU64>,
    counters: Counters,
    failure: OnceLock<Arc<str>>,
    /// Told of all that outlives this process.
    #[cfg(test)]
    pub(super) recorder: crate::recorder::Recorder,
}

impl Filling {
    /// `files` are the clone's, in the image's order, opened for reading and writing so that accesses through them
    /// raise nothing; sparse and of their frozen sizes when `bitmap` is new. With the bitmap of an earlier filling it
    /// goes on where that one ended, which may be its failure.
    ///
    /// # Errors
    /// [`CloneError::Filling`] when files or bitmap are not those of `image`; [`CloneError::File`].
    pub fn new(
        image: Arc<Image>,
        files: Vec<File>,
        origin: Arc<dyn Origin>,
        bitmap: SharedBitmap,
    ) -> Result<Filling, CloneError> {
        let layout = Layout::new(&image);
        if files.len() != image.files.len() || bitmap.bits() < layout.bits() {
            return Err(CloneError::Filling { files: files.len(), wanted: image.files.len() });
        }
        let mut numbers = HashMap::with_capacity(files.len());
        for (number, (file, wanted)) in files.iter().zip(&image.files).enumerate() {
            let metadata = file.metadata().map_err(CloneError::file("examine", &wanted.path))?;
            numbers.insert((metadata.dev(), metadata.ino()), FileNumber(number as u32));
        }
        let (missing, missing_bytes) = count_missing(&layout, &bitmap);
        let failure = match bitmap.is_given_up() {
            true => OnceLock::from(Arc::from("it was given up before its service died")),
            false => OnceLock::new(),
        };
        Ok(Filling {
            accesses: files.iter().map(|_| AtomicU64::new(0)).collect(),
            counters: Counters::new(files.len(), layout.total_bytes(), layout.total_bytes() - missing_bytes),
            in_flight: InFlight::new(),
            failure,
            image,
            files,
            numbers,
            source_disks: SourceDisks::default(),
            origin,
            layout,
            bitmap,
            missing,
            #[cfg(test)]
            recorder: crate::recorder::Recorder::default(),
        })
    }

    /// The same, which leaves room to its source on these file systems.
    #[must_use]
    pub fn beside(self, source_disks: SourceDisks) -> Filling {
        Filling { source_disks, ..self }
    }

    /// What is being filled.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// Which chunks are filled; its descriptor is what a later filling goes on from.
    pub fn bitmap(&self) -> &SharedBitmap {
        &self.bitmap
    }

    /// The clone's file.
    pub fn file(&self, file: FileNumber) -> &File {
        &self.files[file.0 as usize]
    }

    /// The clone's file with this device and inode (fstat(2)).
    pub fn number_of(&self, device: u64, inode: u64) -> Option<FileNumber> {
        self.numbers.get(&(device, inode)).copied()
    }

    /// Returns when `range` of `file` is filled, by whomever.
    ///
    /// # Errors
    /// [`FillError::Discarded`].
    pub fn ensure(&self, file: FileNumber, range: ByteRange) -> Result<(), FillError> {
        self.bring(file, range, Purpose::Demand, WaitMode::Blocking).map(|_| ())
    }

    /// As [`Filling::ensure`], but false when it would have to wait for a disk, a network or another thread.
    ///
    /// # Errors
    /// [`FillError::Discarded`].
    pub fn try_ensure_now(&self, file: FileNumber, range: ByteRange) -> Result<bool, FillError> {
        self.bring(file, range, Purpose::Demand, WaitMode::NoWait)
    }

    pub(super) fn ensure_in_background(&self, file: FileNumber, range: ByteRange) -> Result<(), FillError> {
        self.bring(file, range, Purpose::Background, WaitMode::Blocking).map(|_| ())
    }

    /// Whether nothing of `range` is missing.
    pub fn is_filled(&self, file: FileNumber, range: ByteRange) -> bool {
        self.is_file_filled(file) || self.bitmap.next_missing(self.layout.chunks(file, range)).is_none()
    }

    /// Whether nothing of the file is missing; one load.
    pub fn is_file_filled(&self, file: FileNumber) -> bool {
        self.missing[file.0 as usize].load(Acquire) == 0
    }

    /// What of a file is missing, no less than that and less than a chunk more.
    pub fn missing_bytes(&self, file: FileNumber) -> u64 {
        let chunks = self.missing[file.0 as usize].load(Acquire);
        self.image.files[file.0 as usize].size_bytes.min(chunks * CHUNK_BYTES)
    }

    /// The source accesses a file, and is asked about that until nothing of it is missing.
    pub(crate) fn note_access(&self, file: FileNumber) {
        self.accesses[file.0 as usize].fetch_add(1, Relaxed);
    }

    /// Takes out the files that the source has accessed and that lack something which can be had. Last is the one by
    /// whose filling most accesses for each missing byte will be asked about no more.
    pub(super) fn take_busy(&self, files: &mut Vec<FileNumber>) -> Vec<FileNumber> {
        let mut busy = Vec::new();
        files.retain(|&file| {
            let accesses = u128::from(self.accesses[file.0 as usize].load(Relaxed));
            if accesses == 0 {
                return true;
            }
            let missing_bytes = u128::from(self.missing_bytes(file));
            let is_busy = missing_bytes > 0 && !self.is_file_lost(file);
            if is_busy {
                busy.push((file, accesses, missing_bytes));
            }
            !is_busy
        });
        busy.sort_by(|(_, accesses, bytes), (_, others, other_bytes)| (accesses * other_bytes).cmp(&(others * bytes)));
        busy.into_iter().map(|(file, ..)| file).collect()
    }

    /// The bytes of the next missing chunks at or after `start`, at most a run's.
    pub(super) fn next_missing_run(&self, file: FileNumber, range: ByteRange) -> Option<Range<u64>> {
        let chunks = self.layout.chunks(file, range);
        let first = self.bitmap.next_missing(chunks.clone())?;
        let end = chunks.end.min(first + RUN_CHUNKS_MAX);
        let end = self.bitmap.next_set(first..end).unwrap_or(end);
        Some(self.layout.bytes(file, &(first..end)))
    }

    /// Whether chunks of the file are missing that the origin does not have any more; see [`Origin::has`].
    pub(super) fn is_file_lost(&self, file: FileNumber) -> bool {
        !self.is_file_filled(file) && !self.origin.has(file)
    }

    /// Brings a run into the origin's cache, if that helps it; see [`Origin::prefetch`].
    pub(super) fn prefetch(&self, file: FileNumber, bytes: &Range<u64>) {
        self.origin.prefetch(file, bytes.start, bytes.end - bytes.start);
    }

    /// The clone's file is about to be cut to `size_bytes`: fills the chunk in which the new end lies, and gives up
    /// what is beyond, so that nobody fills it any more.
    ///
    /// # Errors
    /// [`FillError::Discarded`].
    pub fn forget_from(&self, file: FileNumber, size_bytes: u64) -> Result<(), FillError> {
        self.ensure_boundary(file, size_bytes)?;
        self.waive(file, ByteRange { start: size_bytes.next_multiple_of(CHUNK_BYTES), end: u64::MAX })
    }

    /// Fills the chunk in which a new end at `size_bytes` would lie, unless it lies between two.
    ///
    /// # Errors
    /// [`FillError::Discarded`].
    pub(super) fn ensure_boundary(&self, file: FileNumber, size_bytes: u64) -> Result<(), FillError> {
        match size_bytes % CHUNK_BYTES {
            0 => Ok(()),
            _ => self.ensure(file, ByteRange::new(size_bytes, 1)),
        }
    }

    /// Nobody needs the frozen content of these chunks any more: they count as filled. Waits for those in flight.
    ///
    /// # Errors
    /// [`FillError::Discarded`].
    pub fn waive(&self, file: FileNumber, range: ByteRange) -> Result<(), FillError> {
        self.check()?;
        let chunks = self.layout.chunks(file, range);
        let shard = self.in_flight.shard(file);
        let mut claimed = shard.lock();
        while claimed.iter().any(|claim| claim.start < chunks.end && chunks.start < claim.end) {
            self.check()?;
            claimed = shard.wait(claimed);
        }
        self.set_filled(file, &chunks);
        Ok(())
    }

    /// Counters; costs a few loads.
    pub fn progress(&self) -> FillProgress {
        self.counters.progress()
    }

    /// Whether every file is whole and written back.
    pub fn whole(&self) -> bool {
        self.counters.all_files_whole()
    }

    pub(super) fn note_file_whole(&self) {
        self.counters.note_file_whole();
    }

    /// Gives the clone up: whoever waits for content, now or later, gets `reason`. The first reason stays; it is what
    /// is returned.
    pub fn fail(&self, reason: &str) -> FillError {
        #[cfg(test)]
        self.recorder.note(|| crate::recorder::Event::GiveUp);
        // Before anybody is told: who is told lets the source change what a successor must not bring then.
        self.bitmap.give_up();
        let first = self.failure.get_or_init(|| {
            tracing::error!(reason, "the clone cannot become whole");
            Arc::from(reason)
        });
        self.in_flight.wake_all();
        FillError::Discarded(Arc::clone(first))
    }

    /// Why the clone was given up.
    pub fn failure(&self) -> Option<Arc<str>> {
        self.failure.get().cloned()
    }

    /// For [`Filling::fail`]: what could not be done to which file.
    pub(super) fn reason(&self, action: &str, file: FileNumber, error: &dyn std::fmt::Display) -> String {
        format!("cannot {action} {}: {error}", self.image.files[file.0 as usize].path.display())
    }

    fn check(&self) -> Result<(), FillError> {
        self.failure.get().map_or(Ok(()), |reason| Err(FillError::Discarded(Arc::clone(reason))))
    }

    fn bring(
        &self,
        file: FileNumber,
        range: ByteRange,
        purpose: Purpose,
        wait_mode: WaitMode,
    ) -> Result<bool, FillError> {
        self.check()?;
        if self.is_file_filled(file) {
            return Ok(true);
        }
        let chunks = self.layout.chunks(file, range);
        let mut at = chunks.start;
        let mut faulted = false;
        while let Some(first) = self.bitmap.next_missing(at..chunks.end) {
            if wait_mode == WaitMode::NoWait && chunks.end - first > NOW_CHUNKS_MAX {
                return Ok(false);
            }
            at = first;
            match self.claim(file, first..chunks.end, wait_mode)? {
                Claiming::Claimed(claim) => {
                    if !self.fill(file, &claim, purpose, wait_mode)? {
                        return Ok(false);
                    }
                    at = claim.chunks.end;
                }
                Claiming::Nothing => {}
                Claiming::Busy => return Ok(false),
            }
            faulted = true;
        }
        if purpose == Purpose::Demand && faulted {
            self.counters.note_fault();
        }
        Ok(true)
    }

    /// The first missing chunks among `chunks`, for the caller to fill.
    fn claim(&self, file: FileNumber, chunks: Range<u64>, wait_mode: WaitMode) -> Result<Claiming<'_>, FillError> {
        let shard = self.in_flight.shard(file);
        let mut claimed = shard.lock();
        loop {
            self.check()?;
            // Bits are set while their chunks are claimed or the lock is held: what is missing and unclaimed here is
            // nobody's.
            let Some(first) = self.bitmap.next_missing(chunks.clone()) else { return Ok(Claiming::Nothing) };
            if claimed.iter().any(|claim| claim.contains(&first)) {
                if wait_mode == WaitMode::NoWait {
                    return Ok(Claiming::Busy);
                }
                claimed = shard.wait(claimed);
                continue;
            }
            let end = chunks.end.min(first + RUN_CHUNKS_MAX);
            let end = self.bitmap.next_set(first..end).unwrap_or(end);
            let end = claimed.iter().map(|claim| claim.start).filter(|&start| start > first).fold(end, u64::min);
            return Ok(Claiming::Claimed(shard.claim(claimed, first..end)));
        }
    }

    /// False when the origin would have to wait.
    fn fill(
        &self,
        file: FileNumber,
        claim: &Claim<'_>,
        purpose: Purpose,
        wait_mode: WaitMode,
    ) -> Result<bool, FillError> {
        let bytes = self.layout.bytes(file, &claim.chunks);
        let length = (bytes.end - bytes.start) as usize;
        let written = BUFFER.with_borrow_mut(|buffer| {
            buffer.resize((RUN_CHUNKS_MAX * CHUNK_BYTES) as usize, 0);
            let content = &mut buffer[..length];
            match wait_mode {
                WaitMode::Blocking => self.read_origin(file, &claim.chunks, content)?,
                WaitMode::NoWait => match self.origin.read_now(file, bytes.start, content) {
                    Ok(true) => {}
                    Ok(false) => return Ok(false),
                    Err(error) => return Err(self.fail(&self.reason("read the frozen content of", file, &error))),
                },
            }
            self.write(file, bytes.start, content).map(|()| true)
        })?;
        // Nobody is waited for any more by whoever changes the origin once this is given up: what was read may be torn
        // or too new.
        self.check()?;
        if written {
            self.set_filled(file, &claim.chunks);
            self.counters.note_brought(purpose, length as u64);
        }
        Ok(written)
    }

    fn read_origin(&self, file: FileNumber, chunks: &Range<u64>, content: &mut [u8]) -> Result<(), FillError> {
        let start = self.layout.bytes(file, chunks).start;
        self.origin
            .read(file, start, content)
            .map_err(|error| self.fail(&self.reason("read the frozen content of", file, &error)))
    }

    /// Writes what is not zero: a missing chunk of the clone's file is a hole.
    fn write(&self, file: FileNumber, start: u64, content: &[u8]) -> Result<(), FillError> {
        let chunks: Vec<&[u8]> = content.chunks(CHUNK_BYTES as usize).collect();
        let mut at = 0;
        for alike in chunks.chunk_by(|one, next| is_zero(one) == is_zero(next)) {
            let length = alike.iter().map(|chunk| chunk.len()).sum::<usize>();
            if !is_zero(alike[0]) {
                self.write_all(file, start + at as u64, &content[at..at + length])?;
            }
            at += length;
        }
        Ok(())
    }

    fn write_all(&self, file: FileNumber, offset: u64, content: &[u8]) -> Result<(), FillError> {
        #[cfg(test)]
        self.recorder.note(|| crate::recorder::Event::Bring { file, offset_bytes: offset, content: content.to_vec() });
        let written = self.check_free(file).and_then(|()| self.file(file).write_all_at(content, offset));
        written.map_err(|error| self.fail(&self.reason("write", file, &error)))
    }

    fn check_free(&self, file: FileNumber) -> std::io::Result<()> {
        match self.source_disks.have(self.file(file))? {
            true => check_free(self.file(file)),
            false => Ok(()),
        }
    }

    fn set_filled(&self, file: FileNumber, chunks: &Range<u64>) {
        let mut count = 0;
        let mut bytes = 0;
        for chunk in chunks.clone() {
            #[cfg(test)]
            self.recorder.note(|| crate::recorder::Event::Set { bitmap: "filled", bit: chunk });
            if self.bitmap.set(chunk) {
                count += 1;
                let of_chunk = self.layout.bytes(file, &(chunk..chunk + 1));
                bytes += of_chunk.end - of_chunk.start;
            }
        }
        self.counters.note_filled(bytes);
        self.missing[file.0 as usize].fetch_sub(count, AcqRel);
    }
}

impl std::fmt::Debug for Filling {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Filling").field("progress", &self.progress()).field("failure", &self.failure).finish()
    }
}

/// What came of wanting to fill something.
enum Claiming<'a> {
    Claimed(Claim<'a>),
    /// All is filled.
    Nothing,
    /// Another thread has it.
    Busy,
}

/// Missing chunks of each file, and their bytes in all.
fn count_missing(layout: &Layout, bitmap: &SharedBitmap) -> (Vec<AtomicU64>, u64) {
    let mut missing_bytes = 0;
    let counts = (0..layout.files_count()).map(|number| {
        let file = FileNumber(number as u32);
        let chunks = layout.chunks(file, ByteRange::WHOLE);
        let mut count = 0;
        let mut at = chunks.start;
        while let Some(first) = bitmap.next_missing(at..chunks.end) {
            let end = bitmap.next_set(first..chunks.end).unwrap_or(chunks.end);
            let bytes = layout.bytes(file, &(first..end));
            missing_bytes += bytes.end - bytes.start;
            count += end - first;
            at = end;
        }
        AtomicU64::new(count)
    });
    (counts.collect(), missing_bytes)
}

fn is_zero(content: &[u8]) -> bool {
    // Comparing it with itself one byte on is a memcmp, which ends at the first byte that differs.
    content.split_first().is_none_or(|(&first, rest)| first == 0 && content[..rest.len()] == *rest)
}
