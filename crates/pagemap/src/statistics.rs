//! What a page map has done and holds.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// What a page map has done since it was made, and holds now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Blocks whose content is known now.
    pub known_blocks: u64,
    /// Bytes of memory that are set aside; what is not used of them is not resident.
    pub memory_bytes: u64,
    /// Blocks whose content was recorded.
    pub recorded: u64,
    /// Pages that were asked for.
    pub lookups: u64,
    /// Of these, pages that were all zeros.
    pub found_zero: u64,
    /// Of these, pages that the hint found.
    pub found_by_hint: u64,
    /// Of these, pages that only the index found.
    pub found_by_index: u64,
    /// Entries of the index that others pushed out.
    pub replaced_entries: u64,
    /// Extents of 4 MiB of disk that were forgotten for want of room.
    pub dropped_extents: u64,
}

/// The counters behind it.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) recorded: AtomicU64,
    pub(crate) lookups: AtomicU64,
    pub(crate) found_zero: AtomicU64,
    pub(crate) found_by_hint: AtomicU64,
    pub(crate) found_by_index: AtomicU64,
}

impl Counters {
    /// Adds one.
    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// The figures that the counters know.
    pub(crate) fn statistics(&self) -> Statistics {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Statistics {
            recorded: read(&self.recorded),
            lookups: read(&self.lookups),
            found_zero: read(&self.found_zero),
            found_by_hint: read(&self.found_by_hint),
            found_by_index: read(&self.found_by_index),
            ..Statistics::default()
        }
    }
}
