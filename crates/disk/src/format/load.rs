//! From a directory's files to the map as it was durable last.

use super::SnapshotRecord;
use super::checkpoint::{self, Checkpoint, check_places};
use super::header::Header;
use super::journal::{self, Contents, Note, Record};
use super::recent::{self, Boot};
use crate::map::{Alike, Roots, State};
use crate::storage::Folder;
use crate::{BLOCK_BYTES, DiskError};

/// The map as it was durable last.
pub(crate) struct Loaded {
    pub(crate) current: Roots,
    /// Oldest first.
    pub(crate) snapshots: Vec<(SnapshotRecord, Roots)>,
    /// The newest epoch of any entry or snapshot.
    pub(crate) epoch: u32,
    /// The newest journal's number, where its next record goes, and that record's number.
    pub(crate) journal_number: u64,
    pub(crate) journal_end: u64,
    pub(crate) next_sequence: u64,
    pub(crate) map_bytes: u64,
    pub(crate) journal_records: u64,
    /// The last that happened was that the disk was closed, and nothing is torn.
    pub(crate) was_closed: bool,
    /// There is one journal behind the checkpoint, with nothing torn: it can be continued.
    pub(crate) is_continuable: bool,
    /// What a killed process acknowledged and may not have made durable; it is in `current` already.
    pub(crate) recent: Vec<Note>,
    /// The newest of these files that is of this boot, and where the next change goes in it.
    pub(crate) recent_file: Option<(u64, u64)>,
    alike: Alike,
    blocks: u64,
}

/// The name of a checkpoint.
pub(crate) fn map_name(number: u64) -> String {
    format!("map.{number}")
}

/// The name of a journal.
pub(crate) fn journal_name(number: u64) -> String {
    format!("journal.{number}")
}

/// The name of what goes with a journal for a successor in the same boot.
pub(crate) fn recent_name(number: u64) -> String {
    format!("recent.{number}")
}

