//! Changes under way, so that nobody tells a block's old content after its new one.
//!
//! A read learns of a block's content some time after it has read it. Whoever changed the block meanwhile has told the
//! new content already, and the old one, told later, would be believed for good. So a change shows itself from before
//! it touches data until it has told; a read takes the count of changes before it reads and tells only while that
//! count stands and no change is under way. Blocks share counts: at worst a read is not told.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Blocks in a row that share a count: 64 KiB.
const GROUP_BLOCKS: u64 = 16;
/// Counts: groups share them in turn.
const COUNTS: usize = 1024;

/// Changes of some groups of blocks.
#[derive(Default)]
#[repr(align(64))]
struct Count(Mutex<State>);

#[derive(Clone, Copy, Default)]
struct State {
    begun: u64,
    under_way: u32,
}

/// All counts of a disk.
pub(super) struct Changes(Box<[Count]>);

/// A change under way.
pub(super) struct Change<'a> {
    changes: &'a Changes,
    groups: Range<u64>,
}

/// What a read found before it read: for each group of blocks the count, or none while a change is under way.
pub(super) struct Before {
    first_group: u64,
    counts: Vec<Option<u64>>,
}

impl Default for Changes {
    fn default() -> Changes {
        Changes((0..COUNTS).map(|_| Count::default()).collect())
    }
}

fn groups(blocks: Range<u64>) -> Range<u64> {
    blocks.start / GROUP_BLOCKS..blocks.end.div_ceil(GROUP_BLOCKS)
}

impl Changes {
    fn state(&self, group: u64) -> MutexGuard<'_, State> {
        let Count(state) = &self.0[(group % COUNTS as u64) as usize];
        state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A change of blocks begins: before data is touched.
    pub(super) fn begin(&self, blocks: Range<u64>) -> Change<'_> {
        let groups = groups(blocks);
        for group in groups.clone() {
            let mut state = self.state(group);
            state.begun += 1;
            state.under_way += 1;
        }
        Change { changes: self, groups }
    }

    /// A read of blocks begins.
    pub(super) fn before(&self, blocks: Range<u64>) -> Before {
        let groups = groups(blocks);
        let first_group = groups.start;
        let unchanging = |state: State| (state.under_way == 0).then_some(state.begun);
        Before { first_group, counts: groups.map(|group| unchanging(*self.state(group))).collect() }
    }

    /// Calls `report` if the block has not changed since, and lets nobody change it meanwhile.
    pub(super) fn if_unchanged(&self, block: u64, before: &Before, report: impl FnOnce()) {
        let group = block / GROUP_BLOCKS;
        let Some(Some(count)) = before.counts.get((group - before.first_group) as usize) else { return };
        let state = self.state(group);
        if state.begun == *count {
            report();
        }
    }
}

impl Drop for Change<'_> {
    /// The change is told.
    fn drop(&mut self) {
        for group in self.groups.clone() {
            self.changes.state(group).under_way -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_observed(changes: &Changes, block: u64, before: &Before) -> bool {
        let mut is_observed = false;
        changes.if_unchanged(block, before, || is_observed = true);
        is_observed
    }

    #[test]
    fn a_read_is_told_only_when_no_change_began_or_was_under_way() {
        let changes = Changes::default();
        let before = changes.before(10..40);
        assert!(is_observed(&changes, 10, &before) && is_observed(&changes, 39, &before));
        let change = changes.begin(33..34);
        assert!(!is_observed(&changes, 39, &before), "it began since");
        assert!(is_observed(&changes, 31, &before), "another group");
        let amid = changes.before(32..33);
        drop(change);
        assert!(!is_observed(&changes, 32, &amid), "it was under way, and is told already");
        assert!(!is_observed(&changes, 39, &before));
        assert!(is_observed(&changes, 32, &changes.before(32..33)));
    }
}
