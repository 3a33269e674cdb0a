//! The files `map.N`: the map and all snapshots' maps, whole, as of the end of journal `N - 1`.
//!
//! ```text
//! head:  "ONECOPYM" version u32, epoch u32, number u64, next sequence u64, blocks u64, nodes u32, roots u32
//! nodes: leaf:   1 u8, runs u16, each: count u16, state u32 (first place), birth u32
//!        branch: 2 u8, leaves u16, each: slot u16, node u32 (an earlier one)
//! roots: the current map first, then snapshots, oldest first, each with its record:
//!        per stripe: branches u32, each: index u32, node u32
//! tail:  XXH3-64 of all before, with the disk's identity as seed
//! ```
//! What two roots share is written once: a snapshot costs what changed since.

use std::collections::HashMap;
use std::sync::Arc;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use super::{NAME_BYTES_MAX, Reader, SNAPSHOTS_MAX, SnapshotRecord, VERSION, Writer};
use crate::DiskError;
use crate::map::{Alike, BRANCH_LEAVES, Branch, Entry, LEAF_BLOCKS, Leaf, Roots, STRIPES, State, Tree, run};
use crate::storage::StoredFile;

const MAGIC: &[u8; 8] = b"ONECOPYM";
const HEAD_BYTES: u64 = 48;
const TAIL_BYTES: usize = 8;
/// A leaf of a run for each block, the branch of it alone, and that in its root.
const LEAF_BYTES_MAX: u64 = 3 + 10 * LEAF_BLOCKS + 3 + 6 + 8;
/// A snapshot's record, and its stripes' numbers of branches.
const ROOT_BYTES_MAX: u64 = 21 + NAME_BYTES_MAX as u64 + 4 * STRIPES as u64;
/// Bytes gathered before they are written.
const WRITE_BYTES: usize = 1 << 20;

/// All that a checkpoint holds.
#[derive(Clone)]
pub(crate) struct Checkpoint {
    pub(crate) number: u64,
    /// The newest epoch that any entry may have been born in.
    pub(crate) epoch: u32,
    /// The number of the first record of journal `number`.
    pub(crate) next_sequence: u64,
    pub(crate) blocks: u64,
    pub(crate) current: Roots,
    pub(crate) snapshots: Vec<(SnapshotRecord, Roots)>,
}

impl Checkpoint {
    fn roots(&self) -> impl Iterator<Item = &Roots> {
        std::iter::once(&self.current).chain(self.snapshots.iter().map(|(_, roots)| roots))
    }

    /// Writes all into a new file and makes it durable; gives its length.
    pub(crate) fn write(&self, identity: u64, file: &StoredFile) -> Result<u64, DiskError> {
        let mut nodes = Nodes { sink: Sink::new(file, identity), leaves: HashMap::new(), branches: HashMap::new() };
        // The head tells how many nodes there are: they are counted by a first walk.
        let count = self.count_nodes();
        let mut head = Writer::default();
        head.bytes(MAGIC);
        head.u32(VERSION);
        head.u32(self.epoch);
        head.u64(self.number);
        head.u64(self.next_sequence);
        head.u64(self.blocks);
        head.u32(count);
        head.u32(1 + self.snapshots.len() as u32);
        nodes.sink.bytes(&head.0)?;
        for tree in self.roots().flat_map(|roots| roots.0.iter()) {
            for branch in tree.0.iter().flatten() {
                nodes.branch(branch)?;
            }
        }
        nodes.roots(&self.current)?;
        for (record, roots) in &self.snapshots {
            let mut writer = Writer::default();
            writer.snapshot(record);
            nodes.sink.bytes(&writer.0)?;
            nodes.roots(roots)?;
        }
        nodes.sink.finish()
    }

    fn count_nodes(&self) -> u32 {
        let mut seen = std::collections::HashSet::new();
        for branch in self.roots().flat_map(|roots| roots.0.iter()).flat_map(|tree| tree.0.iter().flatten()) {
            if seen.insert(Arc::as_ptr(branch) as usize) {
                seen.extend(branch.0.iter().flatten().map(|leaf| Arc::as_ptr(leaf) as usize));
            }
        }
        seen.len() as u32
    }

