//! Checkpoints: the whole map in a new file, so that the journal can begin anew.
//!
//! Under the committer's lock the roots are kept and journal `N + 1` is begun, under one lock. Then `map.N+1` is
//! written while requests and flushes go on, and at last `map.N` and `journal.N` are removed. A crash in between leaves
//! `map.N` and both journals, which say the same.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use super::commit::{Committer, RESERVE_BYTES};
use super::{Core, Recent};
use crate::DiskError;
use crate::format::checkpoint::Checkpoint;
use crate::format::journal;
use crate::format::load::{journal_name, map_name, numbers, recent_name};
use crate::format::recent;
use crate::map::Roots;
use crate::storage::{Folder, StoredFile};

/// The journal may always grow to this.
const JOURNAL_BYTES_MIN: u64 = 16 << 20;
/// At a close, a journal longer than this is replaced by a checkpoint: the next opening is quick.
pub(super) const JOURNAL_BYTES_AT_CLOSE: u64 = 1 << 20;

/// A checkpoint is due when the file for a successor is longer than this.
pub(super) const RECENT_BYTES_MAX: u64 = 64 << 20;

/// An empty file for what a successor must be told.
pub(super) fn begin_recent(folder: &Folder, identity: u64, number: u64) -> Result<Recent, DiskError> {
    let file = folder.create_file(&recent_name(number))?;
    let head = recent::head(identity, number, recent::boot());
    file.write_at(0, &head)?;
    Ok(Recent { file, number, end: AtomicU64::new(head.len() as u64) })
}

impl Core {
    /// The journal's bound: a share of the map's size, so that what checkpoints write stays in proportion.
    pub(super) fn journal_bytes_max(&self, committer: &Committer) -> u64 {
        JOURNAL_BYTES_MIN.max(committer.map_bytes / 2)
    }

    /// Writes a checkpoint; one at a time. One that fails, for want of space as a rule, is kept and written by the next
    /// try: so tries do not leave a journal each.
    pub(crate) fn checkpoint(&self) -> Result<(), DiskError> {
        let mut begun = self.checkpointing.lock().unwrap_or_else(PoisonError::into_inner);
        let checkpoint = match begun.take() {
            Some(checkpoint) => checkpoint,
            None => self.begin_journal(false)?,
        };
        match self.write_map(&checkpoint) {
            Ok(map_bytes) => self.committer().map_bytes = map_bytes,
            Err(error) => {
                *begun = Some(checkpoint);
                return Err(error);
            }
        }
        self.checkpoints.fetch_add(1, Ordering::Relaxed);
        self.remove_older(checkpoint.number)
    }

    /// Writes the map's file, durable under its name when this returns; gives its length. What it wrote before it
    /// failed is removed: it may have filled the file system.
    fn write_map(&self, checkpoint: &Checkpoint) -> Result<u64, DiskError> {
        self.check_writable()?;
        let (name, new) = (map_name(checkpoint.number), format!("{}.new", map_name(checkpoint.number)));
        let written = self.folder.create_file(&new).and_then(|file| {
            let map_bytes = checkpoint.write(self.identity, &file)?;
            self.folder.rename(&new, &name)?;
            Ok(map_bytes)
        });
        if written.is_err()
            && let Err(error) = self.folder.remove(&new)
        {
            tracing::warn!(%error, "an unfinished checkpoint stays until the disk is opened again");
        }
        let map_bytes = written?;
        self.folder.synchronize().map_err(|error| self.fail(error))?;
        Ok(map_bytes)
    }

