//! Flushes: what was written becomes durable, in groups.
//!
//! The data file first, then the changes of the map that name it: so the journal never names what is not there. The
//! changes are collected before the data file is synchronized, because each was noted after its data was written.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use super::Core;
use crate::DiskError;
use crate::format::journal::{self, Note};
use crate::storage::{HOLES_BYTES_MAX, StoredFile};

/// The journal's file is kept this much longer than its records, so that a flush works when the file system is full.
pub(super) const RESERVE_BYTES: u64 = 4 << 20;
/// The reserve is filled up when less than this is left.
const RESERVE_BYTES_LOW: u64 = 2 << 20;
const _: () = assert!(RESERVE_BYTES + 2 * journal::BODY_BYTES_MAX as u64 <= HOLES_BYTES_MAX, "a journal can be read");

/// Who writes the journal. Its lock makes commits follow one another.
pub(crate) struct Committer {
    pub(super) journal: StoredFile,
    pub(super) number: u64,
    /// Where the next record goes.
    pub(super) end: u64,
    pub(super) next_sequence: u64,
    /// Up to where the file is reserved.
    pub(super) reserved: u64,
    /// Collected, but not durable yet: also after a commit that failed for want of space.
    pub(super) notes: Vec<Note>,
    /// The births of their runs: after every snapshot before them and not after the next one, which is all that counts
    /// in a file.
    pub(super) epoch: u32,
    pub(super) freed: Vec<u32>,
    /// Flushes that arrived up to this one are done.
    pub(super) covered: u64,
    pub(super) map_bytes: u64,
    /// The lease is given back, or is about to be: the journal is another holder's.
    pub(super) is_over: bool,
}

impl Core {
    pub(super) fn committer(&self) -> MutexGuard<'_, Committer> {
        self.committer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes all writes durable that returned before this was called. Those who call at once share one commit.
    pub(crate) fn flush(&self) -> Result<(), DiskError> {
        let arrival = self.flushes.fetch_add(1, Ordering::SeqCst) + 1;
        let mut committer = self.committer();
        if committer.covered >= arrival {
            return self.check_writable();
        }
        let covers = self.flushes.load(Ordering::SeqCst);
        self.collect(&mut committer);
        self.commit_collected(&mut committer, Vec::new())?;
        committer.covered = covers;
        Ok(())
    }

    /// A commit of our own accord, with notes behind the changes.
    pub(super) fn commit(&self, notes: &[Note]) -> Result<(), DiskError> {
        let mut committer = self.committer();
        self.collect(&mut committer);
        self.commit_collected(&mut committer, notes.to_vec())
    }

    /// Takes what waits for a commit. Freed places first: each was freed after the change that freed it was noted.
    pub(super) fn collect(&self, committer: &mut Committer) {
        committer.freed.append(&mut self.freed());
        committer.epoch = self.current_epoch();
        if self.pending_runs.swap(0, Ordering::Acquire) == 0 {
            return;
        }
        for stripe in &self.stripes {
            committer.notes.append(&mut stripe.map_mut().pending);
        }
    }

    /// Makes data and the collected changes durable, then `notes`, which are given up when this fails.
    pub(super) fn commit_collected(&self, committer: &mut Committer, notes: Vec<Note>) -> Result<(), DiskError> {
        if committer.is_over {
            return Err(DiskError::Closed);
        }
        self.check_writable()?;
        if self.data_changed.swap(false, Ordering::SeqCst) {
            self.synchronizations.fetch_add(1, Ordering::Relaxed);
            self.data.synchronize().map_err(|error| self.fail(error))?;
        }
        let changes = committer.notes.len();
        committer.notes.extend(notes);
        if !committer.notes.is_empty() {
            let written = self.write_journal(committer);
            committer.notes.truncate(if written.is_ok() { 0 } else { changes });
            written?;
        }
        let freed = std::mem::take(&mut committer.freed);
        if !freed.is_empty() {
            self.reclaimable.lock().unwrap_or_else(PoisonError::into_inner).extend(freed);
            self.signal.wake();
        }
        if committer.end > self.journal_bytes_max(committer) {
            self.signal.wake();
        }
        Ok(())
    }

    /// Records follow one another only when the one before is durable: that is how a torn one is told from damage.
    fn write_journal(&self, committer: &mut Committer) -> Result<(), DiskError> {
        let identity = self.header.identity();
        let records = journal::encode(identity, committer.next_sequence, committer.epoch, &committer.notes);
        for record in records {
            self.reserve(committer, record.len() as u64)?;
            // A record that could not be written whole is overwritten by the next try.
            committer.journal.write_at(committer.end, &record)?;
            self.synchronizations.fetch_add(1, Ordering::Relaxed);
            committer.journal.synchronize().map_err(|error| self.fail(error))?;
            committer.end += record.len() as u64;
            committer.next_sequence += 1;
        }
        self.journal_bytes.store(committer.end, Ordering::Relaxed);
        Ok(())
    }

    /// Keeps space ahead of the journal's end. Without it a flush may fail with [`DiskError::Full`], but loses nothing.
    pub(super) fn reserve(&self, committer: &mut Committer, bytes: u64) -> Result<(), DiskError> {
        let needed = committer.end + bytes;
        if committer.reserved >= needed + RESERVE_BYTES_LOW {
            return Ok(());
        }
        for goal in [needed + RESERVE_BYTES, needed] {
            if committer.reserved >= goal {
                break;
            }
            match committer.journal.reserve(committer.reserved, goal - committer.reserved) {
                Ok(()) => {
                    committer.reserved = goal;
                    break;
                }
                // The record alone may have room.
                Err(DiskError::Full) if goal > needed => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(super) fn freed(&self) -> MutexGuard<'_, Vec<u32>> {
        self.freed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Places that may be used again once the changes noted so far are durable.
    pub(super) fn free_after_commit(&self, places: Vec<u32>) {
        if !places.is_empty() {
            self.freed().extend(places);
        }
    }
}