    /// Reads a checkpoint's bytes.
    pub(crate) fn parse(identity: u64, number: u64, blocks: u64, bytes: &[u8]) -> Result<Checkpoint, String> {
        let body = bytes.len().checked_sub(TAIL_BYTES).ok_or("is too short for a checkpoint")?;
        let (body, tail) = bytes.split_at(body);
        if Reader(tail).u64()? != xxh3_64_with_seed(body, identity) {
            return Err("is damaged, or belongs to another disk".into());
        }
        let mut reader = Reader(body);
        if reader.bytes(MAGIC.len())? != MAGIC {
            return Err("is no checkpoint".into());
        }
        let (version, epoch, found, next_sequence) = (reader.u32()?, reader.u32()?, reader.u64()?, reader.u64()?);
        let (found_blocks, node_count, root_count) = (reader.u64()?, reader.u32()?, reader.u32()? as usize);
        if version != VERSION || found != number || found_blocks != blocks {
            return Err(format!("is checkpoint {found} of {found_blocks} blocks in format {version}"));
        }
        if root_count == 0 || root_count > SNAPSHOTS_MAX + 1 {
            return Err(format!("has {root_count} maps"));
        }
        let mut parser = Parser { reader, nodes: Vec::new(), alike: Alike::default(), blocks };
        for _ in 0..node_count {
            parser.node()?;
        }
        let current = parser.roots()?;
        let mut snapshots: Vec<(SnapshotRecord, Roots)> = Vec::new();
        for _ in 1..root_count {
            let record = parser.reader.snapshot()?;
            if snapshots.last().is_some_and(|(last, _)| last.number >= record.number) || record.number > epoch {
                return Err(format!("snapshot {:?} is out of order", record.snapshot.name));
            }
            snapshots.push((record, parser.roots()?));
        }
        if !parser.reader.0.is_empty() {
            return Err(format!("has {} bytes too many", parser.reader.0.len()));
        }
        Ok(Checkpoint { number, epoch, next_sequence, blocks, current, snapshots })
    }
}

/// Bytes on their way into the file.
struct Sink<'a> {
    file: &'a StoredFile,
    gathered: Vec<u8>,
    written: u64,
    hash: Xxh3,
}

impl<'a> Sink<'a> {
    fn new(file: &'a StoredFile, identity: u64) -> Sink<'a> {
        Sink { file, gathered: Vec::with_capacity(WRITE_BYTES), written: 0, hash: Xxh3::with_seed(identity) }
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<(), DiskError> {
        self.hash.update(bytes);
        self.gathered.extend_from_slice(bytes);
        if self.gathered.len() >= WRITE_BYTES { self.write() } else { Ok(()) }
    }

    fn write(&mut self) -> Result<(), DiskError> {
        self.file.write_at(self.written, &self.gathered)?;
        self.written += self.gathered.len() as u64;
        self.gathered.clear();
        Ok(())
    }

    fn finish(mut self) -> Result<u64, DiskError> {
        let sum = self.hash.digest();
        self.gathered.extend_from_slice(&sum.to_le_bytes());
        self.write()?;
        self.file.synchronize()?;
        Ok(self.written)
    }
}

/// Nodes that were written, by where they are in memory: the maps that own them are kept meanwhile.
struct Nodes<'a> {
    sink: Sink<'a>,
    leaves: HashMap<usize, u32>,
    branches: HashMap<usize, u32>,
}

impl Nodes<'_> {
    fn next(&self) -> u32 {
        (self.leaves.len() + self.branches.len()) as u32
    }

    fn branch(&mut self, branch: &Arc<Branch>) -> Result<(), DiskError> {
        if self.branches.contains_key(&(Arc::as_ptr(branch) as usize)) {
            return Ok(());
        }
        let mut children = Writer::default();
        let mut count = 0;
        for (slot, leaf) in branch.0.iter().enumerate() {
            if let Some(leaf) = leaf {
                children.u16(slot as u16);
                children.u32(self.leaf(leaf)?);
                count += 1;
            }
        }
        let mut writer = Writer::default();
        writer.u8(2);
        writer.u16(count);
        writer.bytes(&children.0);
        self.sink.bytes(&writer.0)?;
        let number = self.next();
        self.branches.insert(Arc::as_ptr(branch) as usize, number);
        Ok(())
    }

    fn leaf(&mut self, leaf: &Arc<Leaf>) -> Result<u32, DiskError> {
        let pointer = Arc::as_ptr(leaf) as usize;
        if let Some(number) = self.leaves.get(&pointer) {
            return Ok(*number);
        }
        let (mut runs, mut count, mut index) = (Writer::default(), 0, 0);
        while index < LEAF_BLOCKS as usize {
            let birth = leaf.0[index].birth();
            let here = run(Some(leaf), index, LEAF_BLOCKS as usize, |entry| entry.birth() == birth);
            runs.u16(here.count as u16);
            runs.u32(here.state.code());
            runs.u32(birth);
            index += here.count;
            count += 1;
        }
        let mut writer = Writer::default();
        writer.u8(1);
        writer.u16(count);
        writer.bytes(&runs.0);
        self.sink.bytes(&writer.0)?;
        let number = self.next();
        self.leaves.insert(pointer, number);
        Ok(number)
    }

