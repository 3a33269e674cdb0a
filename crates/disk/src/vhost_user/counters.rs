//! What a back end counts.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// A number that only grows.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// All counters of a back end.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) reads: Counter,
    pub(super) read_bytes: Counter,
    pub(super) writes: Counter,
    pub(super) written_bytes: Counter,
    pub(super) flushes: Counter,
    pub(super) discards: Counter,
    pub(super) waited: Counter,
    pub(super) failed: Counter,
    pub(super) malformed: Counter,
    pub(super) broken_rings: Counter,
    pub(super) kicks: Counter,
    pub(super) calls: Counter,
    pub(super) connections: Counter,
}

/// What a back end did since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VhostUserStatistics {
    /// Reads done.
    pub reads: u64,
    /// Bytes they gave.
    pub read_bytes: u64,
    /// Writes done.
    pub writes: u64,
    /// Bytes they took.
    pub written_bytes: u64,
    /// Flushes done.
    pub flushes: u64,
    /// Discards and write-zeroes done.
    pub discards: u64,
    /// Requests that did not end at once: they went through the disk's workers.
    pub waited: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Chains that were no request: they got no answer.
    pub malformed: u64,
    /// Times that a driver broke the rules of its ring.
    pub broken_rings: u64,
    /// Times that a driver woke a ring.
    pub kicks: u64,
    /// Times that a ring called its driver.
    pub calls: u64,
    /// Front ends that came.
    pub connections: u64,
    /// Rings that run.
    pub running_rings: u64,
    /// Answers kept back now.
    pub held: u64,
}

impl Counters {
    pub(super) fn statistics(&self, running_rings: u64, held: u64) -> VhostUserStatistics {
        VhostUserStatistics {
            reads: self.reads.get(),
            read_bytes: self.read_bytes.get(),
            writes: self.writes.get(),
            written_bytes: self.written_bytes.get(),
            flushes: self.flushes.get(),
            discards: self.discards.get(),
            waited: self.waited.get(),
            failed: self.failed.get(),
            malformed: self.malformed.get(),
            broken_rings: self.broken_rings.get(),
            kicks: self.kicks.get(),
            calls: self.calls.get(),
            connections: self.connections.get(),
            running_rings,
            held,
        }
    }
}
