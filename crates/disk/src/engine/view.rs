//! The content of a disk at one epoch or snapshot, or now, to read.

use std::fmt;
use std::io::IoSliceMut;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::snapshots::FrozenMap;
use super::{Core, WaitPolicy, byte_of};
use crate::lease::SnapshotLock;
use crate::map::{self, LEAF_BLOCKS, Leaf, Position, Roots, Run, State};
use crate::source::{Extent, Hydration, Source, SourceError};
use crate::storage::StoredFile;
use crate::{BLOCK_BYTES, DiskError};

/// The content of a disk at one epoch or snapshot, or now.
///
/// Of an epoch or a snapshot it never changes, and what it needs is kept while it lives. It ends with the disk's close,
/// but for one that [`View::open`] made.
pub struct View(Kind);

enum Kind {
    /// What the disk holds now.
    Current(Arc<Core>),
    /// A frozen map of a disk that is open here.
    Frozen(Arc<Core>, Arc<FrozenMap>),
    /// A snapshot of a disk that may be open elsewhere.
    Elsewhere(Box<Elsewhere>),
}

/// A snapshot of a disk that may be open elsewhere.
pub(crate) struct Elsewhere {
    pub(crate) directory: PathBuf,
    pub(crate) size_bytes: u64,
    pub(crate) data: StoredFile,
    pub(crate) base: Option<Arc<dyn Source>>,
    pub(crate) roots: Roots,
    /// It cannot be deleted.
    pub(crate) _lock: SnapshotLock,
}

impl fmt::Debug for View {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "View({})", self.describe())
    }
}

impl View {
    pub(crate) fn current(core: Arc<Core>) -> View {
        View(Kind::Current(core))
    }

    pub(crate) fn frozen(core: Arc<Core>, map: Arc<FrozenMap>) -> View {
        View(Kind::Frozen(core, map))
    }

    pub(crate) fn elsewhere(elsewhere: Elsewhere) -> View {
        View(Kind::Elsewhere(Box::new(elsewhere)))
    }

    fn base(&self) -> Option<&Arc<dyn Source>> {
        match &self.0 {
            Kind::Current(core) | Kind::Frozen(core, _) => core.base.as_ref(),
            Kind::Elsewhere(elsewhere) => elsewhere.base.as_ref(),
        }
    }

    fn data(&self) -> &StoredFile {
        match &self.0 {
            Kind::Current(core) | Kind::Frozen(core, _) => &core.data,
            Kind::Elsewhere(elsewhere) => &elsewhere.data,
        }
    }

    /// The blocks in a row at `block`, at most `limit`.
    fn run(&self, block: u64, limit: u64) -> Run {
        let position = Position::of(block);
        let limit = limit.min(LEAF_BLOCKS) as usize;
        let find = |leaf: Option<&Arc<Leaf>>| map::run(leaf.map(|leaf| &**leaf), position.index, limit, |_| true);
        match &self.0 {
            Kind::Current(core) => find(core.stripes[position.stripe].map().tree.leaf(position.leaf)),
            Kind::Frozen(_, map) => find(map.roots.leaf_of(block)),
            Kind::Elsewhere(elsewhere) => find(elsewhere.roots.leaf_of(block)),
        }
    }

    /// Whether a block is the very same in another view of this disk: it was not written in between. One that was
    /// written with what it held already is not.
    pub fn is_same(&self, other: &View, block: u64) -> bool {
        self.run(block, 1).state == other.run(block, 1).state
    }

    /// What a run's state means, with the base behind it.
    fn is_zero(&self, state: State) -> bool {
        match state {
            State::Data(_) => false,
            State::Zero => true,
            State::Absent => self.base().is_none(),
        }
    }

    /// Places are another's as soon as the disk is closed: what was read before is right only if it is open after.
    fn check_open(&self) -> Result<(), SourceError> {
        match &self.0 {
            Kind::Current(core) | Kind::Frozen(core, _) => core.check_open().map_err(|error| self.failed(&error)),
            Kind::Elsewhere(_) => Ok(()),
        }
    }

