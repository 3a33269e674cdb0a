//! How far a clone is, counted as it goes.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicU64, AtomicUsize};

/// How far a clone is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FillProgress {
    /// Bytes of all its files at the freeze.
    pub total_bytes: u64,
    /// Of these filled, or no longer needed.
    pub filled_bytes: u64,
    /// Accesses, of either side, that found something missing.
    pub demand_faults: u64,
    /// Bytes that the background filled.
    pub background_bytes: u64,
    /// Bytes that accesses filled.
    pub demand_bytes: u64,
    /// Files that are not yet whole and written back.
    pub files_left: u64,
}

/// For whom a range is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Demand,
    Background,
}

/// What a filling counts.
#[derive(Debug)]
pub(super) struct Counters {
    total_bytes: u64,
    filled_bytes: AtomicU64,
    demand_faults: AtomicU64,
    background_bytes: AtomicU64,
    demand_bytes: AtomicU64,
    files_left: AtomicUsize,
}

impl Counters {
    pub fn new(files_left: usize, total_bytes: u64, filled_bytes: u64) -> Counters {
        Counters {
            total_bytes,
            filled_bytes: AtomicU64::new(filled_bytes),
            demand_faults: AtomicU64::new(0),
            background_bytes: AtomicU64::new(0),
            demand_bytes: AtomicU64::new(0),
            files_left: AtomicUsize::new(files_left),
        }
    }

    pub fn progress(&self) -> FillProgress {
        FillProgress {
            total_bytes: self.total_bytes,
            filled_bytes: self.filled_bytes.load(Relaxed),
            demand_faults: self.demand_faults.load(Relaxed),
            background_bytes: self.background_bytes.load(Relaxed),
            demand_bytes: self.demand_bytes.load(Relaxed),
            files_left: self.files_left.load(Relaxed) as u64,
        }
    }

    pub fn note_fault(&self) {
        self.demand_faults.fetch_add(1, Relaxed);
    }

    /// Frozen content was brought.
    pub fn note_brought(&self, purpose: Purpose, bytes: u64) {
        let counter = match purpose {
            Purpose::Demand => &self.demand_bytes,
            Purpose::Background => &self.background_bytes,
        };
        counter.fetch_add(bytes, Relaxed);
    }

    /// Chunks of so many bytes are no longer missing.
    pub fn note_filled(&self, bytes: u64) {
        self.filled_bytes.fetch_add(bytes, Relaxed);
    }

    pub fn note_file_whole(&self) {
        self.files_left.fetch_sub(1, AcqRel);
    }

    pub fn all_files_whole(&self) -> bool {
        self.files_left.load(Acquire) == 0
    }
}