    /// Ends the journal with all that waits for a commit, begins the next one, and keeps the map as it is then. Without
    /// room for the space that is kept ahead of a journal's end the old one goes on, unless the new one is needed.
    pub(super) fn begin_journal(&self, is_needed: bool) -> Result<Checkpoint, DiskError> {
        let mut committer = self.committer();
        if committer.is_over {
            return Err(DiskError::Closed);
        }
        self.check_writable()?;
        let number = committer.number + 1;
        let recent = self.new_recent(number)?;
        let mut checkpoint = {
            // No request is in the middle: what the roots say is what was collected, and no more.
            let _working: Vec<_> = self.stripes.iter().map(super::Stripe::alone).collect();
            let table = self.snapshot_table();
            self.collect(&mut committer);
            if let Some(recent) = recent {
                *self.recent.write().unwrap_or_else(PoisonError::into_inner) = recent;
            }
            Checkpoint {
                number,
                epoch: self.current_epoch(),
                next_sequence: 0,
                blocks: self.header.blocks(),
                current: Roots(self.stripes.iter().map(|stripe| stripe.map().tree.clone()).collect()),
                snapshots: table.snapshots().map(|(record, roots)| (record, roots.clone())).collect(),
            }
        };
        self.commit_collected(&mut committer, Vec::new())?;
        checkpoint.next_sequence = committer.next_sequence;
        // It gets its name when it has its head: a journal is whole or not there.
        let (name, new) = (journal_name(number), format!("{}.new", journal_name(number)));
        let journal = self.folder.create_file(&new)?;
        let head = journal::head(self.identity, number, checkpoint.next_sequence);
        let (end, mut reserved) = (head.len() as u64, head.len() as u64 + RESERVE_BYTES);
        let reserve =
            |journal: &StoredFile| journal.write_at(0, &head).and_then(|()| journal.reserve(end, RESERVE_BYTES));
        let has_room = match reserve(&journal) {
            // What the old one keeps ahead may be all that there is.
            Err(DiskError::Full) if committer.journal.set_len(committer.end).is_ok() => {
                committer.reserved = committer.end;
                reserve(&journal)
            }
            tried => tried,
        };
        match has_room {
            Ok(()) => {}
            Err(DiskError::Full) if is_needed => reserved = end,
            Err(error) => {
                if let Err(error) = self.folder.remove(&new) {
                    tracing::warn!(%error, "an unfinished journal stays until the next one is begun");
                }
                // Somebody else may have taken it: then a flush may find none.
                let _ = self.reserve(&mut committer, 0);
                return Err(error);
            }
        }
        journal.synchronize()?;
        self.folder.rename(&new, &name)?;
        // It is there now, and follows the old one's last record: not another record may go into that.
        self.folder.synchronize().map_err(|error| self.fail(error))?;
        let old = std::mem::replace(&mut committer.journal, journal);
        if let Err(error) = old.set_len(committer.end) {
            tracing::warn!(%error, "the reserve of an old journal is kept until it is removed");
        }
        committer.number = number;
        (committer.end, committer.reserved) = (end, reserved);
        Ok(checkpoint)
    }

    /// A file for what a successor must be told, unless an earlier try left one of this number: that is begun earlier
    /// than it must be, which does no harm.
    fn new_recent(&self, number: u64) -> Result<Option<Recent>, DiskError> {
        if self.recent.read().unwrap_or_else(PoisonError::into_inner).number >= number {
            return Ok(None);
        }
        begin_recent(&self.folder, self.identity, number).map(Some)
    }

    /// Removes what a newer checkpoint replaces, and what was never finished.
    fn remove_older(&self, number: u64) -> Result<(), DiskError> {
        let names = self.folder.names()?;
        // Maps first: a journal without its map is nothing, a map without its journal would be an error.
        for old in numbers(&names, "map").into_iter().filter(|old| *old < number) {
            self.folder.remove(&map_name(old))?;
        }
        for old in numbers(&names, "journal").into_iter().filter(|old| *old < number) {
            self.folder.remove(&journal_name(old))?;
        }
        for old in numbers(&names, "recent").into_iter().filter(|old| *old < number) {
            self.folder.remove(&recent_name(old))?;
        }
        // What an interrupted checkpoint left; journals are begun under the committer's lock only, as this is not.
        let is_left = |name: &&String| name.starts_with("map.") && name.ends_with(".new");
        for name in names.iter().filter(is_left) {
            self.folder.remove(name)?;
        }
        Ok(())
    }
}
