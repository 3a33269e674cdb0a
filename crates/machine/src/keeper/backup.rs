//! The other host's copy of a protected machine: its memory and its disk, epoch by epoch, and a QEMU that waits.
//!
//! ```text
//!  link ──> spool: an epoch as it comes ──whole, and right──> memory, disk ──> acknowledged
//!             └── lost in its middle: forgotten, and the copy is that of the last whole one
//!  the source is lost, and its host says that it was handed over, or a person does, or it was fenced ──> devices ──> it runs
//! ```
//!
//! The copy lives as long as the processes that have it: what is acknowledged is in this host's memory, not on its
//! disks. Where they die the machine goes on at the source, and is copied anew.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt, chown};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::delta::{Blocks, Destination, HeldEpoch, Space, Version};
use onecopy_checkpoint::take::Cause;
use onecopy_disk::{BaseSpecification, CreateOptions, Disk, Source};
use onecopy_postgres::ServiceUser;
use rustix::fs::FallocateFlags;
use tokio::sync::OwnedRwLockReadGuard;

use super::disk_comparison::{self, Peer, Told};
use super::restore;
use crate::files::{absent_is_fine, give_all};
use crate::home::copied_base;
use crate::{MachineError, MachineHome};

/// The disk's record of what its base was when it was made.
const BASE_IDENTITY: &str = "base.identity";

/// How often it is looked whether the disk's copy is written.
const WRITTEN_LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// Pieces that are copied at once.
const COPY_PIECES: usize = 256;

/// How often what the copy of the disk has is written to the host's disk, so that little is left to be written when the
/// machine goes on here.
const SYNCHRONIZE_INTERVAL: Duration = Duration::from_secs(1);

/// Memory and disk of a protected machine.
pub(super) struct Copy {
    memory: File,
    /// Let go once that is closed: [`MemoryOpen`](super::memory_file::MemoryOpen).
    _open: Option<OwnedRwLockReadGuard<()>>,
    disk: File,
    /// Nothing is in them but what the disk begins with: without the first epoch they are of no use, and it is written
    /// in place.
    is_new: bool,
    /// What an epoch writes that is not whole yet. It has no name.
    spool: File,
    staged: Mutex<Staged>,
    synchronized: Mutex<Instant>,
    written: Arc<Written>,
}

/// Whether what the disk's copy has is written.
#[derive(Default)]
struct Written {
    is_under_way: AtomicBool,
    /// It was not once: the kernel tells that to one who asks, and not again.
    has_failed: AtomicBool,
}

/// What an epoch has written: runs that do not overlap.
#[derive(Default)]
struct Staged {
    runs: BTreeMap<(Space, u64), Run>,
    /// Places in the spool that are taken.
    places: u64,
}

/// Pieces that follow each other.
#[derive(Clone, Copy)]
struct Run {
    count: u64,
    /// The place of the first one in the spool; none: zeros.
    place: Option<u64>,
}

impl Run {
    /// Without its first pieces.
    fn behind(self, pieces: u64) -> Run {
        Run { count: self.count - pieces, place: self.place.map(|place| place + pieces) }
    }
}

impl Staged {
    /// What was written of these pieces, the last run first.
    fn of(&self, space: Space, numbers: Range<u64>) -> impl Iterator<Item = (u64, Run)> {
        let before_end = self.runs.range((space, 0)..(space, numbers.end)).rev();
        before_end
            .map(|((_, first), run)| (*first, *run))
            .take_while(move |(first, run)| first + run.count > numbers.start)
    }

    /// In the place of whatever was written of them.
    fn put(&mut self, space: Space, numbers: Range<u64>, place: Option<u64>) {
        for (first, run) in self.of(space, numbers.clone()).collect::<Vec<_>>() {
            self.runs.remove(&(space, first));
            if first < numbers.start {
                self.runs.insert((space, first), Run { count: numbers.start - first, ..run });
            }
            if first + run.count > numbers.end {
                self.runs.insert((space, numbers.end), run.behind(numbers.end - first));
            }
        }
        self.runs.insert((space, numbers.start), Run { count: numbers.end - numbers.start, place });
    }
}

/// Makes an empty copy, beneath the disk of this number that the machine has once it runs here. Nobody writes there but
/// this process; the disk's server reads it.
pub(super) fn create_disk(
    home: &MachineHome,
    user: &ServiceUser,
    number: u64,
    disk_bytes: u64,
) -> Result<File, MachineError> {
    let path = copied_base(&home.numbered_disk(number));
    let failed = || MachineError::file("create", &path);
    absent_is_fine(std::fs::remove_file(&path)).map_err(failed())?;
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o640).open(&path).map_err(failed())?;
    chown(&path, None, Some(user.group_id())).map_err(failed())?;
    file.set_len(disk_bytes).map_err(failed())?;
    Ok(file)
}

