//! Where a disk's blocks are: a persistent tree, so that a map is frozen by keeping its roots.
//!
//! ```text
//! block -> stripe (leaf number modulo 64) -> Tree -> Branch (256 leaves) -> Leaf (512 entries, 2 MiB of disk)
//! ```
//! Nodes are shared between frozen maps and copied when one of them changes (`Arc::make_mut`). The stripes are separate
//! trees so that writers of different parts do not meet; neighbouring leaves lie in different stripes.

pub(crate) mod difference;

use std::sync::Arc;

/// Blocks of a leaf.
pub(crate) const LEAF_BLOCKS: u64 = 512;
/// Trees of a disk.
pub(crate) const STRIPES: usize = 64;
/// Leaves of a branch.
pub(crate) const BRANCH_LEAVES: usize = 256;

const ABSENT: u32 = u32::MAX;
const ZERO: u32 = u32::MAX - 1;
/// Places are numbers below this.
pub(crate) const PLACES_MAX: u64 = ZERO as u64;

/// What is known of a block's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Never written: the base's, or zeros without one.
    Absent,
    /// Zeros.
    Zero,
    /// In the data file, at this block of it.
    Data(u32),
}

impl State {
    /// Its number in the journal and in checkpoints.
    pub(crate) fn code(self) -> u32 {
        match self {
            State::Absent => ABSENT,
            State::Zero => ZERO,
            State::Data(place) => place,
        }
    }

    /// Every number is some state: who reads one from a file compares its place with the places there can be.
    pub(crate) fn from_code(code: u32) -> State {
        match code {
            ABSENT => State::Absent,
            ZERO => State::Zero,
            place => State::Data(place),
        }
    }

    /// The state of the block `by` behind in a run that begins with this one.
    pub(crate) fn advanced(self, by: u32) -> State {
        match self {
            State::Data(place) => State::Data(place + by),
            other => other,
        }
    }
}

/// A block's state and the epoch in which it got it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    code: u32,
    birth: u32,
}

impl Entry {
    pub(crate) const ABSENT: Entry = Entry { code: ABSENT, birth: 0 };

    pub(crate) fn new(state: State, birth: u32) -> Entry {
        Entry { code: state.code(), birth }
    }

    pub(crate) fn state(self) -> State {
        State::from_code(self.code)
    }

    pub(crate) fn birth(self) -> u32 {
        self.birth
    }
}

/// The entries of 2 MiB.
#[derive(Clone)]
pub(crate) struct Leaf(pub(crate) [Entry; LEAF_BLOCKS as usize]);

impl Leaf {
    pub(crate) fn of(entry: Entry) -> Leaf {
        Leaf([entry; LEAF_BLOCKS as usize])
    }

    /// Whether its blocks are all alike: none has a place.
    fn is_alike(&self) -> bool {
        let first = self.0[0];
        !matches!(first.state(), State::Data(_)) && self.0.iter().all(|entry| *entry == first)
    }
}

/// Leaves whose blocks are all alike are kept once, as long as they come one after the other: to discard a disk over a
/// base takes one.
#[derive(Default)]
pub(crate) struct Alike(Option<Arc<Leaf>>);

impl Alike {
    /// The leaf to keep for this one: it, or one that says the same.
    pub(crate) fn keep(&mut self, leaf: Arc<Leaf>) -> Arc<Leaf> {
        match &self.0 {
            _ if !leaf.is_alike() => leaf,
            Some(kept) if kept.0[0] == leaf.0[0] => kept.clone(),
            _ => self.0.insert(leaf).clone(),
        }
    }
}

#[derive(Clone)]
pub(crate) struct Branch(pub(crate) [Option<Arc<Leaf>>; BRANCH_LEAVES]);

impl Branch {
    pub(crate) fn empty() -> Branch {
        Branch([const { None }; BRANCH_LEAVES])
    }
}

/// One stripe's blocks. A missing node means that all below it is absent.
#[derive(Clone, Default)]
pub(crate) struct Tree(pub(crate) Arc<Vec<Option<Arc<Branch>>>>);

impl Tree {
    /// The leaf of a number within this stripe.
    pub(crate) fn leaf(&self, number: usize) -> Option<&Arc<Leaf>> {
        self.0.get(number / BRANCH_LEAVES)?.as_ref()?.0[number % BRANCH_LEAVES].as_ref()
    }

    fn slot(&mut self, number: usize) -> &mut Option<Arc<Leaf>> {
        let branches = Arc::make_mut(&mut self.0);
        let index = number / BRANCH_LEAVES;
        if branches.len() <= index {
            branches.resize(index + 1, None);
        }
        let branch = branches[index].get_or_insert_with(|| Arc::new(Branch::empty()));
        &mut Arc::make_mut(branch).0[number % BRANCH_LEAVES]
    }

    /// The leaf to change: from now on this tree's own.
    pub(crate) fn leaf_mut(&mut self, number: usize) -> &mut Leaf {
        Arc::make_mut(self.slot(number).get_or_insert_with(|| Arc::new(Leaf::of(Entry::ABSENT))))
    }

    /// Keeps a leaf once that says the same as the last one of its kind.
    pub(crate) fn unite(&mut self, number: usize, alike: &mut Alike) {
        if let Some(leaf) = self.leaf(number).cloned() {
            self.replace_leaf(number, Some(alike.keep(leaf)));
        }
    }

