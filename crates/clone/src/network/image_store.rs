//! The frozen content on its own host, for a clone elsewhere: in the source's files while nothing has changed it, else
//! saved aside.
//!
//! ```text
//!                     the source is about to change it              the clone has it
//!   in the source ─────────────────────────────────────> saved ──────────────────────> delivered
//!         └─────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The source never waits for the network: what it changes is copied into a sparse file beside its data, which has no
//! name and goes with its last descriptor. A chunk that is being read is claimed, and so is one that is being saved:
//! neither can change meanwhile.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::fs::{FallocateFlags, Mode, fallocate, fstat};

use super::protocol::{DeliveredRange, READ_BYTES_MAX};
use crate::fill::{Claim, InFlight, Layout, SharedBitmap};
use crate::free_space::check_free;
use crate::image::{FileNumber, Image};
use crate::source::{Follower, FollowerFailed};
use crate::{ByteRange, CHUNK_BYTES, CloneError, Origin, OriginError};

/// Chunks that are saved at once: 256 KiB.
const RUN_CHUNKS_MAX: u64 = 32;
/// A range of more missing chunks is not saved by who must not be held up: 512 KiB.
const NOW_CHUNKS_MAX: u64 = 64;
/// The mode of the store of an image that an older version has given up.
const MODE_GIVEN_UP: Mode = Mode::RUSR;

/// What a restarted process needs to go on.
#[derive(Debug)]
pub struct ImageStoreDescriptors {
    /// The saved content.
    pub store: OwnedFd,
    /// Which chunks are saved, and whether the image is given up.
    pub saved: OwnedFd,
    /// Which chunks the clone has.
    pub delivered: OwnedFd,
}

/// How far a clone elsewhere is, as its source sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PreserveProgress {
    /// Bytes of all files at the freeze.
    pub total_bytes: u64,
    /// Of these delivered.
    pub delivered_bytes: u64,
    /// Saved since the freeze, before the source changed them.
    pub saved_bytes: u64,
}

/// The frozen content of one image.
pub struct ImageStore {
    image: Arc<Image>,
    layout: Layout,
    origin: Arc<dyn Origin>,
    store: File,
    /// Held by whoever changes the store: while its file system hangs nobody else gets at its inode.
    changing: Mutex<()>,
    saved: SharedBitmap,
    delivered: SharedBitmap,
    in_flight: InFlight,
    /// Chunks of each file that are neither saved nor delivered.
    unsaved: Vec<AtomicU64>,
    /// Chunks of each file that the clone does not have.
    undelivered: Vec<AtomicU64>,
    files_undelivered: AtomicUsize,
    delivered_bytes: AtomicU64,
    saved_bytes: AtomicU64,
    failure: OnceLock<String>,
    /// Told of all that outlives this process.
    #[cfg(test)]
    recorder: crate::recorder::Recorder,
}

/// Where a run of chunks is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whereabouts {
    Source,
    Saved,
    Delivered,
}

impl ImageStore {
    /// `origin` are the source's files; what it changes is saved on the file system of `directory`.
    ///
    /// # Errors
    /// [`CloneError::File`] when nothing can be saved there, [`CloneError::Kernel`].
    pub fn create(image: Arc<Image>, origin: Arc<dyn Origin>, directory: &Path) -> Result<ImageStore, CloneError> {
        let store = OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(directory);
        let store = store.map_err(CloneError::file("make a file in", directory))?;
        let (saved, delivered) = (SharedBitmap::create(&image)?, SharedBitmap::create(&image)?);
        Ok(ImageStore::over(image, origin, store, saved, delivered))
    }

    /// Goes on where another process ended.
    ///
    /// # Errors
    /// [`CloneError::Kernel`] for descriptors of something else, or of an image that was given up.
    pub fn reopen(
        image: Arc<Image>,
        origin: Arc<dyn Origin>,
        descriptors: ImageStoreDescriptors,
    ) -> Result<ImageStore, CloneError> {
        let saved = SharedBitmap::open(descriptors.saved)?;
        let delivered = SharedBitmap::open(descriptors.delivered)?;
        let bits = Layout::new(&image).bits();
        if saved.bits() < bits || delivered.bits() < bits {
            let error = std::io::Error::from(std::io::ErrorKind::InvalidInput);
            return Err(CloneError::kernel("share memory")(error));
        }
        let mode = || fstat(&descriptors.store).map_err(|error| CloneError::kernel("look at a store")(error.into()));
        if saved.is_given_up() || Mode::from_raw_mode(mode()?.st_mode) == MODE_GIVEN_UP {
            let error = std::io::Error::other("the image was given up");
            return Err(CloneError::kernel("go on with what was saved")(error));
        }
        Ok(ImageStore::over(image, origin, descriptors.store.into(), saved, delivered))
    }