/// Makes the machine's disk over the copy, which changes until the machine goes on here: nobody reads it before.
pub(super) fn make_disk(
    home: &MachineHome,
    user: &ServiceUser,
    number: u64,
    size_bytes: u64,
) -> Result<(), MachineError> {
    restore::give_up(home, number)?;
    let disk = home.numbered_disk(number);
    let base = BaseSpecification::Raw { path: copied_base(&disk) };
    let (new, options) = (restore::new_disk(home), CreateOptions { size_bytes, base: Some(base), copy_base: false });
    let _ = std::fs::remove_dir_all(&new);
    Disk::create(&new, &options).map_err(home.disk_failed())?;
    // It says of which instant the base is, and there is none yet; the base is root's, and changes for nobody else.
    let identity = new.join(BASE_IDENTITY);
    let removed = std::fs::remove_file(&identity).and_then(|()| File::open(&new)?.sync_all());
    removed.map_err(MachineError::file("remove", &identity))?;
    give_all(&new, user)?;
    std::fs::rename(&new, disk).map_err(MachineError::file("rename", &new))
}

impl Copy {
    /// One that holds nothing, in these files; with `is_new` they are empty but for what the disk begins with.
    ///
    /// # Errors
    /// There is no room for what is not whole yet.
    pub(super) fn new(home: &MachineHome, memory: File, disk: File, is_new: bool) -> io::Result<Copy> {
        let spool = unnamed(&home.root().join("protected.spool"))?;
        let (staged, synchronized) = (Mutex::default(), Mutex::new(Instant::now()));
        Ok(Copy { memory, _open: None, disk, is_new, spool, staged, synchronized, written: Arc::default() })
    }

    /// The same disk, with a memory that QEMU has.
    pub(super) fn over(
        self,
        home: &MachineHome,
        memory: File,
        open: Option<OwnedRwLockReadGuard<()>>,
    ) -> io::Result<Copy> {
        let written = self.written;
        Ok(Copy { written, _open: open, ..Copy::new(home, memory, self.disk, false)? })
    }

    fn file(&self, space: Space) -> &File {
        match space {
            Space::Memory => &self.memory,
            Space::Disk => &self.disk,
        }
    }

    fn staged(&self) -> MutexGuard<'_, Staged> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an epoch count that has come whole.
    ///
    /// # Errors
    /// The copy is of no use any more: it may hold parts of two epochs.
    pub(super) fn apply(&self) -> Result<(), Cause> {
        if self.written.has_failed.load(Ordering::Acquire) {
            return Err("the copy of its disk could not be written".into());
        }
        let mut staged = self.staged();
        let mut content = vec![0; COPY_PIECES * PAGE_BYTES];
        for ((space, first), Run { count, place }) in std::mem::take(&mut staged.runs) {
            let Some(place) = place else {
                self.clear(space, first..first + count)?;
                continue;
            };
            for at in (0..count).step_by(COPY_PIECES) {
                let pieces = (count - at).min(COPY_PIECES as u64);
                let content = &mut content[..pieces as usize * PAGE_BYTES];
                self.spool.read_exact_at(content, (place + at) * PAGE_BYTES as u64)?;
                self.file(space).write_all_at(content, (first + at) * PAGE_BYTES as u64)?;
            }
        }
        if staged.places > 0 {
            staged.places = 0;
            self.spool.set_len(0)?;
        }
        drop(staged);
        self.synchronize_beside();
        Ok(())
    }

    /// Makes zeros of pieces: of blocks a hole, where that is possible.
    fn clear(&self, space: Space, numbers: Range<u64>) -> io::Result<()> {
        let (at, bytes) = (numbers.start * PAGE_BYTES as u64, (numbers.end - numbers.start) * PAGE_BYTES as u64);
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if space == Space::Disk && rustix::fs::fallocate(self.disk.as_fd(), hole, at, bytes).is_ok() {
            return Ok(());
        }
        let zeros = vec![0; COPY_PIECES * PAGE_BYTES];
        for at in numbers.clone().step_by(COPY_PIECES) {
            let pieces = (numbers.end - at).min(COPY_PIECES as u64) as usize;
            self.file(space).write_all_at(&zeros[..pieces * PAGE_BYTES], at * PAGE_BYTES as u64)?;
        }
        Ok(())
    }