    fn failed(&self, error: &DiskError) -> SourceError {
        SourceError { source_name: self.describe(), reason: error.to_string() }
    }

    /// Reads what a map says; behind the disk's end are zeros. False: it would have to wait, and shall not.
    fn read_kept(&self, offset: u64, into: &mut [u8], waits: bool) -> Result<bool, SourceError> {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let (block, within) = (at / BLOCK_BYTES, at % BLOCK_BYTES);
            let rest = (into.len() - done) as u64;
            let run = self.run(block, (within + rest).div_ceil(BLOCK_BYTES));
            let count = (run.count as u64 * BLOCK_BYTES - within).min(rest) as usize;
            let part = &mut into[done..done + count];
            let is_read = match (run.state, self.base()) {
                (State::Data(place), _) => {
                    let (data, at) = (self.data(), byte_of(place) + within);
                    let is_read = match waits {
                        true => data.read_at(at, part).map(|()| true),
                        false => data.try_read_cached(at, &mut [IoSliceMut::new(part)]),
                    };
                    is_read.map_err(|error| self.failed(&error))?
                }
                (State::Absent, Some(base)) if waits => base.read(at, part).map(|()| true)?,
                (State::Absent, Some(base)) => base.try_read(at, part)?,
                _ => {
                    part.fill(0);
                    true
                }
            };
            if !is_read {
                return Ok(false);
            }
            done += count;
        }
        Ok(true)
    }

    fn read_as(&self, offset: u64, into: &mut [u8], waits: bool) -> Result<bool, SourceError> {
        let there = self.size_bytes().saturating_sub(offset).min(into.len() as u64) as usize;
        let (into, behind_end) = into.split_at_mut(there);
        behind_end.fill(0);
        match &self.0 {
            Kind::Current(core) => {
                let wait_policy = if waits { WaitPolicy::Wait(None) } else { WaitPolicy::NoWait };
                core.read_unseen(offset, into, wait_policy).map_err(|error| self.failed(&error))
            }
            _ => {
                let is_read = self.read_kept(offset, into, waits)?;
                self.check_open().map(|()| is_read)
            }
        }
    }
}

impl Source for View {
    fn size_bytes(&self) -> u64 {
        match &self.0 {
            Kind::Current(core) | Kind::Frozen(core, _) => core.header.size_bytes,
            Kind::Elsewhere(elsewhere) => elsewhere.size_bytes,
        }
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        self.read_as(offset, into, true).map(|_| ())
    }

    fn try_read(&self, offset: u64, into: &mut [u8]) -> Result<bool, SourceError> {
        self.read_as(offset, into, false)
    }