    fn over(
        image: Arc<Image>,
        origin: Arc<dyn Origin>,
        store: File,
        saved: SharedBitmap,
        delivered: SharedBitmap,
    ) -> ImageStore {
        let layout = Layout::new(&image);
        let mut image_store = ImageStore {
            image,
            layout,
            origin,
            store,
            changing: Mutex::default(),
            saved,
            delivered,
            in_flight: InFlight::new(),
            unsaved: Vec::new(),
            undelivered: Vec::new(),
            files_undelivered: AtomicUsize::new(0),
            delivered_bytes: AtomicU64::new(0),
            saved_bytes: AtomicU64::new(0),
            failure: OnceLock::new(),
            #[cfg(test)]
            recorder: crate::recorder::Recorder::default(),
        };
        image_store.count();
        image_store
    }

    /// Takes the counters from the bitmaps.
    fn count(&mut self) {
        let (mut delivered_bytes, mut saved_bytes, mut files_undelivered) = (0, 0, 0);
        for (number, _) in (0..).zip(&self.image.files) {
            let (file, mut unsaved, mut undelivered) = (FileNumber(number), 0, 0);
            for chunk in self.layout.chunks(file, ByteRange::WHOLE) {
                let bytes = self.layout.bytes(file, &(chunk..chunk + 1));
                let length = bytes.end - bytes.start;
                let whereabouts = self.whereabouts(chunk);
                match whereabouts {
                    Whereabouts::Source => unsaved += 1,
                    Whereabouts::Saved => saved_bytes += length,
                    Whereabouts::Delivered => delivered_bytes += length,
                }
                undelivered += u64::from(whereabouts != Whereabouts::Delivered);
            }
            files_undelivered += usize::from(undelivered > 0);
            self.unsaved.push(AtomicU64::new(unsaved));
            self.undelivered.push(AtomicU64::new(undelivered));
        }
        self.files_undelivered = AtomicUsize::new(files_undelivered);
        self.delivered_bytes = AtomicU64::new(delivered_bytes);
        self.saved_bytes = AtomicU64::new(saved_bytes);
    }

