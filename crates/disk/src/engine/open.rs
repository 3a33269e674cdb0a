//! Making, opening and closing a disk.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};

use super::commit::Committer;
use super::grace::Grace;
use super::snapshots::SnapshotTable;
use super::{Core, Mapped, Recent, Signal, Stripe, checkpoint};
use crate::format::checkpoint::{Checkpoint, places_max};
use crate::format::header::{self, Header};
use crate::format::journal::{self, Note};
use crate::format::load::{self, Loaded, journal_name, map_name, numbers, recent_name};
use crate::format::recent;
use crate::format::{DATA, SnapshotRecord};
use crate::lease::Lease;
use crate::map::difference::{difference, entries};
use crate::map::{Entry, Roots, STRIPES, State};
use crate::observer::Opened;
use crate::options::OpenOptions;
use crate::space::Space;
use crate::storage::Folder;
use crate::{CreateOptions, DiskError, source, storage};

/// Tells of a failed synchronization; whoever has looked into it removes it.
pub(super) const FAILED: &str = "failed";

/// Longest reason that is read.
const FAILED_BYTES_MAX: u64 = 64 << 10;

/// Why nobody may open the disk, if there is a reason.
pub(crate) fn failed(folder: &Folder) -> Option<String> {
    match storage::read_whole(&folder.path_of(FAILED), FAILED_BYTES_MAX) {
        Ok(reason) => Some(String::from_utf8_lossy(&reason).into_owned()),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => Some(format!("why is not known: {error}")),
    }
}

/// The last record may have been written and not synchronized by a killed process: it must be durable, or be known to
/// be lost, before another one follows it.
fn settle_journal(folder: &Folder) -> Result<(), DiskError> {
    if let Some(number) = numbers(&folder.names()?, "journal").pop() {
        let journal = folder.open_file(&journal_name(number), true)?;
        journal.synchronize()?;
        journal.forget_cached();
    }
    Ok(())
}

/// Makes an empty disk. The header comes last: without it there is no disk.
pub(crate) fn create(directory: &Path, options: &CreateOptions) -> Result<(), DiskError> {
    let header = Header::new(options.size_bytes, options.base.clone(), options.copy_base)?;
    std::fs::create_dir_all(directory).map_err(|error| DiskError::io("create", directory, error))?;
    let folder = Folder::open(directory)?;
    // The directory's own name must last, too.
    Folder::around(directory)?.synchronize()?;
    if folder.names()?.iter().any(|name| name == header::NAME || name == DATA || name.starts_with("map.")) {
        return Err(DiskError::Exists { directory: directory.to_owned() });
    }
    // Before the rest: a base that is not there leaves nothing that would be in the way of the next attempt.
    if let Some(base) = &header.base {
        source::pin(base, directory)?;
    }
    let data = folder.create_file(DATA)?;
    data.set_len(header.size_bytes)?;
    data.synchronize()?;
    let journal = folder.create_file(&journal_name(1))?;
    journal.write_at(0, &journal::head(header.identity(), 1, 1))?;
    journal.synchronize()?;
    let checkpoint = Checkpoint {
        number: 1,
        epoch: 0,
        next_sequence: 1,
        blocks: header.blocks(),
        current: Roots::empty(),
        snapshots: Vec::new(),
    };
    checkpoint.write(header.identity(), &folder.create_file(&map_name(1))?)?;
    folder.write_whole(header::NAME, header.to_text().as_bytes())
}

/// Places that the current map and the snapshots need: those of the current map, and for each snapshot those that it
/// is the last to need.
pub(crate) fn dead_lists(current: &Roots, snapshots: &[(SnapshotRecord, Roots)]) -> Vec<Vec<Entry>> {
    let newer = snapshots.iter().skip(1).map(|(_, roots)| roots).chain([current]);
    let mut lists = Vec::with_capacity(snapshots.len());
    for ((_, older), newer) in snapshots.iter().zip(newer) {
        let mut list = Vec::new();
        difference(older, newer, |_, entry, now| {
            if matches!(entry.state(), State::Data(_)) && entry.state() != now.state() {
                list.push(entry);
            }
        });
        lists.push(list);
    }
    lists
}

