//! What a disk tells of itself.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::Core;
use crate::map::difference::difference;
use crate::{BLOCK_BYTES, DiskError, Epoch, Statistics};

impl Core {
    pub(crate) fn statistics(&self) -> Statistics {
        let used = self.space.used();
        let (kept, snapshots, epochs) = self.snapshot_table().counts();
        let mut statistics = Statistics {
            size_bytes: self.header.size_bytes,
            allocated_bytes: used * BLOCK_BYTES,
            current_bytes: used.saturating_sub(kept + self.unneeded()) * BLOCK_BYTES,
            snapshots: snapshots as u64,
            retained_epochs: epochs as u64,
            epoch: self.epoch().0,
            journal_bytes: self.journal_bytes.load(Relaxed),
            checkpoints: self.checkpoints.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            synchronizations: self.synchronizations.load(Relaxed),
            ..Statistics::default()
        };
        for counters in self.stripes.iter().map(|stripe| &stripe.counters) {
            statistics.reads += counters.reads.load(Relaxed);
            statistics.read_bytes += counters.read_bytes.load(Relaxed);
            statistics.writes += counters.writes.load(Relaxed);
            statistics.written_bytes += counters.written_bytes.load(Relaxed);
            statistics.discards += counters.discards.load(Relaxed);
            statistics.discarded_bytes += counters.discarded_bytes.load(Relaxed);
        }
        statistics
    }

    /// The blocks whose entries differ between the ends of two epochs.
    pub(crate) fn changed(&self, from: Epoch, to: Epoch) -> Result<Vec<Range<u64>>, DiskError> {
        let (from, to) = (self.map_of_epoch(from)?, self.map_of_epoch(to)?);
        let mut blocks = Vec::new();
        difference(&from.roots, &to.roots, |block, _, _| blocks.push(block));
        blocks.sort_unstable();
        Ok(blocks.chunk_by(|one, next| one + 1 == *next).map(|run| run[0]..run[0] + run.len() as u64).collect())
    }
}
