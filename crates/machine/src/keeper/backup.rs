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
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::delta::{Destination, HeldEpoch, Space, Version};
use onecopy_checkpoint::take::Cause;
use onecopy_disk::{BaseSpecification, CreateOptions, Disk};
use onecopy_postgres::ServiceUser;
use rustix::fs::FallocateFlags;

use super::restore;
use crate::home::{absent_is_fine, give_all};
use crate::{MachineError, MachineHome};

/// The disk's record of what its base was when it was made.
const BASE_IDENTITY: &str = "base.identity";

/// Pieces that are copied at once.
const COPY_PIECES: usize = 256;

/// How often what the copy of the disk has is written to the host's disk, so that little is left to be written when the
/// machine goes on here.
const SYNCHRONIZE_INTERVAL: Duration = Duration::from_secs(1);

/// Memory and disk of a protected machine.
pub(super) struct Copy {
    memory: File,
    disk: File,
    /// Nothing is in them: without the first epoch they are of no use, and it is written in place.
    is_new: bool,
    /// What an epoch writes that is not whole yet. It has no name.
    spool: File,
    staged: Mutex<Staged>,
    synchronized: Mutex<Instant>,
    is_synchronizing: Arc<AtomicBool>,
}

/// What an epoch has written.
#[derive(Default)]
struct Staged {
    /// For each piece its place in the spool; none: zeros.
    pieces: BTreeMap<(Space, u64), Option<u64>>,
    /// Places in the spool that are taken.
    places: u64,
}

/// The copy of the disk, beneath the disk that the machine has once it runs here.
fn disk_file(home: &MachineHome) -> PathBuf {
    home.root().join("protected.raw")
}

/// Makes an empty copy of a disk. Nobody writes there but this process; the disk's server reads it.
pub(super) fn create_disk(home: &MachineHome, user: &ServiceUser, disk_bytes: u64) -> Result<File, MachineError> {
    let path = disk_file(home);
    let failed = || MachineError::file("create", &path);
    absent_is_fine(std::fs::remove_file(&path)).map_err(failed())?;
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o640).open(&path).map_err(failed())?;
    chown(&path, None, Some(user.group_id())).map_err(failed())?;
    file.set_len(disk_bytes).map_err(failed())?;
    Ok(file)
}

/// Makes the machine's disk over the copy, which changes until the machine goes on here: nobody reads it before.
pub(super) fn make_disk(home: &MachineHome, user: &ServiceUser, size_bytes: u64) -> Result<(), MachineError> {
    restore::give_up(home, 0)?;
    let base = BaseSpecification::Raw { path: disk_file(home) };
    let (new, options) = (restore::new_disk(home), CreateOptions { size_bytes, base: Some(base), copy_base: false });
    let _ = std::fs::remove_dir_all(&new);
    Disk::create(&new, &options).map_err(home.disk_failed())?;
    // It says of which instant the base is, and there is none yet; the base is root's, and changes for nobody else.
    let identity = new.join(BASE_IDENTITY);
    std::fs::remove_file(&identity).map_err(MachineError::file("remove", &identity))?;
    give_all(&new, user)?;
    std::fs::rename(&new, home.numbered_disk(0)).map_err(MachineError::file("rename", &new))
}

impl Copy {
    /// One that holds nothing, in these files; with `is_new` they are empty.
    ///
    /// # Errors
    /// There is no room for what is not whole yet.
    pub(super) fn new(home: &MachineHome, memory: File, disk: File, is_new: bool) -> io::Result<Copy> {
        let spool = unnamed(&home.root().join("protected.spool"))?;
        let (staged, synchronized) = (Mutex::default(), Mutex::new(Instant::now()));
        Ok(Copy { memory, disk, is_new, spool, staged, synchronized, is_synchronizing: Arc::default() })
    }

