//! Filling what nobody asks for, until a clone is whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::filling::{FillError, Filling};
use super::limiter::Limiter;
use super::priority;
use crate::image::FileNumber;
use crate::{ByteRange, CloneError};

/// Whole files are written back together, at most this many: the disk gets them in its own order.
const SYNC_FILES_MAX: usize = 32;
/// And no more than about this many bytes, so that the kernel does not slow writers down for what has not been written
/// back.
const SYNC_BYTES_MAX: u64 = 32 << 20;

/// A clone that follows its source has replayed a removal by then.
const REMOVAL_WAIT_MAX: Duration = Duration::from_secs(30);
/// How often it is looked whether it has.
const REMOVAL_LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// What is called when a file is whole and written back.
type OnFileWhole = Box<dyn Fn(FileNumber) + Send>;

/// A thread that fills a clone's files and has them written back.
#[derive(Debug)]
pub struct Background {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Fills `hot` first, in this order, then all files: those by which the source is asked most for what they still
    /// lack, then the smallest, those that the origin has lost last. Calls `on_file_whole` once for each file when it
    /// is whole and written back, or when its last name is gone; durable is all of it when [`crate::target::finish`]
    /// has made it so. Bytes pass through `limiter`. Errors become the filling's failure.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: no thread can be started.
    pub fn start(
        filling: Arc<Filling>,
        hot: Vec<(FileNumber, ByteRange)>,
        limiter: Arc<Limiter>,
        on_file_whole: impl Fn(FileNumber) + Send + 'static,
    ) -> Result<Background, CloneError> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut work = Work {
            filling,
            limiter,
            stop: Arc::clone(&stop),
            on_file_whole: Box::new(on_file_whole),
            to_sync: Vec::new(),
            to_sync_bytes: 0,
        };
        let thread = std::thread::Builder::new()
            .name("clone-background".to_owned())
            .spawn(move || {
                priority::lower();
                // The filling knows why.
                let _ = work.run(&hot);
            })
            .map_err(CloneError::kernel("start a thread"))?;
        Ok(Background { stop, thread: Some(thread) })
    }

    /// Whether the thread is through: [`Filling::whole`] or [`Filling::failure`] says with what result.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Returns when it is through.
    pub fn wait(mut self) {
        self.join();
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Background {
    /// Stops it, after the run that it is at.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.join();
    }
}

struct Work {
    filling: Arc<Filling>,
    limiter: Arc<Limiter>,
    stop: Arc<AtomicBool>,
    on_file_whole: OnFileWhole,
    /// Files that are whole but not yet written back.
    to_sync: Vec<FileNumber>,
    to_sync_bytes: u64,
}

impl Work {
    fn run(&mut self, hot: &[(FileNumber, ByteRange)]) -> Result<(), FillError> {
        for &(file, range) in hot.iter().filter(|(file, _)| !self.filling.is_file_lost(*file)) {
            self.fill(file, range)?;
        }
        let files = &self.filling.image().files;
        let mut left: Vec<FileNumber> = (0..files.len() as u32).map(FileNumber).collect();
        // The last one is the next.
        left.sort_by_cached_key(|file| {
            std::cmp::Reverse((self.filling.is_file_lost(*file), files[file.0 as usize].size_bytes))
        });
        let mut busy = Vec::new();
        loop {
            // Ranked anew with each writing back: before each file it would cost more than the filling, of many files.
            if self.to_sync.is_empty() {
                left.append(&mut busy);
                busy = self.filling.take_busy(&mut left);
            }
            let Some(file) = busy.pop().or_else(|| left.pop()) else { return self.sync() };
            self.wait_removed(file)?;
            self.fill(file, ByteRange::WHOLE)?;
            if self.stopped() {
                return Ok(());
            }
            self.to_sync.push(file);
            self.to_sync_bytes += self.filling.image().files[file.0 as usize].size_bytes;
            if self.to_sync.len() >= SYNC_FILES_MAX || self.to_sync_bytes >= SYNC_BYTES_MAX {
                self.sync()?;
            }
        }
    }

    /// The source has removed the file, and the process that had it open is dead: the clone removes its own when it has
    /// replayed that.
    fn wait_removed(&self, file: FileNumber) -> Result<(), FillError> {
        let begin = Instant::now();
        while self.filling.is_file_lost(file) && begin.elapsed() < REMOVAL_WAIT_MAX && !self.stopped() {
            if self.is_nameless(file)? {
                break;
            }
            std::thread::sleep(REMOVAL_LOOK_INTERVAL);
        }
        Ok(())
    }

    fn fill(&self, file: FileNumber, range: ByteRange) -> Result<(), FillError> {
        while let Some(bytes) = self.filling.next_missing_run(file, range) {
            if self.stopped() {
                return Ok(());
            }
            if self.is_nameless(file)? {
                return self.filling.waive(file, ByteRange::WHOLE);
            }
            self.limiter.take(bytes.end - bytes.start, &self.stop);
            if self.stopped() {
                return Ok(());
            }
            // Somebody who waits may have got it while this waited for the limiter: nothing travels twice.
            let Some(bytes) = self.filling.next_missing_run(file, bytes.into()) else { continue };
            self.filling.prefetch(file, &bytes);
            priority::ordinary(|| self.filling.ensure_in_background(file, bytes.into()))?;
        }
        Ok(())
    }

    /// Has whole files written back and tells of them. No fsync(2): each would have the disk empty its cache, for which
    /// the source waits, too, and until it is whole nobody starts this clone after a crash.
    fn sync(&mut self) -> Result<(), FillError> {
        self.to_sync_bytes = 0;
        for &file in &self.to_sync {
            priority::start_writing_back(self.filling.file(file));
        }
        for file in std::mem::take(&mut self.to_sync) {
            if self.stopped() {
                return Ok(());
            }
            let written = priority::wait_written_back(self.filling.file(file));
            written.map_err(|error| self.filling.fail(&self.filling.reason("bring to disk", file, &error)))?;
            self.filling.note_file_whole();
            (self.on_file_whole)(file);
        }
        Ok(())
    }

    fn is_nameless(&self, file: FileNumber) -> Result<bool, FillError> {
        let links = rustix::fs::fstat(self.filling.file(file)).map(|metadata| metadata.st_nlink);
        links.map(|links| links == 0).map_err(|error| self.filling.fail(&self.filling.reason("examine", file, &error)))
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}