    /// What is frozen.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// Copies of the descriptors for [`ImageStore::reopen`].
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: no descriptors are left.
    pub fn descriptors(&self) -> Result<ImageStoreDescriptors, CloneError> {
        let copy = |descriptor: std::os::fd::BorrowedFd<'_>| {
            descriptor.try_clone_to_owned().map_err(CloneError::kernel("copy a descriptor"))
        };
        Ok(ImageStoreDescriptors {
            store: copy(self.store.as_fd())?,
            saved: copy(self.saved.as_fd())?,
            delivered: copy(self.delivered.as_fd())?,
        })
    }

    /// Counters.
    pub fn progress(&self) -> PreserveProgress {
        PreserveProgress {
            total_bytes: self.layout.total_bytes(),
            delivered_bytes: self.delivered_bytes.load(Relaxed),
            saved_bytes: self.saved_bytes.load(Relaxed),
        }
    }

    /// Whether the clone has everything.
    pub fn is_delivered(&self) -> bool {
        self.files_undelivered.load(Acquire) == 0
    }

    /// Why the image is given up.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Gives the image up, for later processes, too; the first reason stays.
    pub fn fail(&self, reason: &str) {
        self.failure.get_or_init(|| {
            #[cfg(test)]
            self.recorder.note(|| crate::recorder::Event::GiveUp);
            // Before the source may change what was not saved; in memory, since the store's file system may be what
            // hangs.
            self.saved.give_up();
            tracing::error!(reason, "the image for a clone elsewhere is given up");
            reason.to_owned()
        });
        self.in_flight.wake_all();
    }

    /// The frozen content of all of `buffer` at `offset_bytes`. Waits for a disk, never for a network.
    ///
    /// # Errors
    /// [`OriginError::Lost`] when the image is given up, when the range was delivered already or is none of the image;
    /// [`OriginError::Io`].
    pub fn read(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), OriginError> {
        let chunks = self.readable(file, offset_bytes, buffer.len())?;
        let claim = self.claim(file, chunks).map_err(|reason| OriginError::Lost(reason.to_owned()))?;
        let (mut at, mut rest) = (claim.chunks.start, buffer);
        while at < claim.chunks.end {
            let (run, whereabouts) = self.run(at..claim.chunks.end);
            let bytes = self.layout.bytes(file, &run);
            let (part, after) = rest.split_at_mut((bytes.end - bytes.start) as usize);
            match whereabouts {
                Whereabouts::Source => self.origin.read(file, bytes.start, part)?,
                Whereabouts::Saved => self.store.read_exact_at(part, run.start * CHUNK_BYTES)?,
                Whereabouts::Delivered => {
                    return Err(OriginError::Lost("it was delivered and is not kept any more".to_owned()));
                }
            }
            (at, rest) = (run.end, after);
        }
        // Behind the reading: from when it is given up the source may change what was read.
        match self.failure() {
            Some(reason) => Err(OriginError::Lost(reason.to_owned())),
            None => Ok(()),
        }
    }

    /// The chunks of a range that may be asked for: it begins at a chunk, and ends at one or at the file's end.
    fn readable(&self, file: FileNumber, offset_bytes: u64, length: usize) -> Result<Range<u64>, OriginError> {
        let outside =
            || OriginError::Lost(format!("the image has no {length} bytes at {offset_bytes} of file {}", file.0));
        if file.0 as usize >= self.image.files.len() || length == 0 || length > READ_BYTES_MAX {
            return Err(outside());
        }
        let chunks = self.layout.chunks(file, ByteRange::new(offset_bytes, length as u64));
        let bytes = self.layout.bytes(file, &chunks);
        if bytes != (offset_bytes..offset_bytes.saturating_add(length as u64)) { Err(outside()) } else { Ok(chunks) }
    }

    /// The clone has this: it need not be kept. What is no range of the image is left alone.
    pub fn deliver(&self, range: DeliveredRange) {
        if range.file.0 as usize >= self.image.files.len() {
            return;
        }
        let start = range.first.saturating_mul(CHUNK_BYTES);
        let bytes = ByteRange::new(start, range.count.saturating_mul(CHUNK_BYTES));
        let mut chunks = self.layout.chunks(range.file, bytes);
        // In pieces, so that the source waits for short ones only.
        while !chunks.is_empty() {
            let piece = chunks.start..chunks.end.min(chunks.start + RUN_CHUNKS_MAX);
            chunks.start = piece.end;
            let Ok(claim) = self.claim(range.file, piece) else { return };
            self.deliver_claimed(range.file, &claim);
        }
    }

    fn deliver_claimed(&self, file: FileNumber, claim: &Claim<'_>) {
        let mut at = claim.chunks.start;
        while at < claim.chunks.end {
            let (run, whereabouts) = self.run(at..claim.chunks.end);
            at = run.end;
            if whereabouts == Whereabouts::Delivered {
                continue;
            }
            for chunk in run.clone() {
                #[cfg(test)]
                self.recorder.note(|| crate::recorder::Event::Set { bitmap: "delivered", bit: chunk });
                self.delivered.set(chunk);
            }
            let bytes = self.layout.bytes(file, &run);
            self.delivered_bytes.fetch_add(bytes.end - bytes.start, Relaxed);
            let count = run.end - run.start;
            if self.undelivered[file.0 as usize].fetch_sub(count, AcqRel) == count {
                self.files_undelivered.fetch_sub(1, AcqRel);
            }
            match whereabouts {
                Whereabouts::Saved => {
                    self.saved_bytes.fetch_sub(bytes.end - bytes.start, Relaxed);
                    self.give_back(&run);
                }
                _ => {
                    self.unsaved[file.0 as usize].fetch_sub(count, AcqRel);
                }
            }
        }
    }

    /// Frees the space of what was saved.
    fn give_back(&self, run: &Range<u64>) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (start, length) = (run.start * CHUNK_BYTES, (run.end - run.start) * CHUNK_BYTES);
        #[cfg(test)]
        self.recorder.note(|| crate::recorder::Event::GiveBack { start, length });
        let _changing = self.change_store();
        if let Err(error) = fallocate(&self.store, flags, start, length) {
            // It goes with the file in the end.
            tracing::debug!(%error, "the space of delivered content is not given back yet");
        }
    }

    fn change_store(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn whereabouts(&self, chunk: u64) -> Whereabouts {
        match (self.delivered.is_set(chunk), self.saved.is_set(chunk)) {
            (true, _) => Whereabouts::Delivered,
            (false, true) => Whereabouts::Saved,
            (false, false) => Whereabouts::Source,
        }
    }

    /// The chunks at the front that are in one place.
    fn run(&self, chunks: Range<u64>) -> (Range<u64>, Whereabouts) {
        let first = self.whereabouts(chunks.start);
        let end = (chunks.start + 1..chunks.end).find(|chunk| self.whereabouts(*chunk) != first).unwrap_or(chunks.end);
        (chunks.start..end, first)
    }

    /// Waits until nobody has any of these.
    fn claim(&self, file: FileNumber, chunks: Range<u64>) -> Result<Claim<'_>, &str> {
        let shard = self.in_flight.shard(file);
        let mut claimed = shard.lock();
        loop {
            if let Some(reason) = self.failure() {
                return Err(reason);
            }
            if !claimed.iter().any(|claim| claim.start < chunks.end && chunks.start < claim.end) {
                return Ok(shard.claim(claimed, chunks));
            }
            claimed = shard.wait(claimed);
        }
    }

    /// The same, but none when somebody has some.
    fn claim_now(&self, file: FileNumber, chunks: Range<u64>) -> Option<Claim<'_>> {
        let shard = self.in_flight.shard(file);
        let claimed = shard.lock();
        let is_free = !claimed.iter().any(|claim| claim.start < chunks.end && chunks.start < claim.end);
        is_free.then(|| shard.claim(claimed, chunks))
    }

    fn is_in_source(&self, chunk: u64) -> bool {
        self.whereabouts(chunk) == Whereabouts::Source
    }

    /// Saves what of these is only in the source; false when that would have to wait.
    fn save(&self, file: FileNumber, claim: &Claim<'_>, may_wait: bool) -> Result<bool, OriginError> {
        let mut content = Vec::new();
        let mut at = claim.chunks.start;
        while at < claim.chunks.end {
            let (run, whereabouts) = self.run(at..claim.chunks.end);
            at = run.end;
            if whereabouts != Whereabouts::Source {
                continue;
            }
            let bytes = self.layout.bytes(file, &run);
            content.resize((bytes.end - bytes.start) as usize, 0);
            if may_wait {
                self.origin.read(file, bytes.start, &mut content)?;
            } else if !self.origin.read_now(file, bytes.start, &mut content)? {
                return Ok(false);
            }
            let _changing = if may_wait {
                self.change_store()
            } else {
                let Ok(changing) = self.changing.try_lock() else { return Ok(false) };
                changing
            };
            check_free(&self.store)?;
            let offset_bytes = run.start * CHUNK_BYTES;
            #[cfg(test)]
            self.recorder.note(|| crate::recorder::Event::Bring { file, offset_bytes, content: content.clone() });
            self.store.write_all_at(&content, offset_bytes)?;
            for chunk in run.clone() {
                #[cfg(test)]
                self.recorder.note(|| crate::recorder::Event::Set { bitmap: "saved", bit: chunk });
                self.saved.set(chunk);
            }
            self.saved_bytes.fetch_add(content.len() as u64, Relaxed);
            self.unsaved[file.0 as usize].fetch_sub(run.end - run.start, AcqRel);
        }
        Ok(true)
    }

    fn cannot_save(&self, file: FileNumber, error: &OriginError) -> FollowerFailed {
        let path = self.image.files[file.0 as usize].path.display();
        self.fail(&format!("cannot save the frozen content of {path}: {error}"));
        self.failed()
    }

    fn failed(&self) -> FollowerFailed {
        FollowerFailed(self.failure().unwrap_or_default().to_owned())
    }
}

