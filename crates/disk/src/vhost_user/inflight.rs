//! Which requests were under way when this process died.
//!
//! The area is a file that the front end keeps; this process only maps it, so it outlives a `kill -9`. Its layout and
//! the order of the stores are the protocol's (docs/interop/vhost-user.rst, "Inflight I/O tracking", split virtqueue):
//!
//! ```text
//! a queue:  u64 features, u16 version, u16 descriptors, u16 last_batch_head, u16 used_index, then a state a descriptor
//! a state:  u8 in_flight, 5 bytes, u16 next, u64 counter
//! ```
//! A request is marked before it is done and cleared after the used ring tells the guest. Between telling and clearing
//! a kill leaves marks too many: the chain of the last batch, and the used index, tell which.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// The layout's version that this follows: a new area has 0.
const VERSION: u16 = 1;
const HEADER_BYTES: usize = 16;
const STATE_BYTES: usize = 16;
/// Queues' parts begin at cache lines.
const QUEUE_ALIGN_BYTES: usize = 64;

/// Why an area is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum InflightError {
    #[error("the area of requests in flight cannot be made: {0}")]
    Create(#[from] std::io::Error),
    #[error("the area of requests in flight cannot be mapped: {0}")]
    Map(#[from] vm_memory::mmap::MmapRegionError),
    #[error("an area of {size_bytes} bytes for requests in flight of {queues} queues with {queue_size} descriptors")]
    Size { size_bytes: u64, queues: u16, queue_size: u16 },
}

/// The whole area.
#[derive(Debug)]
pub(super) struct InflightArea {
    mapping: MmapRegion<()>,
    queues: u16,
    queue_size: u16,
}

/// Bytes of one queue's part.
fn queue_bytes(queue_size: u16) -> usize {
    (HEADER_BYTES + STATE_BYTES * usize::from(queue_size)).next_multiple_of(QUEUE_ALIGN_BYTES)
}

impl InflightArea {
    /// Makes the file of a new area, all zeros, and tells its size.
    pub(super) fn create(queues: u16, queue_size: u16) -> Result<(File, u64), InflightError> {
        let size_bytes = (queue_bytes(queue_size) * usize::from(queues)) as u64;
        let file = rustix::fs::memfd_create("onecopy-inflight", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(std::io::Error::from)?;
        let file = File::from(file);
        file.set_len(size_bytes)?;
        Ok((file, size_bytes))
    }

    /// Maps an area that the front end kept.
    pub(super) fn map(
        file: File,
        offset: u64,
        size_bytes: u64,
        (queues, queue_size): (u16, u16),
    ) -> Result<InflightArea, InflightError> {
        let needed = queue_bytes(queue_size) * usize::from(queues);
        if needed == 0 || size_bytes < needed as u64 {
            return Err(InflightError::Size { size_bytes, queues, queue_size });
        }
        // Maps no byte behind the file's end: a touch there would kill this process.
        let mapping = MmapRegion::from_file(FileOffset::new(file, offset), needed)?;
        Ok(InflightArea { mapping, queues, queue_size })
    }

    /// One queue's part, when the area has it.
    pub(super) fn queue(self: &Arc<Self>, index: u16, size: u16) -> Option<InflightQueue> {
        let fits = index < self.queues && size <= self.queue_size;
        let base = usize::from(index) * queue_bytes(self.queue_size);
        fits.then(|| InflightQueue { area: self.clone(), base, size })
    }
}

/// One queue's part.
#[derive(Clone, Debug)]
pub(super) struct InflightQueue {
    area: Arc<InflightArea>,
    base: usize,
    size: u16,
}

/// What a ring continues with.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Recovered {
    /// Heads under way, in the order in which they were begun.
    pub(super) heads: Vec<u16>,
    /// The next request's number.
    pub(super) counter: u64,
}

impl InflightQueue {
    /// Reads what was under way, given how far the used ring got; nothing of a new area.
    pub(super) fn recover(&self, used_index: u16) -> Option<Recovered> {
        if self.u16_at(8).load(Ordering::Acquire) == 0 {
            self.u16_at(10).store(self.size, Ordering::Relaxed);
            self.u16_at(14).store(used_index, Ordering::Relaxed);
            self.u16_at(8).store(VERSION, Ordering::Release);
            return None;
        }
        self.end_last_batch(used_index);
        let mut marked: Vec<(u64, u16)> = (0..self.size)
            .filter(|head| self.mark_of(*head).load(Ordering::Acquire) != 0)
            .map(|head| (self.counter_of(head).load(Ordering::Acquire), head))
            .collect();
        marked.sort_unstable();
        let counter = marked.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Some(Recovered { heads: marked.into_iter().map(|(_, head)| head).collect(), counter })
    }

    /// Clears the marks of a batch that the used ring has and that were not cleared any more.
    fn end_last_batch(&self, used_index: u16) {
        let told = used_index.wrapping_sub(self.u16_at(14).load(Ordering::Acquire));
        let mut head = self.u16_at(12).load(Ordering::Acquire);
        // A batch has at most a ring's requests; a damaged chain ends there, too.
        for _ in 0..told.min(self.size) {
            if head >= self.size {
                break;
            }
            self.mark_of(head).store(0, Ordering::Release);
            head = self.next_of(head).load(Ordering::Acquire);
        }
        self.u16_at(14).store(used_index, Ordering::Release);
    }

    /// A request is about to be done.
    pub(super) fn begin(&self, head: u16, counter: u64) {
        self.counter_of(head).store(counter, Ordering::Relaxed);
        self.mark_of(head).store(1, Ordering::Release);
    }

    /// A request is not done now after all.
    pub(super) fn forget(&self, head: u16) {
        self.mark_of(head).store(0, Ordering::Release);
    }

    /// A request of the batch that the used ring will tell next.
    pub(super) fn link(&self, head: u16) {
        let last = self.u16_at(12);
        self.next_of(head).store(last.load(Ordering::Relaxed), Ordering::Release);
        last.store(head, Ordering::Release);
    }

    /// The used ring has told: the batch is no more under way.
    pub(super) fn told(&self, heads: impl Iterator<Item = u16>, used_index: u16) {
        for head in heads {
            self.mark_of(head).store(0, Ordering::Release);
        }
        self.u16_at(14).store(used_index, Ordering::Release);
    }

    fn u16_at(&self, offset: usize) -> &AtomicU16 {
        self.area.mapping.get_atomic_ref(self.base + offset).expect("lies within the mapping, which was sized for it")
    }

    fn state(&self, head: u16) -> usize {
        self.base + HEADER_BYTES + STATE_BYTES * usize::from(head)
    }

    fn mark_of(&self, head: u16) -> &AtomicU8 {
        self.area.mapping.get_atomic_ref(self.state(head)).expect("a head is below the queue's size")
    }

    fn next_of(&self, head: u16) -> &AtomicU16 {
        self.area.mapping.get_atomic_ref(self.state(head) + 6).expect("a head is below the queue's size")
    }

    fn counter_of(&self, head: u16) -> &AtomicU64 {
        self.area.mapping.get_atomic_ref(self.state(head) + 8).expect("a head is below the queue's size")
    }
}
