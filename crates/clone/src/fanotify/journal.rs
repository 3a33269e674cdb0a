//! What a process that took accesses over would have to know: which it read and did not answer, and whether it lives.
//! In memory that outlives it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, AtomicUsize};

use rustix::time::{ClockId, clock_gettime};

use super::event::Access;
use super::shared_words::SharedWords;
use crate::{ByteRange, CloneError};

/// Accesses in work at once that the journal can hold, of all groups.
pub const JOURNAL_SLOTS: usize = 4096;
/// Threads whose heartbeat is watched at once.
pub const HEARTBEAT_SLOTS_MAX: usize = 256;

const MAGIC: u64 = u64::from_be_bytes(*b"1CJOURN1");
const PROGRESS_AT: usize = 1;
const TAKEOVERS_AT: usize = 2;
const HEARTBEATS_AT: usize = 8;
const SLOTS_AT: usize = HEARTBEATS_AT + HEARTBEAT_SLOTS_MAX;
const SLOT_WORDS: usize = 8;
const WORDS: usize = SLOTS_AT + JOURNAL_SLOTS * SLOT_WORDS;

const FREE: u64 = 0;
const WRITTEN_NOW: u64 = 1;
const RANGE: u64 = 2;
const TRUNCATION: u64 = 3;

/// Which group an entry belongs to; whoever writes the journal numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GroupNumber(pub u32);

/// An access that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalEntry {
    /// The group that it came from.
    pub group: GroupNumber,
    /// Its number in the process that read it.
    pub number: i32,
    /// Who waits.
    pub process_id: u32,
    /// The file's device, as fstat(2) gives it.
    pub device: u64,
    /// The file's inode.
    pub inode: u64,
    /// What is wanted.
    pub access: Access,
}

/// Accesses that were read and not answered, heartbeats, and how far the processes came that write it.
#[derive(Debug)]
pub struct Journal {
    shared: SharedWords,
    /// Where the search for a free slot begins.
    next: AtomicUsize,
}

impl Journal {
    /// An empty one.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: no memory.
    pub fn create() -> Result<Journal, CloneError> {
        let shared = SharedWords::create("onecopy-journal", WORDS)?;
        shared.words()[0].store(MAGIC, Release);
        Ok(Journal { shared, next: AtomicUsize::new(0) })
    }

    /// The one that another process made.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: `descriptor` is no journal.
    pub fn open(descriptor: OwnedFd) -> Result<Journal, CloneError> {
        let shared = SharedWords::open(descriptor)?;
        if shared.words().len() != WORDS || shared.words()[0].load(Acquire) != MAGIC {
            return Err(CloneError::kernel("open the journal")(std::io::ErrorKind::InvalidData.into()));
        }
        Ok(Journal { shared, next: AtomicUsize::new(0) })
    }

    /// Writes down that `entry` was read. None when all slots are taken: then a successor finds the access only by
    /// [`super::Group::sweep`].
    pub fn begin(self: &Arc<Self>, entry: JournalEntry) -> Option<JournalSlot> {
        let first = self.next.fetch_add(1, Relaxed);
        let index = (0..JOURNAL_SLOTS)
            .map(|step| (first + step) % JOURNAL_SLOTS)
            .find(|&index| self.slot(index)[0].compare_exchange(FREE, WRITTEN_NOW, AcqRel, Relaxed).is_ok())?;
        let (kind, start, end) = match entry.access {
            Access::Range(range) => (RANGE, range.start, range.end),
            Access::Truncation { size_bytes } => (TRUNCATION, size_bytes, size_bytes),
        };
        let slot = self.slot(index);
        let fields = [
            u64::from(entry.group.0),
            u64::from(entry.number as u32),
            u64::from(entry.process_id),
            entry.device,
            entry.inode,
            start,
            end,
        ];
        for (word, field) in slot[1..].iter().zip(fields) {
            word.store(field, Relaxed);
        }
        slot[0].store(kind, Release);
        Some(JournalSlot { journal: Arc::clone(self), index })
    }

    /// What was begun and not ended, also by a process that is dead.
    pub fn pending(&self) -> Vec<JournalEntry> {
        (0..JOURNAL_SLOTS).filter_map(|index| self.entry(index)).collect()
    }