    /// Begins the disk of a new one with what is known of it here, if anything is, and says what that is.
    ///
    /// # Errors
    /// As [`disk_comparison::begin_with`].
    pub(super) fn begin_with(
        &self,
        known: Option<&dyn Source>,
        disk_bytes: u64,
        peer: &mut impl Peer,
    ) -> Result<Told, Cause> {
        disk_comparison::begin_with(known, &self.disk, disk_bytes, peer)
    }

    /// Has the kernel write what the disk's copy has, while epochs come.
    fn synchronize_beside(&self) {
        let mut last = self.synchronized.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() < SYNCHRONIZE_INTERVAL || self.written.is_under_way.swap(true, Ordering::AcqRel) {
            return;
        }
        *last = Instant::now();
        let started = self.disk.try_clone().and_then(|disk| {
            let written = Arc::clone(&self.written);
            std::thread::Builder::new().name("protected-disk".to_owned()).spawn(move || {
                written.note(&disk.sync_data());
                written.is_under_way.store(false, Ordering::Release);
            })
        });
        if started.is_err() {
            // It is all written before the machine goes on here.
            self.written.is_under_way.store(false, Ordering::Release);
        }
    }

    /// All that the disk's copy has is durable: the machine can go on.
    ///
    /// # Errors
    /// It is not, and never will be.
    pub(super) fn synchronize(&self) -> io::Result<()> {
        while self.written.is_under_way.swap(true, Ordering::AcqRel) {
            std::thread::sleep(WRITTEN_LOOK_INTERVAL);
        }
        self.written.note(&self.disk.sync_data());
        self.written.is_under_way.store(false, Ordering::Release);
        match self.written.has_failed.load(Ordering::Acquire) {
            true => Err(io::Error::other("the copy of its disk could not be written")),
            false => Ok(()),
        }
    }
}

impl Written {
    fn note(&self, written: &io::Result<()>) {
        if let Err(error) = written {
            tracing::error!(%error, "the copy of a protected machine's disk is not written");
            self.has_failed.store(true, Ordering::Release);
        }
    }
}

/// A file that goes with its descriptor.
fn unnamed(path: &Path) -> io::Result<File> {
    absent_is_fine(std::fs::remove_file(path))?;
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    std::fs::remove_file(path)?;
    Ok(file)
}

impl Destination for Copy {
    fn begin(&self, _: u64, since: HeldEpoch, versions: &[Version]) -> Result<(), Cause> {
        // Of a new one: what its disk began with.
        let is_held = |version: &Version| *version == Version::Epoch(since.epoch);
        if self.is_new != (since == HeldEpoch::NOTHING) || !versions.iter().all(is_held) {
            return Err("it begins anew in its middle, or names what is not here".into());
        }
        let mut staged = self.staged();
        *staged = Staged::default();
        Ok(self.spool.set_len(0)?)
    }

