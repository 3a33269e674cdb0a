//! Whether a descriptor that another process has would raise events.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::event::{Access, EventBuffer, Verdict};
use super::group::Group;
use crate::CloneError;

/// Where descriptors are tried: beyond any file's end, so that whoever else is told of it has nothing to do. Each try
/// is of a page of its own: several at a time may try descriptors of the same file, and each is told of all.
const PROBE_OFFSET_BYTES: u64 = 1 << 60;
/// What the kernel tells of begins at a page; none of x86-64 or ARM is larger than this.
const PAGE_BYTES_MAX: u64 = 64 << 10;
/// Tries of this process.
static TRIES: AtomicU64 = AtomicU64::new(0);
/// How soon the answering thread sees that it is to end.
const STOP_CHECK_MS: u64 = 20;

/// Tells armed descriptors from unarmed ones, by a group and a thread of its own and a read that gives nothing.
///
/// The read of an armed descriptor raises an event in *every* group with a live mark on its file, with this process's
/// number and a range beyond the file's end: other groups' listeners must allow it.
#[derive(Debug)]
pub struct Probe {
    group: Arc<Group>,
    /// Where the present try reads; 0 once it was told of.
    tried: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    answering: Option<JoinHandle<()>>,
    one_at_a_time: Mutex<()>,
}

impl Probe {
    /// A new one.
    ///
    /// # Errors
    /// [`CloneError::Kernel`], as [`Group::new`]; or no thread can be started.
    pub fn new() -> Result<Probe, CloneError> {
        let group = Arc::new(Group::new()?);
        let (tried, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let answering = {
            let (group, tried, stop) = (Arc::clone(&group), Arc::clone(&tried), Arc::clone(&stop));
            std::thread::Builder::new()
                .name("clone-probe".to_owned())
                .spawn(move || answer_all(&group, &tried, &stop))
                .map_err(CloneError::kernel("start a thread"))?
        };
        Ok(Probe { group, tried, stop, answering: Some(answering), one_at_a_time: Mutex::new(()) })
    }

    /// Whether accesses through `descriptor`, which must be readable, raise events once its file is marked.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: its file takes no marks, or the descriptor cannot be read.
    pub fn is_armed(&self, descriptor: impl AsFd) -> Result<bool, CloneError> {
        let _turn = self.one_at_a_time.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let descriptor = descriptor.as_fd();
        self.group.mark_file(descriptor)?;
        let offset_bytes = PROBE_OFFSET_BYTES + TRIES.fetch_add(1, Ordering::Relaxed) * PAGE_BYTES_MAX;
        self.tried.store(offset_bytes, Ordering::Release);
        let read = rustix::io::retry_on_intr(|| rustix::io::pread(descriptor, &mut [0][..], offset_bytes));
        let told = self.tried.load(Ordering::Acquire) == 0;
        self.group.unmark_file(descriptor)?;
        read.map_err(|error| CloneError::kernel("try a descriptor")(error.into()))?;
        Ok(told)
    }

    #[cfg(test)]
    pub(super) fn group_descriptor(&self) -> std::os::fd::BorrowedFd<'_> {
        self.group.as_fd()
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.answering.take() {
            let _ = thread.join();
        }
    }
}

/// Allows everything and notes the present try; notes before it allows, so that the one who tries sees it.
fn answer_all(group: &Group, tried: &AtomicU64, stop: &AtomicBool) {
    let mut buffer = EventBuffer::default();
    while !stop.load(Ordering::Acquire) {
        let events = match group.read(&mut buffer, Duration::from_millis(STOP_CHECK_MS)) {
            Ok(events) => events,
            Err(error) => {
                tracing::warn!(%error, "cannot tell armed descriptors from others");
                Vec::new()
            }
        };
        for event in events {
            if let Access::Range(range) = event.access
                && event.process_id == std::process::id()
            {
                let _ = tried.compare_exchange(range.start, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
            if let Err(error) = group.answer(event.descriptor.as_raw_fd(), Verdict::Allow) {
                tracing::warn!(%error, "an access may wait for ever");
            }
        }
    }
}
