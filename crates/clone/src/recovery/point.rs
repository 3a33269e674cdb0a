//! What an image needs to be recovered: written into a clone's directory after the freeze.

use std::path::{Path, PathBuf};

use onecopy_postgres::Lsn;
use serde::{Deserialize, Serialize};

use crate::CloneError;
use crate::target::CloneLocation;

/// How PostgreSQL is made to accept the image; what [`crate::plan::Recovery::Auto`] has become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// As after a crash.
    Crash,
    /// As from an online backup.
    Backup,
}

/// Where an image is consistent, and the files that tell PostgreSQL. The same for all clones of one freeze.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryPoint {
    /// How.
    pub mode: Mode,
    /// The clone lets nobody in before it has replayed this.
    pub consistent_at: Lsn,
    /// The timeline of that position.
    pub timeline: u32,
    /// Replay starts here.
    pub redo: Lsn,
    /// Major version of the server.
    pub major_version: u32,
    /// The content of `global/pg_control`.
    pub(crate) control: Vec<u8>,
    /// The content of `backup_label`, in backup mode.
    pub(crate) backup_label: Option<String>,
    /// The history of the timeline; none for the first one.
    pub(crate) history: Option<Vec<u8>>,
}

impl RecoveryPoint {
    /// Writes the files into a clone's directory; not durable by itself, see [`crate::target::finish`].
    ///
    /// # Errors
    /// [`CloneError::File`].
    pub fn write(&self, location: &CloneLocation) -> Result<(), CloneError> {
        if let Some(content) = &self.history {
            location.write(&history_path(self.timeline), content, 0o600)?;
        }
        if let Some(label) = &self.backup_label {
            location.write(Path::new("backup_label"), label.as_bytes(), 0o600)?;
        }
        location.write(Path::new("global/pg_control"), &self.control, 0o600)
    }
}

/// Where a data directory has the history of a timeline.
pub(super) fn history_path(timeline: u32) -> PathBuf {
    Path::new("pg_wal").join(format!("{timeline:08X}.history"))
}
