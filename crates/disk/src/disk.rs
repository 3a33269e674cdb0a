//! A disk, open.

use std::io::IoSliceMut;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::check::{self, CheckReport};
use crate::engine::workers::Workers;
use crate::engine::{self, Core, WaitPolicy};
use crate::format::header::Header;
use crate::source::Hydration;
use crate::{
    At, Attempt, Completion, CreateOptions, DiskError, Epoch, Geometry, GuestSegment, OpenOptions, Request, Requester,
    Snapshot, Statistics, View, WriteLog,
};

/// How long a close waits for requests that wait for another host.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A disk that this process has open. Clones are the same disk. When the last one goes without [`close`](Disk::close)
/// the disk is left as after a killed process: nothing that was flushed is lost.
#[derive(Clone)]
pub struct Disk(Arc<Handle>);

struct Handle {
    core: Arc<Core>,
    workers: Workers,
    background: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.workers.close(Duration::ZERO);
        self.core.shut();
        self.core.close_base();
        self.end_background();
        self.core.abandon();
    }
}

impl Handle {
    fn end_background(&self) {
        self.core.signal.end();
        if let Some(thread) = self.background.lock().unwrap_or_else(PoisonError::into_inner).take()
            && thread.join().is_err()
        {
            tracing::error!(directory = self.core.describe(), "a disk's housekeeping has panicked");
        }
    }
}

impl Disk {
    /// Makes an empty disk in a directory, which may exist.
    ///
    /// # Errors
    /// [`DiskError::Size`], [`DiskError::Exists`], or the file system refuses.
    pub fn create(directory: &Path, options: &CreateOptions) -> Result<(), DiskError> {
        engine::create(directory, options)
    }

    /// Takes the disk's lease and opens it, with all that was flushed ever, and all that a killed process in this boot
    /// had acknowledged.
    ///
    /// # Errors
    /// [`DiskError::Leased`] when another holder did not give it back in time; [`DiskError::Format`] when a file is
    /// damaged; the base cannot be opened.
    pub fn open(directory: &Path, options: OpenOptions) -> Result<Disk, DiskError> {
        let (core, needs_checkpoint) = Core::open(directory, options)?;
        let core = Arc::new(core);
        core.watch_need();
        let background = std::thread::Builder::new().name("disk-housekeeping".into()).spawn({
            let core = core.clone();
            move || engine::tend(&core, needs_checkpoint)
        });
        let background = background.map_err(|error| DiskError::io("start a thread for", directory, error))?;
        let workers = Workers::new(core.clone());
        Ok(Disk(Arc::new(Handle { core, workers, background: Mutex::new(Some(background)) })))
    }

    /// Lets submitted requests end, makes all durable and gives the lease back, in bounded time also when a source
    /// cannot be reached: what waits for it longer than 2 s fails with [`DiskError::Closed`]. Epochs end with it.
    ///
    /// # Errors
    /// [`DiskError::Closed`] when it was closed before. Any other: the last writes may not be durable; the lease is
    /// given back nevertheless.
    pub fn close(&self) -> Result<(), DiskError> {
        self.0.workers.close(CLOSE_TIMEOUT);
        if !self.0.core.shut() {
            return Err(DiskError::Closed);
        }
        self.0.core.close_base();
        self.0.end_background();
        self.0.core.finish()
    }

    /// What a disk is, also while somebody else has it.
    ///
    /// # Errors
    /// There is none, or its header is damaged.
    pub fn geometry(directory: &Path) -> Result<Geometry, DiskError> {
        Header::read(directory).map(|header| header.geometry())
    }

    /// Checks a disk's files without changing them. Best done while nobody has it open: what an owner does meanwhile
    /// may look like damage.
    ///
    /// # Errors
    /// There is no disk. Damage is told in the report.
    pub fn check(directory: &Path) -> Result<CheckReport, DiskError> {
        check::check(directory)
    }