/// The numbers of all files `prefix.N`, ascending.
pub(crate) fn numbers(names: &[String], prefix: &str) -> Vec<u64> {
    let number = |name: &String| name.strip_prefix(prefix)?.strip_prefix('.')?.parse().ok();
    let mut numbers: Vec<u64> = names.iter().filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

/// A journal and a file for a successor grow for as long as no checkpoint succeeds: what is stored is the bound.
const GROWING_BYTES_MAX: u64 = u64::MAX;

/// Reads the newest checkpoint and replays all journals since.
pub(crate) fn load(folder: &Folder, header: &Header, boot: Boot) -> Result<Loaded, DiskError> {
    let names = folder.names()?;
    let newest = numbers(&names, "map").pop();
    let number = newest.ok_or_else(|| DiskError::format(&folder.path_of(&map_name(0)), "no checkpoint is there"))?;
    let path = folder.path_of(&map_name(number));
    let bytes = folder.read_whole(&map_name(number), checkpoint::bytes_max(header.blocks()))?;
    let checkpoint = Checkpoint::parse(header.identity(), number, header.blocks(), &bytes)
        .map_err(|what| DiskError::format(&path, what))?;
    let mut loaded = Loaded {
        current: checkpoint.current,
        snapshots: checkpoint.snapshots,
        epoch: checkpoint.epoch,
        journal_number: number,
        journal_end: 0,
        next_sequence: checkpoint.next_sequence,
        map_bytes: bytes.len() as u64,
        journal_records: 0,
        was_closed: false,
        is_continuable: true,
        recent: Vec::new(),
        recent_file: None,
        alike: Alike::default(),
        blocks: header.blocks(),
    };
    for journal in number.. {
        // The checkpoint's own journal is made before it: only later ones may be missing.
        if journal != number && !names.contains(&journal_name(journal)) {
            break;
        }
        let path = folder.path_of(&journal_name(journal));
        let bytes = folder.read_whole(&journal_name(journal), GROWING_BYTES_MAX)?;
        loaded.is_continuable = journal == number;
        let replayed =
            journal::parse(header.identity(), journal, &bytes).and_then(|contents| loaded.replay(journal, contents));
        replayed.map_err(|what| DiskError::format(&path, what))?;
    }
    // One more than journals may be there: it is begun before the journal of its number.
    for recent in numbers(&names, "recent").into_iter().filter(|recent| *recent >= number) {
        let path = folder.path_of(&recent_name(recent));
        let bytes = folder.read_whole(&recent_name(recent), GROWING_BYTES_MAX)?;
        let replayed = loaded.replay_recent(header.identity(), recent, boot, &bytes);
        replayed.map_err(|what| DiskError::format(&path, what))?;
    }
    Ok(loaded)
}

impl Loaded {
    /// These files together have all that changed since some moment before the end of the journals, in order: what the
    /// journals have, too, is done again and comes to the same.
    fn replay_recent(&mut self, identity: u64, number: u64, boot: Boot, bytes: &[u8]) -> Result<(), String> {
        let Some(slots) = recent::parse(identity, number, boot, bytes) else { return Ok(()) };
        self.recent_file = Some((number, bytes.len().next_multiple_of(recent::SLOT_BYTES) as u64));
        // What a snapshot has is in the journal. Done again it would seem to be younger, and not the snapshot's.
        let newest = self.snapshots.last().map_or(0, |(record, _)| record.number);
        for slot in slots.into_iter().filter(|slot| slot.birth > newest) {
            self.set_run(u64::from(slot.block), slot.count, slot.state, slot.birth)?;
            self.epoch = self.epoch.max(slot.birth);
            self.recent.push(Note::Run { block: slot.block, count: slot.count, state: slot.state });
        }
        self.was_closed &= self.recent.is_empty();
        Ok(())
    }

    fn replay(&mut self, number: u64, contents: Contents) -> Result<(), String> {
        if contents.first_sequence != self.next_sequence {
            let expected = self.next_sequence;
            return Err(format!("begins with record {}, not {expected}", contents.first_sequence));
        }
        self.journal_number = number;
        self.journal_end = contents.end;
        self.is_continuable &= !contents.is_torn;
        self.was_closed = false;
        for record in contents.records {
            self.apply(record)?;
        }
        self.was_closed &= !contents.is_torn;
        Ok(())
    }

    fn apply(&mut self, record: Record) -> Result<(), String> {
        self.next_sequence += 1;
        self.journal_records += 1;
        self.epoch = self.epoch.max(record.epoch);
        for note in record.notes {
            self.was_closed = note == Note::Closed;
            match note {
                Note::Run { block, count, state } => self.set_run(u64::from(block), count, state, record.epoch)?,
                Note::Taken(taken) => self.take(taken)?,
                Note::Deleted { number } => {
                    let at = self.snapshots.iter().position(|(record, _)| record.number == number);
                    self.snapshots.remove(at.ok_or_else(|| format!("deletes snapshot {number}, which is not there"))?);
                }
                Note::Opened { .. } | Note::Closed => {}
            }
        }
        Ok(())
    }

    fn set_run(&mut self, block: u64, count: u32, state: State, epoch: u32) -> Result<(), String> {
        if block + u64::from(count) > self.blocks {
            return Err(format!("{count} blocks at {block} of {}", self.blocks));
        }
        if let State::Data(place) = state {
            check_places(place, u64::from(count), self.blocks)?;
        }
        self.current.set_run(block, count, state, epoch, &mut self.alike);
        Ok(())
    }

    fn take(&mut self, taken: SnapshotRecord) -> Result<(), String> {
        if self.snapshots.last().is_some_and(|(last, _)| last.number >= taken.number)
            || self.snapshots.len() >= super::SNAPSHOTS_MAX
        {
            return Err(format!("snapshot {:?} is out of order", taken.snapshot.name));
        }
        self.epoch = self.epoch.max(taken.number);
        self.snapshots.push((taken, self.current.clone()));
        Ok(())
    }

    /// The size of the disk's data file that the map needs at least.
    pub(crate) fn data_bytes_min(&self) -> u64 {
        self.blocks * BLOCK_BYTES
    }
}
