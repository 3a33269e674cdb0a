//! Epochs and snapshots: frozen maps of the disk.
//!
//! ```text
//!  writes of epoch 5 | cut: map 5    | writes of epoch 6 | snapshot: map 6    | writes of epoch 7 ...
//! ```
//! A frozen map is the roots of the map as they were. A place that loses its block's current name is needed by the
//! frozen maps from its birth on. It is put on the list of the newest of them; when that one goes, the list's places
//! that an older map needs go to that map's list, and the others are free. Lists of this kind are the dead lists of
//! ZFS.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::{Core, Stripe};
use crate::format::journal::Note;
use crate::format::{SNAPSHOTS_MAX, SnapshotRecord, is_name};
use crate::lease::SnapshotLock;
use crate::map::{Entry, Roots, State};
use crate::{DiskError, Epoch, Snapshot, WriteLog, WriteRecord};

/// Most epochs that are kept at once, snapshots not counted.
const EPOCHS_MAX: usize = 1024;

/// The content of the disk at the end of an epoch. Whoever holds it can read it.
pub(crate) struct FrozenMap {
    number: u32,
    pub(super) roots: Roots,
}

enum Kept {
    AsEpoch,
    AsSnapshot(Snapshot),
    /// Nobody asks for it by name any more, but views may still read it.
    Released,
}

struct Retained {
    map: Arc<FrozenMap>,
    kept: Kept,
    epoch: Epoch,
    /// Places that this map is the last to need: its dead list.
    dead_list: Vec<Entry>,
    records: Option<Records>,
}

/// The record of an epoch's writes, by stripe, until it is taken, and whether there were more.
type Records = (Vec<Vec<WriteRecord>>, bool);

impl Retained {
    /// Nobody asks for it by name any more. Gives its record of writes: it must be [forgotten](Core::forget_records).
    fn let_go(&mut self) -> Option<Records> {
        self.kept = Kept::Released;
        self.records.take()
    }
}

/// All frozen maps that are kept, oldest first.
#[derive(Default)]
pub(crate) struct SnapshotTable {
    list: Vec<Retained>,
}

impl SnapshotTable {
    /// Takes over a snapshot at opening: snapshots come in their order.
    pub(super) fn restore(&mut self, record: SnapshotRecord, roots: Roots, dead_list: Vec<Entry>) {
        self.list.push(Retained {
            map: Arc::new(FrozenMap { number: record.number, roots }),
            epoch: record.snapshot.epoch,
            kept: Kept::AsSnapshot(record.snapshot),
            dead_list,
            records: None,
        });
    }

    pub(super) fn newest_number(&self) -> u32 {
        self.list.last().map_or(0, |last| last.map.number)
    }

    pub(super) fn snapshots(&self) -> impl Iterator<Item = (SnapshotRecord, &Roots)> {
        self.list.iter().filter_map(|retained| match &retained.kept {
            Kept::AsSnapshot(snapshot) => {
                let record = SnapshotRecord { number: retained.map.number, snapshot: snapshot.clone() };
                Some((record, &retained.map.roots))
            }
            _ => None,
        })
    }

    /// Places that only frozen maps need, snapshots, and epochs.
    pub(super) fn counts(&self) -> (u64, usize, usize) {
        let kept = self.list.iter().map(|retained| retained.dead_list.len() as u64).sum();
        (kept, self.snapshots().count(), self.epochs())
    }

    pub(super) fn roots(&self) -> impl Iterator<Item = &Roots> {
        self.list.iter().map(|retained| &retained.map.roots)
    }

    fn epochs(&self) -> usize {
        self.list.iter().filter(|retained| matches!(retained.kept, Kept::AsEpoch)).count()
    }

    /// A frozen map by its epoch's number, whether it is kept as an epoch or as a snapshot.
    fn by_epoch(&mut self, epoch: Epoch) -> Result<&mut Retained, DiskError> {
        let found = self.list.iter_mut().find(|retained| retained.epoch == epoch);
        found
            .filter(|retained| !matches!(retained.kept, Kept::Released))
            .ok_or(DiskError::UnknownEpoch { epoch: epoch.0 })
    }

    fn by_name(&mut self, name: &str) -> Result<&mut Retained, DiskError> {
        let is_it =
            |retained: &&mut Retained| matches!(&retained.kept, Kept::AsSnapshot(snapshot) if snapshot.name == name);
        self.list.iter_mut().find(is_it).ok_or_else(|| DiskError::UnknownSnapshot { name: name.to_owned() })
    }