    #[cfg(test)]
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.0.core
    }

    /// Its size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.0.core.header.size_bytes
    }

    /// The seed of its content hashes.
    pub fn hash_seed(&self) -> u64 {
        self.0.core.header.seed()
    }

    /// Its identity, 32 hexadecimal digits.
    pub fn uuid(&self) -> &str {
        &self.0.core.header.uuid
    }

    /// How often it has been opened by anybody, this time included.
    pub fn generation(&self) -> u64 {
        self.0.core.generation
    }

    /// Whether the one who had it open before closed it.
    pub fn was_closed(&self) -> bool {
        self.0.core.was_closed
    }

    /// Reads. Whole sectors.
    ///
    /// # Errors
    /// [`DiskError::OutOfRange`], or the source or the file cannot be read.
    pub fn read(&self, offset: u64, into: &mut [IoSliceMut<'_>]) -> Result<(), DiskError> {
        self.read_segments(offset, into, &[])
    }

    /// Reads, and tells the observer where the segments lie in guest memory.
    ///
    /// # Errors
    /// As [`read`](Disk::read).
    pub fn read_segments(
        &self,
        offset: u64,
        into: &mut [IoSliceMut<'_>],
        segments: &[GuestSegment],
    ) -> Result<(), DiskError> {
        self.0.core.read(offset, into, segments, WaitPolicy::Wait(None)).map(|_| ())
    }

    /// Writes. Whole sectors. The segments tell where the data lies in guest memory: none, or as much as data. Durable
    /// after the next [`flush`](Disk::flush).
    ///
    /// # Errors
    /// [`DiskError::OutOfRange`]; [`DiskError::Full`], then each block has its old or its new content;
    /// [`DiskError::ReadOnly`] after a failure.
    pub fn write(&self, offset: u64, from: &[u8], segments: &[GuestSegment]) -> Result<(), DiskError> {
        self.0.core.write(offset, from, segments, WaitPolicy::Wait(None)).map(|_| ())
    }

    /// Makes all writes durable that have returned. Calls at the same time share the work.
    ///
    /// # Errors
    /// [`DiskError::Full`]: nothing is lost, another flush may succeed. Any other failure of the files makes the disk
    /// read only, as what they hold is not known any more.
    pub fn flush(&self) -> Result<(), DiskError> {
        self.0.core.check_open()?;
        self.0.core.flush()
    }

    /// Makes a range read as zeros and frees its whole blocks' space, after the next flush.
    ///
    /// # Errors
    /// As [`write`](Disk::write).
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), DiskError> {
        self.0.core.zero(offset, length, true)
    }

    /// Makes a range read as zeros. Unless it `may_unmap`, its space stays or becomes reserved.
    ///
    /// # Errors
    /// As [`write`](Disk::write).
    pub fn write_zeroes(&self, offset: u64, length: u64, may_unmap: bool) -> Result<(), DiskError> {
        self.0.core.zero(offset, length, may_unmap)
    }

    /// Reads what is in memory.
    ///
    /// # Errors
    /// As [`read`](Disk::read).
    pub fn try_read(
        &self,
        offset: u64,
        into: &mut [IoSliceMut<'_>],
        segments: &[GuestSegment],
    ) -> Result<Attempt, DiskError> {
        self.0.core.read(offset, into, segments, WaitPolicy::NoWait)
    }

    /// Writes, unless a partly written block must first be read from elsewhere. When it would wait, some of the blocks
    /// may have their new content already: hand the same request on.
    ///
    /// # Errors
    /// As [`write`](Disk::write).
    pub fn try_write(&self, offset: u64, from: &[u8], segments: &[GuestSegment]) -> Result<Attempt, DiskError> {
        self.0.core.write(offset, from, segments, WaitPolicy::NoWait)
    }

    /// Does a request on the disk's own threads. Completions come in any order. Waits for room when 4096 requests wait.
    pub fn submit(&self, request: Request, completion: Completion) {
        self.0.workers.submit(request, false, None, completion);
    }

    /// The same for a requester that may withdraw it: then its completion is never called, also when it had withdrawn
    /// before.
    pub fn submit_for(&self, requester: &Requester, request: Request, completion: Completion) {
        self.0.workers.submit(request, false, Some(requester.clone()), completion);
    }

    /// The same, and what it changes is durable before it is answered.
    pub fn submit_durable(&self, requester: &Requester, request: Request, completion: Completion) {
        self.0.workers.submit(request, true, Some(requester.clone()), completion);
    }

    /// Ends what was submitted for a requester: when this returns nothing of it changes the disk any more, and no
    /// completion of it is called that was not begun. Waits for the disk's own files at most, never for a source.
    pub fn withdraw(&self, requester: &Requester) {
        requester.withdraw();
        self.0.workers.forget_withdrawn();
    }

    /// Whether something that was submitted for a requester waits for this host alone, and for no source elsewhere.
    pub(crate) fn has_local(&self, requester: &Requester) -> bool {
        self.0.workers.has_local(requester)
    }

    /// The current epoch.
    pub fn epoch(&self) -> Epoch {
        self.0.core.epoch()
    }

    /// Ends the current epoch, whose end stays readable until it is released, and gives its number. Waits for
    /// writes that are at work in the files; no input or output of its own.
    ///
    /// # Errors
    /// [`DiskError::TooManyEpochs`], [`DiskError::Closed`].
    pub fn cut(&self) -> Result<Epoch, DiskError> {
        self.0.core.cut()
    }

    /// Lets an ended epoch go. Its space is freed in the background, once no [`View`] reads it.
    ///
    /// # Errors
    /// [`DiskError::UnknownEpoch`]: also for the current one, and for a snapshot's.
    pub fn release(&self, epoch: Epoch) -> Result<(), DiskError> {
        self.0.core.release(epoch)
    }

    /// Lets all ended epochs go up to this one: also those whose [`cut`](Disk::cut) nobody has heard of. How many.
    ///
    /// # Errors
    /// [`DiskError::Closed`].
    pub fn release_through(&self, epoch: Epoch) -> Result<usize, DiskError> {
        self.0.core.release_through(epoch)
    }

    /// The content now, at the end of an epoch or at a snapshot.
    ///
    /// # Errors
    /// [`DiskError::UnknownEpoch`], [`DiskError::UnknownSnapshot`], [`DiskError::Closed`].
    pub fn view(&self, at: &At) -> Result<View, DiskError> {
        let core = self.0.core.clone();
        core.check_open()?;
        Ok(match at {
            At::Current => View::current(core),
            At::Epoch(epoch) => {
                let map = core.map_of_epoch(*epoch)?;
                View::frozen(core, map)
            }
            At::Snapshot(name) => {
                let map = core.map_of_snapshot(name)?;
                View::frozen(core, map)
            }
        })
    }

    /// Blocks that were written, zeroed or discarded after the end of `from` and up to the end of `to`, as rising
    /// ranges. Both are epochs that are kept, or snapshots' epochs.
    ///
    /// # Errors
    /// [`DiskError::UnknownEpoch`].
    pub fn changed(&self, from: Epoch, to: Epoch) -> Result<Vec<Range<u64>>, DiskError> {
        self.0.core.check_open()?;
        self.0.core.changed(from, to)
    }

    /// The writes of an ended epoch, once; none when they were not recorded, or were taken. What was discarded or
    /// zeroed without data is not among them: [`changed`](Disk::changed) has it.
    pub fn take_write_log(&self, epoch: Epoch) -> Option<WriteLog> {
        self.0.core.take_write_log(epoch)
    }

    /// Keeps the content as it is now, durable when this returns. Ends the current epoch.
    ///
    /// # Errors
    /// [`DiskError::SnapshotExists`], [`DiskError::SnapshotName`], [`DiskError::TooManySnapshots`], or as
    /// [`flush`](Disk::flush).
    pub fn snapshot(&self, name: &str) -> Result<Snapshot, DiskError> {
        self.0.core.snapshot(name)
    }

    /// All snapshots, oldest first.
    pub fn snapshots(&self) -> Vec<Snapshot> {
        self.0.core.snapshots()
    }

    /// Forgets a snapshot, durably when this returns. Its space is freed in the background.
    ///
    /// # Errors
    /// [`DiskError::UnknownSnapshot`]; [`DiskError::SnapshotInUse`] when another disk or process reads it.
    pub fn delete_snapshot(&self, name: &str) -> Result<(), DiskError> {
        self.0.core.delete_snapshot(name)
    }

    /// What it did since it was opened, and what it holds.
    pub fn statistics(&self) -> Statistics {
        Statistics { pending_requests: self.0.workers.pending() as u64, ..self.0.core.statistics() }
    }

    /// How far the base's copy has come, when it is copied.
    pub fn hydration(&self) -> Option<Hydration> {
        self.0.core.base.as_ref()?.hydration()
    }

    /// Bounds the copy of the base in the background; none is no bound.
    pub fn set_hydration_limit(&self, bytes_per_second: Option<u64>) {
        if let Some(base) = &self.0.core.base {
            base.set_hydration_limit(bytes_per_second);
        }
    }
}