    fn roots(&mut self, roots: &Roots) -> Result<(), DiskError> {
        let mut writer = Writer::default();
        for tree in &roots.0 {
            writer.u32(tree.0.iter().flatten().count() as u32);
            for (index, branch) in tree.0.iter().enumerate() {
                if let Some(branch) = branch {
                    writer.u32(index as u32);
                    writer.u32(self.branches[&(Arc::as_ptr(branch) as usize)]);
                }
            }
        }
        self.sink.bytes(&writer.0)
    }
}

enum Node {
    Leaf(Arc<Leaf>),
    Branch(Arc<Branch>),
}

struct Parser<'a> {
    reader: Reader<'a>,
    nodes: Vec<Node>,
    alike: Alike,
    blocks: u64,
}

impl Parser<'_> {
    fn node(&mut self) -> Result<(), String> {
        let node = match self.reader.u8()? {
            1 => {
                let leaf = Arc::new(self.leaf()?);
                Node::Leaf(self.alike.keep(leaf))
            }
            2 => Node::Branch(Arc::new(self.branch()?)),
            kind => return Err(format!("a node of unknown kind {kind}")),
        };
        self.nodes.push(node);
        Ok(())
    }

    fn leaf(&mut self) -> Result<Leaf, String> {
        let (mut leaf, mut index) = (Leaf::of(Entry::ABSENT), 0);
        for _ in 0..self.reader.u16()? {
            let (count, state) = (usize::from(self.reader.u16()?), State::from_code(self.reader.u32()?));
            let birth = self.reader.u32()?;
            let entries = leaf.0.get_mut(index..index + count).ok_or("a leaf has too many entries")?;
            if let State::Data(place) = state {
                check_places(place, count as u64, self.blocks)?;
            }
            for (by, entry) in entries.iter_mut().enumerate() {
                *entry = Entry::new(state.advanced(by as u32), birth);
            }
            index += count;
        }
        if index != LEAF_BLOCKS as usize {
            return Err(format!("a leaf has {index} entries"));
        }
        Ok(leaf)
    }

    fn branch(&mut self) -> Result<Branch, String> {
        let mut branch = Branch::empty();
        for _ in 0..self.reader.u16()? {
            let (slot, node) = (usize::from(self.reader.u16()?), self.reader.u32()? as usize);
            let Some(Node::Leaf(leaf)) = self.nodes.get(node) else {
                return Err(format!("node {node} is no leaf before its branch"));
            };
            *branch.0.get_mut(slot).ok_or_else(|| format!("slot {slot} of {BRANCH_LEAVES}"))? = Some(leaf.clone());
        }
        Ok(branch)
    }

    fn roots(&mut self) -> Result<Roots, String> {
        let mut roots = Roots::empty();
        for tree in &mut roots.0 {
            *tree = self.tree()?;
        }
        Ok(roots)
    }

    fn tree(&mut self) -> Result<Tree, String> {
        // The most branches that a disk of this size has in a stripe.
        let most = self.blocks.div_ceil(LEAF_BLOCKS * (STRIPES * BRANCH_LEAVES) as u64) as usize;
        let mut branches = Vec::new();
        for _ in 0..self.reader.u32()? {
            let (index, node) = (self.reader.u32()? as usize, self.reader.u32()? as usize);
            let Some(Node::Branch(branch)) = self.nodes.get(node) else {
                return Err(format!("node {node} is no branch before its root"));
            };
            if index >= most {
                return Err(format!("branch {index} of {most}"));
            }
            if branches.len() <= index {
                branches.resize(index + 1, None);
            }
            branches[index] = Some(branch.clone());
        }
        Ok(Tree(Arc::new(branches)))
    }
}

/// Refuses places that no disk of this size has: its own, and as many again for what snapshots keep, and some.
pub(crate) fn check_places(first: u32, count: u64, blocks: u64) -> Result<(), String> {
    let end = u64::from(first) + count;
    if end > places_max(blocks) {
        return Err(format!("places {first} to {end} of a disk of {blocks} blocks"));
    }
    Ok(())
}

/// The longest checkpoint of a disk: each of its maps has leaves of its own.
pub(crate) fn bytes_max(blocks: u64) -> u64 {
    let root = blocks.div_ceil(LEAF_BLOCKS) * LEAF_BYTES_MAX + ROOT_BYTES_MAX;
    HEAD_BYTES + (1 + SNAPSHOTS_MAX as u64) * root + TAIL_BYTES as u64
}

/// Places of a disk are below this. Snapshots may keep many times the disk's size; the least is for tiny disks.
pub(crate) fn places_max(blocks: u64) -> u64 {
    blocks.saturating_mul(EXTRA_PLACES_FACTOR).clamp(1 << 20, crate::map::PLACES_MAX)
}