    fn is_local(&self, offset: u64, length: u64) -> bool {
        let Some(base) = self.base() else { return true };
        let end = offset.saturating_add(length).min(self.size_bytes());
        let mut at = offset;
        while at < end {
            let (block, within) = (at / BLOCK_BYTES, at % BLOCK_BYTES);
            let run = self.run(block, (within + end - at).div_ceil(BLOCK_BYTES));
            let count = (run.count as u64 * BLOCK_BYTES - within).min(end - at);
            if run.state == State::Absent && !base.is_local(at, count) {
                return false;
            }
            at += count;
        }
        true
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, SourceError> {
        self.check_open()?;
        let mut extents: Vec<Extent> = Vec::new();
        let mut push = |extent: Extent| match extents.last_mut() {
            Some(last) if last.is_zero == extent.is_zero => last.range.end = extent.range.end,
            _ => extents.push(extent),
        };
        let end = range.end.min(self.size_bytes());
        let mut at = range.start;
        while at < end {
            let (block, within) = (at / BLOCK_BYTES, at % BLOCK_BYTES);
            let run = self.run(block, (within + end - at).div_ceil(BLOCK_BYTES));
            let part = at..at + (run.count as u64 * BLOCK_BYTES - within).min(end - at);
            at = part.end;
            match (run.state, self.base()) {
                (State::Absent, Some(base)) => base.extents(part)?.into_iter().for_each(&mut push),
                (state, _) => push(Extent { range: part, is_zero: self.is_zero(state) }),
            }
        }
        if range.end > at {
            push(Extent { range: at..range.end, is_zero: true });
        }
        Ok(extents)
    }

    fn hydration(&self) -> Option<Hydration> {
        self.base()?.hydration()
    }

    fn close(&self) {
        // The base of a disk that is open here is the disk's to close.
        if let Kind::Elsewhere(elsewhere) = &self.0
            && let Some(base) = &elsewhere.base
        {
            base.close();
        }
    }

    fn describe(&self) -> String {
        match &self.0 {
            Kind::Current(core) | Kind::Frozen(core, _) => core.describe(),
            Kind::Elsewhere(elsewhere) => elsewhere.directory.display().to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::{At, CreateOptions, Disk, OpenOptions};

    #[derive(Default)]
    struct Far {
        is_closed: AtomicBool,
    }

    impl Source for Far {
        fn size_bytes(&self) -> u64 {
            BLOCK_BYTES
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), SourceError> {
            Ok(())
        }

        fn close(&self) {
            self.is_closed.store(true, Ordering::SeqCst);
        }

        fn describe(&self) -> String {
            "far".into()
        }
    }

    /// What lies under a disk is read at once where it is in memory, and not at all where it would be waited for.
    #[test]
    fn what_a_view_has_in_memory_is_read_without_waiting() {
        const BLOCK: usize = BLOCK_BYTES as usize;
        // Not in tmpfs, which cannot say what it has in memory.
        let home = tempfile::tempdir().unwrap();
        let made = CreateOptions { size_bytes: 4 * BLOCK_BYTES, base: None, copy_base: false };
        Disk::create(home.path(), &made).unwrap();
        let disk = Disk::open(home.path(), OpenOptions::default()).unwrap();
        disk.write(BLOCK_BYTES, &[5; BLOCK], &[]).unwrap();
        disk.snapshot("one").unwrap();
        disk.write(BLOCK_BYTES, &[6; BLOCK], &[]).unwrap();
        let elsewhere = || View::open(home.path(), "one").unwrap();
        let frozen = disk.view(&At::Snapshot("one".into())).unwrap();
        for (view, byte) in [(elsewhere(), 5), (frozen, 5), (disk.view(&At::Current).unwrap(), 6)] {
            let mut bytes = [1; 5 * BLOCK];
            assert!(view.try_read(0, &mut bytes).unwrap());
            let expected = [0, byte, 0, 0, 0];
            assert!((0..5).all(|at| bytes[at * BLOCK..][..BLOCK] == [expected[at]; BLOCK]), "{byte}");
        }
        let mut over_far = elsewhere();
        let Kind::Elsewhere(below) = &mut over_far.0 else { panic!("opened by its directory") };
        below.base = Some(Arc::new(Far::default()));
        let mut bytes = [1; 2 * BLOCK];
        assert!(!over_far.try_read(0, &mut bytes).unwrap(), "half of it lies in a base that would be waited for");
        assert!(over_far.try_read(BLOCK_BYTES, &mut bytes[..BLOCK]).unwrap() && bytes[..BLOCK] == [5; BLOCK]);
        drop(over_far);
        disk.close().unwrap();
    }

    /// Spec: D4
    #[test]
    fn b12_a_snapshot_that_is_a_base_ends_what_waits_for_its_own_base() {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let made = CreateOptions { size_bytes: BLOCK_BYTES, base: None, copy_base: false };
        Disk::create(home.path(), &made).unwrap();
        let disk = Disk::open(home.path(), OpenOptions::default()).unwrap();
        disk.snapshot("one").unwrap();
        let mut view = View::open(home.path(), "one").unwrap();
        let far = Arc::new(Far::default());
        let Kind::Elsewhere(elsewhere) = &mut view.0 else { panic!("opened by its directory") };
        elsewhere.base = Some(far.clone());
        view.close();
        assert!(far.is_closed.load(Ordering::SeqCst));
        drop(view);
        disk.close().unwrap();
    }
}