    /// The slots of `group` that a dead process left, to be ended by dropping them when they are answered.
    pub fn take_over(self: &Arc<Self>, group: GroupNumber) -> Vec<(JournalEntry, JournalSlot)> {
        (0..JOURNAL_SLOTS)
            .filter_map(|index| Some((self.entry(index)?, index)))
            .filter(|(entry, _)| entry.group == group)
            .map(|(entry, index)| (entry, JournalSlot { journal: Arc::clone(self), index }))
            .collect()
    }

    /// For a process that takes over, before any of its threads runs: forgets the heartbeats of the dead one and slots
    /// that it was just writing.
    pub fn clean(&self) {
        for slot in self.heartbeat_words() {
            slot.store(0, Release);
        }
        for index in 0..JOURNAL_SLOTS {
            let _ = self.slot(index)[0].compare_exchange(WRITTEN_NOW, FREE, AcqRel, Relaxed);
        }
    }

    /// A heartbeat of this thread, beating from now on; none when all are in use.
    pub fn heartbeat_slot(self: &Arc<Self>) -> Option<HeartbeatSlot> {
        let now_ms = monotonic_ms();
        let index =
            self.heartbeat_words().iter().position(|slot| slot.compare_exchange(0, now_ms, AcqRel, Relaxed).is_ok())?;
        Some(HeartbeatSlot { journal: Arc::clone(self), index })
    }

    /// When the heartbeat that has been still for longest beat last, in milliseconds of the host's clock, 0 without
    /// heartbeats: a number that stays the same while any thread stands still.
    pub fn heartbeats(&self) -> u64 {
        let beats = self.heartbeat_words().iter().map(|slot| slot.load(Acquire)).filter(|&beat_ms| beat_ms != 0);
        beats.min().unwrap_or(0)
    }

    /// Something was achieved that no process after this one need do again.
    pub fn note_progress(&self) {
        self.shared.words()[PROGRESS_AT].fetch_add(1, AcqRel);
    }

    /// How often [`Journal::note_progress`] was called, by all processes.
    pub fn progress(&self) -> u64 {
        self.shared.words()[PROGRESS_AT].load(Acquire)
    }

    /// A process has taken over what the one before it left: it did not die of that.
    pub fn note_takeover(&self) {
        self.shared.words()[TAKEOVERS_AT].fetch_add(1, AcqRel);
    }

    /// How often [`Journal::note_takeover`] was called, by all processes.
    pub fn takeovers(&self) -> u64 {
        self.shared.words()[TAKEOVERS_AT].load(Acquire)
    }

    fn entry(&self, index: usize) -> Option<JournalEntry> {
        let slot = self.slot(index);
        let kind = slot[0].load(Acquire);
        let [group, number, process_id, device, inode, start, end] =
            std::array::from_fn(|at| slot[at + 1].load(Relaxed));
        let access = match kind {
            RANGE => Access::Range(ByteRange { start, end }),
            TRUNCATION => Access::Truncation { size_bytes: start },
            _ => return None,
        };
        let (group, process_id) = (GroupNumber(group as u32), process_id as u32);
        Some(JournalEntry { group, number: number as u32 as i32, process_id, device, inode, access })
    }

    fn heartbeat_words(&self) -> &[AtomicU64] {
        &self.shared.words()[HEARTBEATS_AT..SLOTS_AT]
    }

    fn slot(&self, index: usize) -> &[AtomicU64] {
        &self.shared.words()[SLOTS_AT + index * SLOT_WORDS..][..SLOT_WORDS]
    }
}

impl AsFd for Journal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.as_fd()
    }
}

/// An access that stands in the journal; dropped when it is answered.
#[derive(Debug)]
pub struct JournalSlot {
    journal: Arc<Journal>,
    index: usize,
}

impl Drop for JournalSlot {
    fn drop(&mut self) {
        self.journal.slot(self.index)[0].store(FREE, Release);
    }
}

/// A thread that must show that it lives; dropped when it ends.
#[derive(Debug)]
pub struct HeartbeatSlot {
    journal: Arc<Journal>,
    index: usize,
}

impl HeartbeatSlot {
    /// Still alive.
    pub fn beat(&self) {
        self.journal.heartbeat_words()[self.index].store(monotonic_ms(), Release);
    }
}

impl Drop for HeartbeatSlot {
    fn drop(&mut self) {
        self.journal.heartbeat_words()[self.index].store(0, Release);
    }
}