impl Follower for ImageStore {
    fn has(&self, file: FileNumber, range: ByteRange) -> bool {
        self.has_all_of(file) || !self.layout.chunks(file, range).any(|chunk| self.is_in_source(chunk))
    }

    fn has_all_of(&self, file: FileNumber) -> bool {
        self.unsaved[file.0 as usize].load(Acquire) == 0
    }

    fn take_now(&self, file: FileNumber, range: ByteRange) -> Result<bool, FollowerFailed> {
        if self.failure().is_some() {
            return Err(self.failed());
        }
        let chunks = self.layout.chunks(file, range);
        if chunks.end - chunks.start > NOW_CHUNKS_MAX {
            return Ok(self.has(file, range));
        }
        let Some(claim) = self.claim_now(file, chunks) else { return Ok(false) };
        self.save(file, &claim, false).map_err(|error| self.cannot_save(file, &error))
    }

    fn take(&self, file: FileNumber, range: ByteRange) -> Result<(), FollowerFailed> {
        let mut chunks = self.layout.chunks(file, range);
        while let Some(first) = chunks.clone().find(|chunk| self.is_in_source(*chunk)) {
            let run = first..chunks.end.min(first + RUN_CHUNKS_MAX);
            chunks.start = run.end;
            let claim = self.claim(file, run).map_err(|reason| FollowerFailed(reason.to_owned()))?;
            self.save(file, &claim, true).map_err(|error| self.cannot_save(file, &error))?;
        }
        Ok(())
    }

    fn give_up(&self, reason: &str) {
        self.fail(reason);
    }
}

impl std::fmt::Debug for ImageStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageStore").field("progress", &self.progress()).field("failure", &self.failure).finish()
    }
}

#[cfg(test)]
mod deaths;
#[cfg(test)]
mod tests;