/// Claims all places in use; the error tells one that is claimed twice.
fn claim_all(space: &Space, current: &Roots, lists: &[Vec<Entry>]) -> Result<(), String> {
    let mut twice = None;
    let mut claim = |entry: Entry| {
        if let State::Data(place) = entry.state()
            && !space.claim(place)
        {
            twice.get_or_insert(place);
        }
    };
    entries(current, |_, entry| claim(entry));
    lists.iter().flatten().for_each(|entry| claim(*entry));
    twice.map_or(Ok(()), |place| Err(format!("place {place} belongs to two blocks")))
}

impl Core {
    /// Opens a disk: takes its lease and reads its map. Whether a checkpoint is due is told beside it.
    pub(crate) fn open(directory: &Path, options: OpenOptions) -> Result<(Core, bool), DiskError> {
        let header = Header::read(directory)?;
        let folder = Folder::open(directory)?;
        let lease = Lease::take(directory, options.lease_timeout)?;
        if let Some(reason) = failed(&folder) {
            return Err(DiskError::Failed { directory: directory.to_owned(), reason });
        }
        remove_unfinished(&folder)?;
        settle_journal(&folder)?;
        let loaded = load::load(&folder, &header, recent::boot())?;
        let data = folder.open_file(DATA, true)?;
        if data.len()? < loaded.data_bytes_min() {
            return Err(DiskError::format(
                data.path(),
                format!("is shorter than the disk's {} bytes", header.size_bytes),
            ));
        }
        let lists = dead_lists(&loaded.current, &loaded.snapshots);
        let space = Space::new(header.blocks(), places_max(header.blocks()));
        claim_all(&space, &loaded.current, &lists).map_err(|what| DiskError::format(directory, what))?;
        let base = match (options.base, &header.base) {
            (Some(base), _) => Some(base),
            (None, Some(base)) => Some(source::open(base, directory, header.copy_base)?),
            (None, None) => None,
        };
        if let Some(base) = &base {
            base.set_hydration_limit(options.hydration_limit);
        }
        let journal = folder.open_file(&journal_name(loaded.journal_number), true)?;
        let recent = open_recent(&folder, header.identity(), &loaded)?;
        let committer = Committer {
            number: loaded.journal_number,
            end: loaded.journal_end,
            next_sequence: loaded.next_sequence,
            reserved: journal.len()?,
            journal,
            notes: loaded.recent.clone(),
            epoch: loaded.epoch,
            freed: Vec::new(),
            covered: 0,
            map_bytes: loaded.map_bytes,
            is_over: false,
        };
        let (was_closed, is_continuable, epoch) = (loaded.was_closed, loaded.is_continuable, loaded.epoch + 1);
        let (stripes, table) = settle(loaded, lists);
        let newest_kept = table.newest_number();
        let core = Core {
            seed: header.seed(),
            identity: header.identity(),
            generation: lease.generation(),
            folder,
            data,
            base,
            observer: options.observer,
            record_writes: options.record_writes,
            stripes,
            space,
            alike: Mutex::default(),
            grace: Grace::new(STRIPES),
            changes: super::changes::Changes::default(),
            snapshots: Mutex::new(table),
            epoch: AtomicU32::new(epoch),
            newest_kept: AtomicU32::new(newest_kept),
            freed: Mutex::default(),
            reclaimable: Mutex::default(),
            pending_runs: AtomicUsize::new(0),
            // A killed predecessor may have written what nobody synchronized.
            data_changed: AtomicBool::new(!was_closed),
            recorded: AtomicUsize::new(0),
            overflowed: AtomicBool::new(false),
            recent: RwLock::new(recent),
            journal_bytes: AtomicU64::new(committer.end),
            committer: Mutex::new(committer),
            flushes: AtomicU64::new(0),
            synchronizations: AtomicU64::new(0),
            checkpointing: Mutex::default(),
            checkpoints: AtomicU64::new(0),
            failure: OnceLock::new(),
            lease: Mutex::new(Some(lease)),
            was_closed,
            signal: Signal::default(),
            header,
        };
        core.begin(directory, was_closed, is_continuable)?;
        Ok((core, !is_continuable))
    }