    fn read(&self, space: Space, first: u64, into: &mut [u8]) -> Result<(), Cause> {
        let count = (into.len() / PAGE_BYTES) as u64;
        self.file(space).read_exact_at(into, first * PAGE_BYTES as u64)?;
        for (start, run) in self.staged().of(space, first..first + count) {
            let run = if start < first { run.behind(first - start) } else { run };
            let (at, pieces) = (start.max(first) - first, run.count.min(first + count - start.max(first)));
            let written = &mut into[at as usize * PAGE_BYTES..][..pieces as usize * PAGE_BYTES];
            match run.place {
                Some(place) => self.spool.read_exact_at(written, place * PAGE_BYTES as u64)?,
                None => written.fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, space: Space, first: u64, content: &[u8]) -> Result<(), Cause> {
        if self.is_new {
            return Ok(self.file(space).write_all_at(content, first * PAGE_BYTES as u64)?);
        }
        let mut staged = self.staged();
        let (place, count) = (staged.places, (content.len() / PAGE_BYTES) as u64);
        staged.places += count;
        self.spool.write_all_at(content, place * PAGE_BYTES as u64)?;
        staged.put(space, first..first + count, Some(place));
        Ok(())
    }

    fn zero(&self, space: Space, numbers: Range<u64>) -> Result<(), Cause> {
        match (self.is_new, space) {
            // Nothing was written there: an epoch has each page once.
            (true, Space::Memory) => {}
            (true, Space::Disk) => self.clear(space, numbers)?,
            (false, _) => self.staged().put(space, numbers, None),
        }
        Ok(())
    }
}

/// The disk as it is at the end of the epoch that is held: nothing is written to it before the next one is whole.
impl Blocks for Copy {
    fn read_many(&self, _: &Version, blocks: &[u64], into: &mut [u8]) -> Result<(), Cause> {
        let mut rest = into;
        for run in blocks.chunk_by(|one, next| one.checked_add(1) == Some(*next)) {
            let (read, left) = rest.split_at_mut(run.len() * PAGE_BYTES);
            self.disk.read_exact_at(read, run[0] * PAGE_BYTES as u64)?;
            rest = left;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = PAGE_BYTES;

    fn copy(is_new: bool) -> (tempfile::TempDir, Copy) {
        let directory = tempfile::tempdir().unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        std::fs::create_dir(home.root()).unwrap();
        let file = |name: &str| {
            let file = unnamed(&home.root().join(name)).unwrap();
            file.write_all_at(&[7; 8 * PIECE], 0).unwrap();
            file
        };
        let copy = Copy::new(&home, file("memory"), file("disk"), is_new).unwrap();
        assert_eq!(std::fs::read_dir(home.root()).unwrap().count(), 0);
        (directory, copy)
    }

    fn held(epoch: u64) -> HeldEpoch {
        HeldEpoch { epoch, digest: [1; 32] }
    }

    fn read(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; 8 * PIECE];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes.chunks(PIECE).map(|piece| piece[0]).collect()
    }

    /// Spec: D8
    #[test]
    fn p1_an_epoch_counts_once_it_is_whole_and_one_that_was_broken_off_never() {
        let (_directory, copy) = copy(false);
        let before = vec![7; 8];
        // One that is broken off.
        copy.begin(2, held(1), &[]).unwrap();
        copy.write(Space::Memory, 1, &[9; 2 * PIECE]).unwrap();
        copy.write(Space::Disk, 1, &[9; PIECE]).unwrap();
        copy.zero(Space::Disk, 5..8).unwrap();
        let mut seen = vec![0; 4 * PIECE];
        copy.read(Space::Memory, 0, &mut seen).unwrap();
        assert_eq!(seen.chunks(PIECE).map(|piece| piece[PIECE - 1]).collect::<Vec<_>>(), [7, 9, 9, 7]);
        copy.read(Space::Disk, 4, &mut seen).unwrap();
        assert_eq!(seen.chunks(PIECE).map(|piece| piece[0]).collect::<Vec<_>>(), [7, 0, 0, 0]);
        assert_eq!((read(&copy.memory), read(&copy.disk)), (before.clone(), before.clone()));

        copy.begin(2, held(1), &[]).unwrap();
        copy.read(Space::Memory, 0, &mut seen).unwrap();
        assert!(seen.iter().all(|byte| *byte == 7), "nothing of it is left");
        copy.write(Space::Memory, 2, &[[1; PIECE], [2; PIECE]].concat()).unwrap();
        copy.write(Space::Memory, 0, &[3; PIECE]).unwrap();
        // As it is repaired.
        copy.write(Space::Memory, 3, &[4; PIECE]).unwrap();
        copy.write(Space::Disk, 7, &[5; PIECE]).unwrap();
        copy.zero(Space::Disk, 0..2).unwrap();
        copy.zero(Space::Memory, 6..7).unwrap();
        assert_eq!(read(&copy.memory), before);
        copy.apply().unwrap();
        assert_eq!(read(&copy.memory), [3, 7, 1, 4, 7, 7, 0, 7]);
        assert_eq!(read(&copy.disk), [0, 0, 7, 7, 7, 7, 7, 5]);
        copy.apply().unwrap();
        assert_eq!(read(&copy.disk), [0, 0, 7, 7, 7, 7, 7, 5]);
        assert_eq!(copy.spool.metadata().unwrap().len(), 0);
        copy.begin(3, HeldEpoch::NOTHING, &[]).unwrap_err();
        for other in [Version::Epoch(1), Version::Snapshot("one".to_owned())] {
            copy.begin(3, held(2), &[Version::Epoch(2), other]).unwrap_err();
        }
        // Its blocks are those of the epoch that is held until the next one counts.
        copy.begin(3, held(2), &[Version::Epoch(2)]).unwrap();
        copy.write(Space::Disk, 7, &[9; PIECE]).unwrap();
        let mut blocks = vec![0; 3 * PIECE];
        copy.read_many(&Version::Epoch(2), &[0, 6, 7], &mut blocks).unwrap();
        assert_eq!(blocks.chunks(PIECE).map(|piece| piece[0]).collect::<Vec<_>>(), [0, 7, 5]);
    }

    /// As the pieces themselves are: a model.
    #[test]
    fn runs_that_overlap_are_what_was_written_last() {
        let mut random = 1u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % below
        };
        for _ in 0..200 {
            let (mut staged, mut model) = (Staged::default(), BTreeMap::new());
            for _ in 0..12 {
                let space = if next(2) == 0 { Space::Memory } else { Space::Disk };
                let (first, count) = (next(20), next(6) + 1);
                let place = (next(3) > 0).then_some(staged.places);
                staged.places += count;
                staged.put(space, first..first + count, place);
                model.extend((0..count).map(|at| ((space, first + at), place.map(|place| place + at))));
            }
            let pieces = |((space, first), run): (&(Space, u64), &Run)| {
                let (space, first, run) = (*space, *first, *run);
                (0..run.count).map(move |at| ((space, first + at), run.place.map(|place| place + at)))
            };
            assert!(staged.runs.iter().flat_map(pieces).eq(model.iter().map(|(at, place)| (*at, *place))));
            let (first, count) = (next(20), next(8) + 1);
            let seen: u64 = staged
                .of(Space::Memory, first..first + count)
                .map(|(start, run)| (start + run.count).min(first + count) - start.max(first))
                .sum();
            assert_eq!(seen, model.range((Space::Memory, first)..(Space::Memory, first + count)).count() as u64);
        }
    }

    /// Spec: D8
    #[test]
    fn p2_a_disk_that_could_not_be_written_once_is_no_copy() {
        let (_directory, copy) = copy(false);
        copy.synchronize().unwrap();
        copy.written.note(&Err(io::Error::other("as it happens")));
        copy.begin(2, held(1), &[]).unwrap();
        copy.apply().unwrap_err();
        copy.synchronize().unwrap_err();
    }

    /// Spec: D8
    #[test]
    fn p1_the_first_epoch_is_written_in_place() {
        let (_directory, copy) = copy(true);
        copy.begin(1, held(1), &[]).unwrap_err();
        copy.begin(1, HeldEpoch::NOTHING, &[]).unwrap();
        copy.write(Space::Disk, 1, &[9; PIECE]).unwrap();
        assert_eq!(read(&copy.disk)[..3], [7, 9, 7]);
        // It may hold something else where the disk has zeros.
        copy.zero(Space::Disk, 3..5).unwrap();
        assert_eq!(read(&copy.disk)[2..6], [7, 0, 0, 7]);
    }

    /// A machine that comes where others lie over a disk of its name leaves them that, and what that stands on, whether
    /// it comes or not.
    ///
    /// Spec: D6, D8
    #[test]
    fn p7_a_copy_has_a_disk_of_its_own_beside_those_that_are_there() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        let user = ServiceUser::resolve(None).unwrap();
        std::fs::create_dir(home.root()).unwrap();
        for number in 0..2 {
            assert_eq!(home.next_disk(), number);
            let raw = create_disk(&home, &user, number, 1 << 20).unwrap();
            raw.write_all_at(&[number as u8 + 1; PIECE], 0).unwrap();
            make_disk(&home, &user, number, 1 << 20).unwrap();
            restore::commit(&home).unwrap();
        }
        let holds = |number: u64| {
            let disk = Disk::open(&home.numbered_disk(number), onecopy_disk::OpenOptions::default()).unwrap();
            let mut first = vec![0; PIECE];
            disk.read(0, &mut [io::IoSliceMut::new(&mut first)]).unwrap();
            disk.close().unwrap();
            assert!(first == [number as u8 + 1; PIECE], "disk {number}");
        };
        holds(0);
        holds(1);
        // One more, which never comes.
        let number = home.next_disk();
        create_disk(&home, &user, number, 1 << 20).unwrap();
        make_disk(&home, &user, number, 1 << 20).unwrap();
        restore::forget(&home).unwrap();
        assert_eq!(home.disk(), home.numbered_disk(1));
        assert!(!copied_base(&home.numbered_disk(2)).exists());
        holds(0);
        holds(1);
        std::fs::write(home.went_by_file(), "\"one\"").unwrap();
        home.forget_disks_before(1).unwrap();
        assert!(!home.numbered_disk(0).exists() && !copied_base(&home.numbered_disk(0)).exists());
        holds(1);
    }
}