    /// The same disk, with a memory that QEMU has.
    pub(super) fn over(self, home: &MachineHome, memory: File) -> io::Result<Copy> {
        Copy::new(home, memory, self.disk, false)
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
        let mut staged = self.staged();
        let pieces: Vec<_> = std::mem::take(&mut staged.pieces).into_iter().collect();
        let mut content = vec![0; COPY_PIECES * PAGE_BYTES];
        for run in pieces.chunk_by(follow).flat_map(|run| run.chunks(COPY_PIECES)) {
            let ((space, first), place) = run[0];
            match place {
                Some(place) => {
                    let content = &mut content[..run.len() * PAGE_BYTES];
                    self.spool.read_exact_at(content, place * PAGE_BYTES as u64)?;
                    self.file(space).write_all_at(content, first * PAGE_BYTES as u64)?;
                }
                None => self.write_zeros(space, first..first + run.len() as u64)?,
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

    fn write_zeros(&self, space: Space, numbers: Range<u64>) -> io::Result<()> {
        let (at, bytes) = (numbers.start * PAGE_BYTES as u64, (numbers.end - numbers.start) * PAGE_BYTES as u64);
        let file = self.file(space);
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if space == Space::Disk && rustix::fs::fallocate(file.as_fd(), hole, at, bytes).is_ok() {
            return Ok(());
        }
        file.write_all_at(&vec![0; bytes as usize], at)
    }

    /// Has the kernel write what the disk's copy has, while epochs come.
    fn synchronize_beside(&self) {
        let mut last = self.synchronized.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() < SYNCHRONIZE_INTERVAL || self.is_synchronizing.swap(true, Ordering::AcqRel) {
            return;
        }
        *last = Instant::now();
        let is_synchronizing = Arc::clone(&self.is_synchronizing);
        let started = self.disk.try_clone().and_then(|disk| {
            let done = Arc::clone(&is_synchronizing);
            std::thread::Builder::new().name("protected-disk".to_owned()).spawn(move || {
                if let Err(error) = disk.sync_data() {
                    tracing::warn!(%error, "the copy of a protected machine's disk is not written");
                }
                done.store(false, Ordering::Release);
            })
        });
        if started.is_err() {
            // It is all written before the machine goes on here.
            is_synchronizing.store(false, Ordering::Release);
        }
    }

    /// All that the disk's copy has is durable: the machine can go on.
    ///
    /// # Errors
    /// It may not be.
    pub(super) fn synchronize(&self) -> io::Result<()> {
        self.disk.sync_data()
    }
}

/// Whether two pieces can be copied at once.
fn follow(one: &((Space, u64), Option<u64>), next: &((Space, u64), Option<u64>)) -> bool {
    let (((space, number), place), ((next_space, next_number), next_place)) = (*one, *next);
    space == next_space && number + 1 == next_number && place.map(|place| place + 1) == next_place
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
        if self.is_new != (since == HeldEpoch::NOTHING) || !versions.is_empty() {
            return Err("it begins anew in its middle, or names what is not here".into());
        }
        let mut staged = self.staged();
        *staged = Staged::default();
        Ok(self.spool.set_len(0)?)
    }

    fn read(&self, space: Space, first: u64, into: &mut [u8]) -> Result<(), Cause> {
        let count = (into.len() / PAGE_BYTES) as u64;
        self.file(space).read_exact_at(into, first * PAGE_BYTES as u64)?;
        for ((_, number), place) in self.staged().pieces.range((space, first)..(space, first + count)) {
            let at = (number - first) as usize * PAGE_BYTES;
            let piece = &mut into[at..at + PAGE_BYTES];
            match place {
                Some(place) => self.spool.read_exact_at(piece, place * PAGE_BYTES as u64)?,
                None => piece.fill(0),
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
        staged.pieces.extend((0..count).map(|index| ((space, first + index), Some(place + index))));
        Ok(())
    }

    fn zero(&self, space: Space, numbers: Range<u64>) -> Result<(), Cause> {
        // Of new files nothing was written there: an epoch has each piece once.
        if !self.is_new {
            self.staged().pieces.extend(numbers.map(|number| ((space, number), None)));
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
        copy.begin(3, held(2), &[Version::Epoch(1)]).unwrap_err();
    }

    /// Spec: D8
    #[test]
    fn p1_the_first_epoch_is_written_in_place() {
        let (_directory, copy) = copy(true);
        copy.begin(1, held(1), &[]).unwrap_err();
        copy.begin(1, HeldEpoch::NOTHING, &[]).unwrap();
        copy.write(Space::Disk, 1, &[9; PIECE]).unwrap();
        assert_eq!(read(&copy.disk)[..3], [7, 9, 7]);
    }
}
