//! Checks a disk's files.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::engine;
use crate::format::DATA;
use crate::format::header::Header;
use crate::format::load::{self, Loaded};
use crate::format::recent;
use crate::map::difference::entries;
use crate::map::{Entry, State};
use crate::storage::Folder;
use crate::{BLOCK_BYTES, DiskError};

/// Most problems of one kind that are told one by one.
const PROBLEMS_MAX: usize = 20;

/// The outcome of [`Disk::check`](crate::Disk::check).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// What is wrong, one sentence each; nothing when the disk is sound.
    pub problems: Vec<String>,
    /// Blocks that the current content holds itself.
    pub current_blocks: u64,
    /// Places in use by the current content and all snapshots.
    pub used_places: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Journal records after the checkpoint.
    pub journal_records: u64,
    /// Whether the disk was closed in order.
    pub was_closed: bool,
}

impl CheckReport {
    /// Whether nothing is wrong.
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty()
    }
}

pub(crate) fn check(directory: &Path) -> Result<CheckReport, DiskError> {
    let (header, folder) = (Header::read(directory)?, Folder::open(directory)?);
    let mut report = CheckReport::default();
    report.problems.extend(engine::failed(&folder).map(|reason| format!("its storage failed earlier: {reason}")));
    let loaded = load::load(&folder, &header, recent::boot());
    let data = folder.open_file(DATA, false).and_then(|data| data.len());
    match (loaded, data) {
        (Ok(loaded), Ok(data_bytes)) => check_places(&loaded, &header, data_bytes, &mut report),
        (Err(error), _) | (_, Err(error)) => report.problems.push(error.to_string()),
    }
    Ok(report)
}

/// Every place is one block's, and lies within the data file.
fn check_places(loaded: &Loaded, header: &Header, data_bytes: u64, report: &mut CheckReport) {
    if data_bytes < header.size_bytes {
        let size_bytes = header.size_bytes;
        report.problems.push(format!("the data file has {data_bytes} bytes of a disk of {size_bytes}"));
    }
    let mut places = Vec::new();
    let mut place = |entry: Entry| match entry.state() {
        State::Data(place) => {
            places.push(place);
            1
        }
        _ => 0,
    };
    let mut current_blocks = 0;
    entries(&loaded.current, |_, entry| current_blocks += place(entry));
    for entry in engine::dead_lists(&loaded.current, &loaded.snapshots).iter().flatten() {
        place(*entry);
    }
    places.sort_unstable();
    for pair in places.windows(2).filter(|pair| pair[0] == pair[1]).take(PROBLEMS_MAX) {
        report.problems.push(format!("place {} belongs to two blocks", pair[0]));
    }
    let is_outside = |place: &&u32| (u64::from(**place) + 1) * BLOCK_BYTES > data_bytes;
    for place in places.iter().filter(is_outside).take(PROBLEMS_MAX) {
        report.problems.push(format!("place {place} lies behind the data file's {data_bytes} bytes"));
    }
    report.current_blocks = current_blocks;
    report.used_places = places.len() as u64;
    report.snapshots = loaded.snapshots.len() as u64;
    report.journal_records = loaded.journal_records;
    report.was_closed = loaded.was_closed;
}