    /// Removes released maps that nobody reads, or all released ones; gives the places that nobody needs any more.
    fn remove_released(&mut self, even_when_read: bool) -> Vec<u32> {
        let mut free = Vec::new();
        let mut index = self.list.len();
        while let Some(at) = index.checked_sub(1) {
            index = at;
            let retained = &self.list[at];
            let is_read = Arc::strong_count(&retained.map) > 1;
            if !matches!(retained.kept, Kept::Released) || is_read && !even_when_read {
                continue;
            }
            let removed = self.list.remove(at);
            let older = at.checked_sub(1).map(|older| &mut self.list[older]);
            let older_number = older.as_ref().map_or(0, |older| older.map.number);
            let (needed, unneeded): (Vec<Entry>, Vec<Entry>) =
                removed.dead_list.into_iter().partition(|entry| entry.birth() <= older_number);
            if let Some(older) = older {
                older.dead_list.extend(needed);
            }
            free.extend(unneeded.into_iter().filter_map(place_of));
        }
        free
    }
}

fn place_of(entry: Entry) -> Option<u32> {
    match entry.state() {
        State::Data(place) => Some(place),
        _ => None,
    }
}

impl Core {
    pub(super) fn snapshot_table(&self) -> MutexGuard<'_, SnapshotTable> {
        self.snapshots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The public number of an epoch: no two openings of a disk have one in common.
    pub(crate) fn public_epoch(&self, number: u32) -> Epoch {
        Epoch(self.generation << 32 | u64::from(number))
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.public_epoch(self.current_epoch())
    }

    /// Ends the epoch and freezes the map. Waits for writes that are at work; `within` runs while none is.
    fn end_epoch<T>(&self, snapshot: Option<&str>, within: impl FnOnce() -> T) -> Result<(Epoch, T), DiskError> {
        let mut working: Vec<_> = self.stripes.iter().map(Stripe::alone).collect();
        let mut table = self.snapshot_table();
        let number = self.current_epoch();
        if snapshot.is_none() && table.epochs() >= EPOCHS_MAX || number >= u32::MAX - 1 {
            return Err(DiskError::TooManyEpochs { retained: table.epochs() });
        }
        let epoch = self.public_epoch(number);
        let kept = snapshot.map_or(Kept::AsEpoch, |name| {
            Kept::AsSnapshot(Snapshot { name: name.to_owned(), epoch, created_unix_ms: now_unix_ms() })
        });
        let roots = Roots(self.stripes.iter().map(|stripe| stripe.map().tree.clone()).collect());
        let records = self.record_writes.then(|| {
            let records = working.iter_mut().map(|records| std::mem::take(&mut **records)).collect();
            (records, self.overflowed.swap(false, Ordering::Relaxed))
        });
        let map = Arc::new(FrozenMap { number, roots });
        table.list.push(Retained { map, kept, epoch, dead_list: Vec::new(), records });
        let outcome = within();
        self.newest_kept.store(number, Ordering::Relaxed);
        self.epoch.store(number + 1, Ordering::Relaxed);
        Ok((epoch, outcome))
    }

    pub(crate) fn cut(&self) -> Result<Epoch, DiskError> {
        self.check_open()?;
        self.end_epoch(None, || ()).map(|(epoch, ())| epoch)
    }

    pub(crate) fn release(&self, epoch: Epoch) -> Result<(), DiskError> {
        self.check_open()?;
        let mut table = self.snapshot_table();
        let retained = table.by_epoch(epoch)?;
        if !matches!(retained.kept, Kept::AsEpoch) {
            return Err(DiskError::UnknownEpoch { epoch: epoch.0 });
        }
        let records = retained.let_go();
        drop(table);
        self.forget_records(records.as_ref());
        self.signal.wake();
        Ok(())
    }

    pub(crate) fn release_through(&self, last: Epoch) -> Result<usize, DiskError> {
        self.check_open()?;
        let mut table = self.snapshot_table();
        let ended = |retained: &&mut Retained| matches!(retained.kept, Kept::AsEpoch) && retained.epoch <= last;
        let records: Vec<Option<Records>> = table.list.iter_mut().filter(ended).map(Retained::let_go).collect();
        drop(table);
        records.iter().for_each(|records| self.forget_records(records.as_ref()));
        self.signal.wake();
        Ok(records.len())
    }

    fn forget_records(&self, records: Option<&Records>) {
        let count = records.map_or(0, |(records, _)| records.iter().map(Vec::len).sum());
        self.recorded.fetch_sub(count, Ordering::Relaxed);
    }

    pub(crate) fn take_write_log(&self, epoch: Epoch) -> Option<WriteLog> {
        let records = self.snapshot_table().by_epoch(epoch).ok()?.records.take()?;
        self.forget_records(Some(&records));
        let (records, overflowed) = records;
        Some(WriteLog { records: records.into_iter().flatten().collect(), overflowed })
    }

