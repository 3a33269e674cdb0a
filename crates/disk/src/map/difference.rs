//! What differs between two frozen maps, without looking at what they share.

use std::sync::Arc;

use super::{Branch, Entry, LEAF_BLOCKS, Leaf, Position, Roots};

/// Calls `each` with every block whose entry differs, and with both entries. Order is by stripe, not by block.
pub(crate) fn difference(older: &Roots, newer: &Roots, mut each: impl FnMut(u64, Entry, Entry)) {
    for (stripe, (older, newer)) in older.0.iter().zip(&newer.0).enumerate() {
        if Arc::ptr_eq(&older.0, &newer.0) {
            continue;
        }
        for branch in 0..older.0.len().max(newer.0.len()) {
            let (before, after) = (branch_at(&older.0, branch), branch_at(&newer.0, branch));
            if same(before, after) {
                continue;
            }
            for slot in 0..super::BRANCH_LEAVES {
                let leaf = branch * super::BRANCH_LEAVES + slot;
                let (before, after) = (leaf_at(before, slot), leaf_at(after, slot));
                if !same(before, after) {
                    leaves(Position::first_block(stripe, leaf), before, after, &mut each);
                }
            }
        }
    }
}

/// Calls `each` with every entry of a map that is not absent.
pub(crate) fn entries(roots: &Roots, mut each: impl FnMut(u64, Entry)) {
    difference(&Roots::empty(), roots, |block, _, entry| each(block, entry));
}

fn branch_at(branches: &[Option<Arc<Branch>>], index: usize) -> Option<&Arc<Branch>> {
    branches.get(index)?.as_ref()
}

fn leaf_at(branch: Option<&Arc<Branch>>, slot: usize) -> Option<&Arc<Leaf>> {
    branch?.0[slot].as_ref()
}

fn same<T>(one: Option<&Arc<T>>, other: Option<&Arc<T>>) -> bool {
    match (one, other) {
        (None, None) => true,
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        _ => false,
    }
}

fn leaves(
    first_block: u64,
    before: Option<&Arc<Leaf>>,
    after: Option<&Arc<Leaf>>,
    each: &mut impl FnMut(u64, Entry, Entry),
) {
    for index in 0..LEAF_BLOCKS as usize {
        let older = before.map_or(Entry::ABSENT, |leaf| leaf.0[index]);
        let newer = after.map_or(Entry::ABSENT, |leaf| leaf.0[index]);
        if older != newer {
            each(first_block + index as u64, older, newer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Alike, State};
    use super::*;

    #[test]
    fn only_what_changed_is_told() {
        let mut older = Roots::empty();
        older.set_run(0, 100_000, State::Data(0), 1, &mut Alike::default());
        let mut newer = older.clone();
        newer.set_run(99_999, 2, State::Zero, 2, &mut Alike::default());
        newer.set_run(70, 1, State::Data(200_000), 2, &mut Alike::default());
        let mut found = Vec::new();
        difference(&older, &newer, |block, old, new| found.push((block, old.state(), new.state())));
        found.sort_by_key(|change| change.0);
        assert_eq!(
            found,
            [
                (70, State::Data(70), State::Data(200_000)),
                (99_999, State::Data(99_999), State::Zero),
                (100_000, State::Absent, State::Zero),
            ]
        );
        let mut count = 0;
        entries(&newer, |_, _| count += 1);
        assert_eq!(count, 100_001);
    }
}
