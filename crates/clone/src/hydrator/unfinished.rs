//! The list of directories that are not whole, for a service whose keeper dies with it.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use onecopy_postgres::ConnectionParameters;
use serde::{Deserialize, Serialize};

use crate::CloneError;
use crate::plan::Plan;
use crate::service::Rendezvous;

/// More than a list of thousands of paths takes.
const TARGETS_BYTES_MAX: u64 = 8 << 20;

/// A directory that is not whole, in the list of the service's directory, which root alone can read.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Unfinished {
    /// The directory.
    pub target: PathBuf,
    /// Where its tablespaces are or will be; none in a list of an older program: then its marker tells.
    #[serde(default)]
    pub tablespaces: Option<PathBuf>,
    /// How its source is reached, with the password that its marker lacks; none for a prepared directory, which has no
    /// slot.
    pub source: Option<ConnectionParameters>,
    /// The slot that is kept for it; none if there is none, or if it is on another host.
    #[serde(default)]
    pub slot: Option<String>,
}

impl Unfinished {
    /// The clone of this plan; with its slot if it is this host's, and there may be one.
    pub fn of(plan: &Plan, has_slot: bool) -> Unfinished {
        Unfinished {
            target: plan.target.clone(),
            tablespaces: Some(plan.tablespaces.clone()),
            source: Some(plan.source.connection.clone()),
            slot: has_slot.then(|| plan.slot.clone()),
        }
    }
}

/// What is left of a clone, and why it cannot be removed.
pub type Leftover = (Unfinished, CloneError);

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

/// The list that the service before this one has written.
pub fn read_targets(rendezvous: &Rendezvous) -> Vec<Unfinished> {
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