    pub(crate) fn map_of_epoch(&self, epoch: Epoch) -> Result<Arc<FrozenMap>, DiskError> {
        Ok(self.snapshot_table().by_epoch(epoch)?.map.clone())
    }

    pub(crate) fn map_of_snapshot(&self, name: &str) -> Result<Arc<FrozenMap>, DiskError> {
        Ok(self.snapshot_table().by_name(name)?.map.clone())
    }

    /// A snapshot: a cut that the journal tells of.
    pub(crate) fn snapshot(&self, name: &str) -> Result<Snapshot, DiskError> {
        self.check_open()?;
        if !is_name(name) {
            return Err(DiskError::SnapshotName { name: name.to_owned() });
        }
        self.check_writable()?;
        let mut committer = self.committer();
        {
            let mut table = self.snapshot_table();
            if table.by_name(name).is_ok() {
                return Err(DiskError::SnapshotExists { name: name.to_owned() });
            }
            if table.snapshots().count() >= SNAPSHOTS_MAX {
                return Err(DiskError::TooManySnapshots { snapshots: SNAPSHOTS_MAX });
            }
        }
        // What waits for a commit is collected within the cut: it belongs to the snapshot, and nothing later does.
        let (epoch, ()) = self.end_epoch(Some(name), || self.collect(&mut committer))?;
        let (record, snapshot) = {
            let mut table = self.snapshot_table();
            let retained = table.by_name(name)?;
            let Kept::AsSnapshot(snapshot) = &retained.kept else {
                unreachable!("found as a snapshot");
            };
            let record = SnapshotRecord { number: retained.map.number, snapshot: snapshot.clone() };
            (record, snapshot.clone())
        };
        let committed = self.commit_collected(&mut committer, vec![Note::Taken(record)]);
        if let Err(error) = committed {
            let records = self.snapshot_table().by_epoch(epoch)?.let_go();
            self.forget_records(records.as_ref());
            return Err(error);
        }
        Ok(snapshot)
    }

    pub(crate) fn snapshots(&self) -> Vec<Snapshot> {
        self.snapshot_table().snapshots().map(|(record, _)| record.snapshot).collect()
    }

    /// Forgets a snapshot; its space is freed in the background.
    pub(crate) fn delete_snapshot(&self, name: &str) -> Result<(), DiskError> {
        self.check_open()?;
        self.check_writable()?;
        let mut committer = self.committer();
        let number = self.snapshot_table().by_name(name)?.map.number;
        let unused = SnapshotLock::exclusive(&self.folder.path_of(""), name, number)?;
        self.collect(&mut committer);
        self.commit_collected(&mut committer, vec![Note::Deleted { number }])?;
        let records = self.snapshot_table().by_name(name)?.let_go();
        self.forget_records(records.as_ref());
        // Before the committer goes: with it the lease may go.
        unused.remove();
        drop(committer);
        self.signal.wake();
        Ok(())
    }

    /// Blocks that a map names no more: kept for the frozen maps that need them, else freed by the next commit.
    pub(super) fn retire(&self, replaced: &[Entry]) {
        if replaced.is_empty() {
            return;
        }
        let mut free = Vec::new();
        {
            let mut table = self.snapshot_table();
            let newest = table.newest_number();
            for entry in replaced {
                match table.list.last_mut() {
                    Some(last) if entry.birth() <= newest => last.dead_list.push(*entry),
                    _ => free.extend(place_of(*entry)),
                }
            }
        }
        self.free_after_commit(free);
    }

    /// Lets go of released maps; `even_when_read` when the disk closes and views have ended.
    pub(super) fn remove_released(&self, even_when_read: bool) {
        let free = {
            let mut table = self.snapshot_table();
            let free = table.remove_released(even_when_read);
            self.newest_kept.store(table.newest_number(), Ordering::Relaxed);
            free
        };
        self.free_after_commit(free);
    }

    /// At the disk's end no epoch is needed any more.
    pub(super) fn release_all_epochs(&self) {
        let mut table = self.snapshot_table();
        for retained in &mut table.list {
            if matches!(retained.kept, Kept::AsEpoch) {
                self.forget_records(retained.let_go().as_ref());
            }
        }
    }

    /// Places that nobody needs, but that are not free yet.
    pub(super) fn unneeded(&self) -> u64 {
        let reclaimable = self.reclaimable.lock().unwrap_or_else(PoisonError::into_inner).len();
        (self.freed().len() + reclaimable) as u64
    }
}

fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