    /// Puts another leaf at a number.
    pub(crate) fn replace_leaf(&mut self, number: usize, leaf: Option<Arc<Leaf>>) {
        *self.slot(number) = leaf;
    }
}

/// The whole map at one point in time: a tree for each stripe.
#[derive(Clone)]
pub(crate) struct Roots(pub(crate) Box<[Tree]>);

impl Roots {
    pub(crate) fn empty() -> Roots {
        Roots(vec![Tree::default(); STRIPES].into())
    }

    /// The leaf that holds a block.
    pub(crate) fn leaf_of(&self, block: u64) -> Option<&Arc<Leaf>> {
        let position = Position::of(block);
        self.0[position.stripe].leaf(position.leaf)
    }

    /// Gives a run of blocks new states, as the journal does.
    pub(crate) fn set_run(&mut self, block: u64, count: u32, state: State, birth: u32, alike: &mut Alike) {
        let mut done = 0;
        while done < count {
            let position = Position::of(block + u64::from(done));
            let tree = &mut self.0[position.stripe];
            let part = (count - done).min(LEAF_BLOCKS as u32 - position.index as u32);
            let entries = &mut tree.leaf_mut(position.leaf).0[position.index..position.index + part as usize];
            for entry in entries {
                *entry = Entry::new(state.advanced(done), birth);
                done += 1;
            }
            if !matches!(state, State::Data(_)) {
                tree.unite(position.leaf, alike);
            }
        }
    }
}

/// Where a block's entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) stripe: usize,
    pub(crate) leaf: usize,
    pub(crate) index: usize,
}

impl Position {
    pub(crate) fn of(block: u64) -> Position {
        let leaf = block / LEAF_BLOCKS;
        Position {
            stripe: (leaf % STRIPES as u64) as usize,
            leaf: (leaf / STRIPES as u64) as usize,
            index: (block % LEAF_BLOCKS) as usize,
        }
    }

    /// The first block of a stripe's leaf.
    pub(crate) fn first_block(stripe: usize, leaf: usize) -> u64 {
        (leaf as u64 * STRIPES as u64 + stripe as u64) * LEAF_BLOCKS
    }
}

/// Blocks in a row whose content lies in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) state: State,
    pub(crate) count: usize,
}

/// The longest run of a leaf from `index` on, of at most `limit` blocks, whose entries are all `alike` the first.
pub(crate) fn run(leaf: Option<&Leaf>, index: usize, limit: usize, alike: impl Fn(Entry) -> bool) -> Run {
    let limit = limit.min(LEAF_BLOCKS as usize - index);
    let Some(leaf) = leaf else { return Run { state: State::Absent, count: limit } };
    let first = leaf.0[index];
    let class = alike(first);
    let follows =
        |(by, entry): (usize, &Entry)| entry.state() == first.state().advanced(by as u32) && alike(*entry) == class;
    let count = leaf.0[index..index + limit].iter().enumerate().take_while(|pair| follows(*pair)).count();
    Run { state: first.state(), count }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_root_does_not_see_later_changes_and_shares_the_rest() {
        let mut now = Roots::empty();
        now.set_run(1000, 600, State::Data(7), 1, &mut Alike::default());
        now.set_run(1 << 20, 1, State::Zero, 1, &mut Alike::default());
        let kept = now.clone();
        now.set_run(1001, 1, State::Zero, 2, &mut Alike::default());
        let entry = |roots: &Roots, block: u64| roots.leaf_of(block).map(|leaf| leaf.0[Position::of(block).index]);
        assert_eq!(entry(&kept, 1001), Some(Entry::new(State::Data(8), 1)));
        assert_eq!(entry(&now, 1001), Some(Entry::new(State::Zero, 2)));
        assert_eq!(entry(&now, 1599), Some(Entry::new(State::Data(606), 1)));
        assert_eq!(entry(&now, 5 << 20), None);
        let shared = |block| Arc::ptr_eq(kept.leaf_of(block).unwrap(), now.leaf_of(block).unwrap());
        assert!(shared(1 << 20) && shared(1030) && !shared(1001));
    }

    #[test]
    fn positions_are_unique_and_come_back() {
        for block in [0, 1, 511, 512, 513, 32767, 32768, (1 << 31) - 1] {
            let position = Position::of(block);
            assert_eq!(Position::first_block(position.stripe, position.leaf) + position.index as u64, block);
        }
    }

    #[test]
    fn runs_end_where_places_jump_or_classes_change() {
        let mut leaf = Leaf::of(Entry::ABSENT);
        for (index, place) in [(0, 10), (1, 11), (2, 12), (3, 20)] {
            leaf.0[index] = Entry::new(State::Data(place), if index == 2 { 9 } else { 1 });
        }
        let count = |index, alike: fn(Entry) -> bool| run(Some(&leaf), index, 512, alike).count;
        assert_eq!(count(0, |_| true), 3);
        assert_eq!(count(0, |entry| entry.birth() < 5), 2);
        assert_eq!(count(4, |_| true), 508);
        assert_eq!(run(None, 500, 512, |_| true), Run { state: State::Absent, count: 12 });
    }
}