/// How many times its size a disk may hold, current content and snapshots together.
const EXTRA_PLACES_FACTOR: u64 = 1024;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::map::difference::difference;
    use crate::options::Snapshot;
    use crate::storage::Folder;

    const BLOCKS: u64 = 200_000;

    fn checkpoint() -> Checkpoint {
        let mut roots = Roots::empty();
        let mut snapshots = Vec::new();
        for number in 1..4 {
            roots.set_run(u64::from(number) * 500, 3000, State::Data(number * 7000), number, &mut Alike::default());
            roots.set_run(u64::from(number) * 40_000, 10, State::Zero, number, &mut Alike::default());
            let snapshot = Snapshot { name: number.to_string(), epoch: crate::Epoch(9), created_unix_ms: 1 };
            snapshots.push((SnapshotRecord { number, snapshot }, roots.clone()));
        }
        roots.set_run(199_999, 1, State::Data(1), 5, &mut Alike::default());
        Checkpoint { number: 3, epoch: 5, next_sequence: 77, blocks: BLOCKS, current: roots, snapshots }
    }

    fn bytes() -> Vec<u8> {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = Folder::open(home.path()).unwrap().create_file("map").unwrap();
        let length = checkpoint().write(1, &file).unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!(bytes.len() as u64, length);
        bytes
    }

    fn sealed(mut body: Vec<u8>) -> Vec<u8> {
        let sum = xxh3_64_with_seed(&body, 1);
        body.extend_from_slice(&sum.to_le_bytes());
        body
    }

    #[test]
    fn a_checkpoint_comes_back_and_shares_what_it_shared() {
        let (written, read) = (checkpoint(), Checkpoint::parse(1, 3, BLOCKS, &bytes()).unwrap());
        assert_eq!((read.epoch, read.next_sequence, read.snapshots.len()), (5, 77, 3));
        for (one, other) in written.roots().zip(read.roots()) {
            difference(one, other, |block, before, after| panic!("{block}: {before:?} {after:?}"));
        }
        let leaf = |number: usize| read.snapshots[number].1.leaf_of(1600).unwrap();
        assert!(Arc::ptr_eq(read.current.leaf_of(1600).unwrap(), leaf(2)) && !Arc::ptr_eq(leaf(0), leaf(2)));
        assert!(Checkpoint::parse(2, 3, BLOCKS, &bytes()).is_err());
        assert!(Checkpoint::parse(1, 4, BLOCKS, &bytes()).is_err());
        assert!(Checkpoint::parse(1, 3, BLOCKS + 1, &bytes()).is_err());
    }

    #[test]
    fn the_longest_checkpoint_is_as_long_as_is_read() {
        let scattered = |first| {
            let mut roots = Roots::empty();
            for block in 0..LEAF_BLOCKS as u32 {
                roots.set_run(block.into(), 1, State::Data(first + 2 * block), 1, &mut Alike::default());
            }
            roots
        };
        let name = "n".repeat(NAME_BYTES_MAX);
        let snapshot = Snapshot { name, epoch: crate::Epoch(9), created_unix_ms: 1 };
        let snapshots: Vec<_> = (0..SNAPSHOTS_MAX as u32)
            .map(|number| (SnapshotRecord { number, snapshot: snapshot.clone() }, scattered(number)))
            .collect();
        let current = scattered(5000);
        let longest = Checkpoint { number: 3, epoch: 5, next_sequence: 1, blocks: LEAF_BLOCKS, current, snapshots };
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = Folder::open(home.path()).unwrap().create_file("map").unwrap();
        // The current map has no record.
        let record = 21 + NAME_BYTES_MAX as u64;
        assert_eq!(longest.write(1, &file).unwrap() + record, bytes_max(LEAF_BLOCKS));
    }

    proptest! {
        /// Also with a right checksum: whoever wrote it, it is a map within the disk or an error.
        ///
        /// Spec: C6
        #[test]
        fn b13_any_checkpoint_is_a_map_or_an_error(
            changes in proptest::collection::vec((0usize..3000, any::<u8>()), 0..6),
            cut in 0usize..3000,
        ) {
            let mut body = bytes();
            body.truncate(body.len() - TAIL_BYTES);
            for (at, value) in changes {
                let at = at % body.len();
                body[at] = value;
            }
            body.truncate(body.len() - cut % 7 * (cut / 100) % body.len());
            if let Ok(checkpoint) = Checkpoint::parse(1, 3, BLOCKS, &sealed(body)) {
                for roots in checkpoint.roots() {
                    crate::map::difference::entries(roots, |_, entry| if let State::Data(place) = entry.state() {
                        assert!(u64::from(place) < places_max(BLOCKS));
                    });
                }
            }
        }

        #[test]
        fn any_bytes_are_a_checkpoint_or_an_error(body in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = Checkpoint::parse(1, 3, BLOCKS, &sealed(body));
        }
    }
}