/// Milliseconds of the clock that all processes of a host share; never 0.
fn monotonic_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(number: i32, group: u32) -> JournalEntry {
        JournalEntry {
            group: GroupNumber(group),
            number,
            process_id: 77,
            device: u64::MAX,
            inode: 1 << 63,
            access: Access::Range(ByteRange { start: 8192, end: u64::MAX }),
        }
    }

    #[test]
    fn what_is_begun_is_pending_until_it_is_dropped_also_elsewhere() {
        let journal = Arc::new(Journal::create().unwrap());
        let elsewhere = Arc::new(Journal::open(journal.as_fd().try_clone_to_owned().unwrap()).unwrap());
        let cut = JournalEntry { access: Access::Truncation { size_bytes: 0 }, ..entry(5, 2) };
        let (first, _second) = (journal.begin(entry(4, 1)).unwrap(), journal.begin(cut).unwrap());
        assert_eq!(elsewhere.pending(), [entry(4, 1), cut]);
        drop(first);
        assert_eq!(elsewhere.pending(), [cut]);
        let taken = elsewhere.take_over(GroupNumber(2));
        assert_eq!(taken.iter().map(|(entry, _)| *entry).collect::<Vec<_>>(), [cut]);
        assert!(elsewhere.take_over(GroupNumber(1)).is_empty());
        drop(taken);
        assert_eq!(journal.pending(), []);
    }

    #[test]
    fn a_full_journal_says_so_and_has_room_again() {
        let journal = Arc::new(Journal::create().unwrap());
        let mut slots: Vec<_> =
            (0..JOURNAL_SLOTS).map(|number| journal.begin(entry(number as i32, 0)).unwrap()).collect();
        assert!(journal.begin(entry(-1, 0)).is_none());
        slots.remove(JOURNAL_SLOTS / 2);
        let last = journal.begin(entry(-1, 0)).unwrap();
        assert_eq!(journal.pending().iter().filter(|entry| entry.number == -1).count(), 1);
        drop((slots, last));
        assert_eq!(journal.pending(), []);
    }

    /// Killed after each word of it.
    #[test]
    fn an_entry_that_is_half_written_is_none_and_its_slot_is_free_again() {
        let complete = Arc::new(Journal::create().unwrap());
        let _slot = complete.begin(entry(2, 2)).unwrap();
        for written in 0..SLOT_WORDS {
            let journal = Arc::new(Journal::create().unwrap());
            // What it held before is not cleared.
            drop(journal.begin(entry(1, 1)));
            let slot = journal.slot(0);
            slot[0].store(WRITTEN_NOW, Release);
            for (word, complete) in slot[1..].iter().zip(&complete.slot(0)[1..]).take(written) {
                word.store(complete.load(Acquire), Release);
            }
            let successor = Arc::new(Journal::open(journal.as_fd().try_clone_to_owned().unwrap()).unwrap());
            assert_eq!(successor.pending(), [], "{written}");
            successor.clean();
            assert!([1, 2].iter().all(|group| successor.take_over(GroupNumber(*group)).is_empty()), "{written}");
            let again = successor.begin(entry(3, 3)).unwrap();
            assert_eq!((again.index, successor.pending()), (0, vec![entry(3, 3)]), "{written}");
        }
    }

    #[test]
    fn one_heart_that_stands_still_holds_the_heartbeats() {
        let journal = Arc::new(Journal::create().unwrap());
        assert_eq!(journal.heartbeats(), 0);
        let (still, beating) = (journal.heartbeat_slot().unwrap(), journal.heartbeat_slot().unwrap());
        let before = journal.heartbeats();
        assert!(before > 0);
        std::thread::sleep(std::time::Duration::from_millis(5));
        beating.beat();
        assert_eq!(journal.heartbeats(), before);
        still.beat();
        assert!(journal.heartbeats() > before);
        std::mem::forget(still);
        journal.clean();
        assert_eq!(journal.heartbeats(), 0);
    }

    #[test]
    fn other_memory_is_no_journal() {
        let other = SharedWords::create("other", WORDS).unwrap();
        assert!(Journal::open(other.as_fd().try_clone_to_owned().unwrap()).is_err());
        let file = tempfile::tempfile().unwrap();
        assert!(Journal::open(file.into()).is_err());
        let journal = Arc::new(Journal::create().unwrap());
        journal.note_progress();
        let elsewhere = Journal::open(journal.as_fd().try_clone_to_owned().unwrap()).unwrap();
        elsewhere.note_progress();
        elsewhere.note_takeover();
        assert_eq!((journal.progress(), journal.takeovers()), (2, 1));
    }
}
