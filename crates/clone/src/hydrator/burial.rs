//! Removing what cannot become whole: after a hydrator that could not go on, or one that was killed together with its keeper.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use onecopy_postgres::ConnectionParameters;
use serde::{Deserialize, Serialize};

use super::ending::{self, Remains};
use super::record::Record;
use crate::CloneError;
use crate::service::Rendezvous;
use crate::target::{Marker, Owner, remove_unmarked};

/// More than a list of thousands of paths takes.
const TARGETS_BYTES_MAX: u64 = 8 << 20;

/// A directory that is not whole, in the list of the service's directory, which root alone can read.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Unfinished {
    /// The directory.
    pub target: PathBuf,
    /// Where its tablespaces are or will be; none in a list of an older program, and for a prepared directory, whose marker tells.
    #[serde(default)]
    pub tablespaces: Option<PathBuf>,
    /// How its source is reached, with the password that its marker lacks; none for a prepared directory, which has no slot.
    pub source: Option<ConnectionParameters>,
    /// The slot that is kept for it, for the time before the directory tells; none if there is none, or if it is on another host.
    #[serde(default)]
    pub slot: Option<String>,
}

/// Removes clones whose plans are known, with servers and slots.
///
/// # Errors
/// The first that could not be removed; the others are.
pub async fn bury_records(rendezvous: &Rendezvous, records: Vec<Record>) -> Result<(), CloneError> {
    let mut outcome = Ok(());
    for record in records {
        let plan = record.plan;
        tracing::error!(target = %plan.target.display(), "a clone that cannot become whole is removed");
        let removed = ending::remove(Remains::of(&plan, rendezvous), None).await;
        ending::drop_slot(&plan.source.connection, &plan.slot).await;
        outcome = outcome.and(removed);
    }
    outcome
}

/// Removes what the list in the service's directory names, but these: only directories with a marker of this very service, and those that
/// its end left without anything in them.
///
/// # Errors
/// The first that could not be removed; the others are.
pub async fn bury_targets(rendezvous: &Rendezvous, but: &[PathBuf]) -> Result<(), CloneError> {
    let mut outcome = Ok(());
    for unfinished in read_targets(rendezvous) {
        if !but.contains(&unfinished.target) {
            let buried = bury_target(rendezvous, unfinished).await;
            outcome = outcome.and(buried);
        }
    }
    outcome
}

async fn bury_target(rendezvous: &Rendezvous, unfinished: Unfinished) -> Result<(), CloneError> {
    let Unfinished { target, tablespaces, source, slot } = unfinished;
    let (removed, slot) = match (Marker::owner(&target, rendezvous.directory())?, Marker::read(&target)?) {
        (Owner::Service, Some(marker)) => {
            tracing::error!(target = %target.display(), "a clone that was left behind is removed");
            let Marker { user_name, service_directory, slot, source: told, .. } = marker;
            let tablespaces = tablespaces.unwrap_or(marker.tablespaces);
            let remains = Remains { directory: target, tablespaces, user_name, service_directory };
            (ending::remove(remains, None).await, slot.map(|slot| (source.unwrap_or(told), slot)))
        }
        // Its slot is made while its directory is, and dropped after that has gone.
        (Owner::Nobody, _) => (remove_unmarked(&target), source.zip(slot)),
        _ => return Ok(()),
    };
    if let Some((source, slot)) = slot {
        ending::drop_slot(&source, &slot).await;
    }
    removed
}

/// Writes the list; that it cannot be written is only logged: it serves a case that two kills must come together for.
pub fn write_targets(rendezvous: &Rendezvous, targets: &[Unfinished]) {
    let path = rendezvous.targets();
    let new = path.with_extension("new");
    let write = || {
        let mut file = fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec(targets)?)?;
        fs::rename(&new, &path)
    };
    if let Err(error) = write() {
        tracing::warn!(path = %path.display(), %error, "the list of clones is not written");
    }
}

fn read_targets(rendezvous: &Rendezvous) -> Vec<Unfinished> {
    use std::io::Read;
    let mut text = Vec::new();
    let read =
        fs::File::open(rendezvous.targets()).and_then(|file| file.take(TARGETS_BYTES_MAX).read_to_end(&mut text));
    match read {
        Ok(_) => serde_json::from_slice(&text).unwrap_or_else(|error| {
            tracing::warn!(%error, "the list of clones cannot be read");
            Vec::new()
        }),
        Err(_) => Vec::new(),
    }
}