    /// Says that the disk is open, in its journal and to the observer.
    fn begin(&self, directory: &Path, was_closed: bool, is_continuable: bool) -> Result<(), DiskError> {
        if !is_continuable {
            // Nothing is written behind a torn record. The background writes the checkpoint.
            let checkpoint = self.begin_journal(true)?;
            *self.checkpointing.lock().unwrap_or_else(PoisonError::into_inner) = Some(checkpoint);
        }
        self.commit(&[Note::Opened { generation: self.generation }])?;
        // Only now: what the successor was told is durable, so no durable map names what is free.
        if !was_closed {
            self.clear_free_space();
        }
        if let Some(observer) = &self.observer {
            observer.opened(&Opened {
                directory,
                uuid: &self.header.uuid,
                seed: self.seed,
                size_bytes: self.header.size_bytes,
                generation: self.generation,
            });
        }
        Ok(())
    }

    /// Lets nobody in any more and waits for those inside; whether this call did it.
    pub(crate) fn shut(&self) -> bool {
        let is_first = self.grace.close();
        self.grace.drain();
        is_first
    }

    /// After the last request: all is durable, and the lease is given back, also when that fails.
    pub(crate) fn finish(&self) -> Result<(), DiskError> {
        let outcome = self.finish_files();
        if outcome.is_ok()
            && let Some(observer) = &self.observer
        {
            observer.closing();
        }
        self.abandon();
        outcome
    }

    fn finish_files(&self) -> Result<(), DiskError> {
        self.release_all_epochs();
        self.remove_released(true);
        self.commit(&[])?;
        self.reclaim();
        let journal_bytes = self.committer().end;
        if journal_bytes > checkpoint::JOURNAL_BYTES_AT_CLOSE
            && let Err(error) = self.checkpoint()
        {
            // The journal says it all.
            tracing::warn!(%error, "a disk is closed without a checkpoint: the next open takes longer");
        }
        self.empty_recent()?;
        // Nobody commits anything behind this note.
        let mut committer = self.committer();
        self.collect(&mut committer);
        self.commit_collected(&mut committer, vec![Note::Closed])?;
        committer.is_over = true;
        Ok(())
    }

    /// All is durable: a successor needs to be told nothing. There are several files after an interrupted checkpoint;
    /// the oldest goes first, because an older one without its newer ones would be believed and be wrong.
    fn empty_recent(&self) -> Result<(), DiskError> {
        let recent = self.recent.write().unwrap_or_else(PoisonError::into_inner);
        let older = numbers(&self.folder.names()?, "recent").into_iter().filter(|number| *number != recent.number);
        for number in older {
            self.folder.remove(&recent_name(number))?;
        }
        recent.file.set_len(recent::HEAD_BYTES as u64)
    }

    /// Gives the lease back, whatever state the files are in. A commit that is at work ends first, and none begins:
    /// what it wrote into the journal would be in the midst of the next holder's.
    pub(crate) fn abandon(&self) {
        self.committer().is_over = true;
        self.lease.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// Removes what a killed process or a power cut left of a map or journal that did not get its name.
fn remove_unfinished(folder: &Folder) -> Result<(), DiskError> {
    let names = folder.names()?;
    let is_unfinished =
        |name: &&String| (name.starts_with("map.") || name.starts_with("journal.")) && name.ends_with(".new");
    names.iter().filter(is_unfinished).try_for_each(|name| folder.remove(name))
}

/// Continues the file for a successor that a predecessor in this boot left, or begins one.
fn open_recent(folder: &Folder, identity: u64, loaded: &Loaded) -> Result<Recent, DiskError> {
    if let Some((number, end)) = loaded.recent_file {
        return Ok(Recent { file: folder.open_file(&recent_name(number), true)?, number, end: AtomicU64::new(end) });
    }
    for other in numbers(&folder.names()?, "recent") {
        folder.remove(&recent_name(other))?;
    }
    checkpoint::begin_recent(folder, identity, loaded.journal_number)
}

/// Puts what was loaded into stripes and the snapshot table.
fn settle(loaded: Loaded, lists: Vec<Vec<Entry>>) -> (Box<[Stripe]>, SnapshotTable) {
    let mut table = SnapshotTable::default();
    for ((record, roots), list) in loaded.snapshots.into_iter().zip(lists) {
        table.restore(record, roots, list);
    }
    let stripe = |tree| Stripe { map: RwLock::new(Mapped { tree, pending: Vec::new() }), ..Stripe::default() };
    (loaded.current.0.into_iter().map(stripe).collect(), table)
}
