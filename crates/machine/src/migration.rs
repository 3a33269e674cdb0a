//! A machine that goes to another host: what each side has written down of it.
//!
//! ```text
//!  source                                  destination
//!  migration.json  begun                   arrival.json  begun       standing.json  arriving
//!  standing.json   migrated  ── go ──>     arrival.json  here        standing.json  beginning, running
//!  migration.json  gone     <── runs ──
//! ```
//!
//! The source's `standing.json` decides: before it says *migrated* the machine goes on there, whatever becomes of the
//! rest; from then on it goes on at the destination alone. Who is in doubt asks the source's host.

mod arrival;
mod departure;
mod hosts;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use onecopy_directory::atomic_file;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use arrival::{Arrival, ArrivalState};
pub use departure::{Departure, DepartureState, MigrationResult};
pub use hosts::{ArrivalSecrets, Gone, HostOrder, ReceiveOrder, Unanswered, Verdict, Which, ask, ask_soon, open};

use crate::snapshot_server::ServedSnapshot;
use crate::{MachineError, MachineHome, MachineName};

/// Such a file is a few words.
const BYTES_MAX: u64 = 64 << 10;

/// What the snapshots of a disk begin with that are parts of migrations.
pub(crate) const SNAPSHOT: &str = "migration-";

/// And end with, where they are of its beginning.
const BEGUN: &str = "-begun";

/// Whether a disk's snapshot is a migration's, and no user's.
pub(crate) fn is_snapshot(name: &str) -> bool {
    let numbers = name.strip_prefix(SNAPSHOT).map(|numbers| numbers.strip_suffix(BEGUN).unwrap_or(numbers));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.and_then(|numbers| numbers.split_once('-')).is_some_and(|(time, by)| is_number(time) && is_number(by))
}

/// The disk of a machine that goes to another host, on storage that both may have under the same path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedDisk {
    /// Its directory.
    pub directory: PathBuf,
    /// Its snapshot of the time when the migration began: what memory holds of that need not travel.
    pub begun: String,
    /// Its snapshot of the machine's last instant there, which is yet to be made.
    pub last: String,
    /// The directory outside of which nothing of it is read: for the destination alone to say.
    #[serde(default)]
    pub beneath: PathBuf,
}

impl SharedDisk {
    /// Whether it can be the disk of this machine: another host's word for it.
    pub fn may_be_of(&self, machine: &MachineName) -> bool {
        let name = self.directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_disk = name.split_once('.').map_or(name, |(disk, _)| disk) == "disk";
        let lies_in = self.directory.parent().and_then(Path::file_name);
        let is_machines = lies_in.is_some_and(|directory| directory == machine.as_str());
        let are_snapshots = is_snapshot(&self.last) && self.begun == format!("{}{BEGUN}", self.last);
        is_disk && is_machines && are_snapshots
    }

    /// One of its snapshots, to be served.
    pub(crate) fn snapshot<'a>(&'a self, name: &'a str) -> ServedSnapshot<'a> {
        ServedSnapshot { disk: &self.directory, name: Some(name), only_beneath: Some(&self.beneath) }
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, MachineError> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.map_err(MachineError::file("open", path))?,
    };
    let read = serde_json::from_reader(file.take(BYTES_MAX));
    read.map(Some).map_err(|error| MachineError::file("read", path)(error.into()))
}

/// What a machine goes by from now on, written down.
///
/// # Errors
/// [`MachineError::Directory`].
pub(crate) fn renew_secret(home: &MachineHome) -> Result<String, MachineError> {
    let secret = format!("{:032x}", rand::random::<u128>());
    write(&home.went_by_file(), &secret)?;
    Ok(secret)
}

/// What a machine has come by; none where it was made here, or an earlier build has sent it.
///
/// # Errors
/// [`MachineError::File`].
pub(crate) fn came_by(home: &MachineHome) -> Result<Option<String>, MachineError> {
    read(&home.came_by_file())
}

/// Notes what a machine comes by.
///
/// # Errors
/// [`MachineError::Directory`].
pub(crate) fn note_came_by(home: &MachineHome, secret: &str) -> Result<(), MachineError> {
    write(&home.came_by_file(), &secret)
}

/// Held by who ends a migration of a machine that was given away.
fn alone(home: &MachineHome) -> Result<File, MachineError> {
    let path = home.root().join("migration.lock");
    let lock = File::options().create(true).append(true).mode(0o600).open(&path);
    let lock = lock.and_then(|lock| lock.lock().map(|()| lock));
    lock.map_err(MachineError::file("lock", &path))
}

fn synchronize(home: &MachineHome) -> Result<(), MachineError> {
    let synchronized = File::open(home.root()).and_then(|root| root.sync_all());
    synchronized.map_err(MachineError::file("synchronize", home.root()))
}

fn write(path: &Path, record: &impl Serialize) -> Result<(), MachineError> {
    let text = serde_json::to_vec(record).map_err(|error| MachineError::file("write", path)(error.into()))?;
    Ok(atomic_file::write(path, 0o600, &text)?)
}

impl MachineHome {
    /// What is written down of its going elsewhere.
    pub fn migration_file(&self) -> PathBuf {
        self.root().join("migration.json")
    }

    /// What is written down of its coming here.
    pub fn arrival_file(&self) -> PathBuf {
        self.root().join("arrival.json")
    }

    /// What it went elsewhere by: [`ReceiveOrder::secret`].
    pub(crate) fn went_by_file(&self) -> PathBuf {
        self.root().join("went_by.json")
    }

    /// What it came here by.
    pub(crate) fn came_by_file(&self) -> PathBuf {
        self.root().join("came_by.json")
    }

    /// What is wanted of its protection.
    pub(crate) fn protection_file(&self) -> PathBuf {
        self.root().join("protection.json")
    }

    /// Where the snapshot that this machine's disk comes from is to be had.
    pub(crate) fn source_socket(&self) -> PathBuf {
        self.in_run("source.sock")
    }

    /// Where the snapshot of a disk that has gone by this migration is served.
    pub fn snapshot_socket(&self, token: &str) -> PathBuf {
        // One for each: what serves an earlier one's may live still.
        self.in_run(&format!("snapshot-{}.sock", token.get(..8).unwrap_or_default()))
    }
}
