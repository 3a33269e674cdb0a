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

mod hosts;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use onecopy_directory::atomic_file;
use onecopy_postgres::ServiceUser;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use hosts::{ArrivalSecrets, Gone, HostOrder, ReceiveOrder, Unanswered, Verdict, Which, ask, ask_soon, open};

use crate::snapshot_server::ServedSnapshot;
use crate::{Endpoint, Etcd, Forward, MachineError, MachineHome, MachineName, desired_state};

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

/// What a machine's host has written down of its going: the file `migration.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Departure {
    /// By which both sides know this migration; who has it may have the disk's snapshot.
    pub token: String,
    /// `HOST:PORT` of the other host.
    pub to: String,
    /// This host's keys.
    pub keys: PathBuf,
    /// The disk's directory in the machine's.
    pub disk: String,
    /// The disk's snapshot of its last instant here.
    pub snapshot: String,
    /// How far it is.
    pub state: DepartureState,
    /// The other host has all of the disk, and needs nothing of here.
    pub is_whole: bool,
    /// What came of it.
    pub result: Option<MigrationResult>,
    /// It is protected, and is to go only when it ends here without having been told to.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub protects: bool,
    /// The other host lets it go on by itself, once it has fenced this one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fences: bool,
    /// Members of the etcd that decides on which host it goes on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub etcd: Vec<Endpoint>,
}

/// How far a machine's going is. Whether it was given away is what `standing.json` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DepartureState {
    /// It is under way.
    Begun,
    /// It came to nothing: the machine stays.
    Kept,
    /// It runs on the other host.
    Gone,
}

/// What the host to which a machine has come has written down: the file `arrival.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arrival {
    /// As in [`Departure::token`].
    pub token: String,
    /// `HOST:PORT` of the host that it comes from.
    pub origin: String,
    /// This host's keys.
    pub keys: PathBuf,
    /// How far it is.
    pub state: ArrivalState,
    /// All of the disk is here.
    pub is_whole: bool,
    /// The disk that it has where it comes from, on storage that this host has, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_disk: Option<SharedDisk>,
    /// It runs where it comes from, is protected here, and goes on here when it cannot there any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub protects: bool,
    /// The command that fences the host that it comes from, where that cannot be reached: what ends with status 0 has
    /// seen to it that the machine never runs there again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<String>,
    /// As in [`Departure::etcd`], by this host's names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub etcd: Vec<Endpoint>,
    /// As in [`ProtectionOrder`](crate::keeper::ProtectionOrder).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detection_s: Option<u64>,
    /// As in [`ReceiveOrder`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compares_disk: bool,
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

/// How far a machine's coming is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArrivalState {
    /// It is on its way.
    Begun,
    /// It is let go here.
    Here,
    /// It never will: what is there of it is of no use.
    Discarded,
}

/// What came of a migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationResult {
    /// Rounds, with the last one.
    pub rounds: u32,
    /// Bytes of memory that went over the connection.
    pub bytes: u64,
    /// Pages that were zeros.
    pub zero_pages: u64,
    /// Pages whose content the other host had already.
    #[serde(default)]
    pub known_pages: u64,
    /// Pages that the other host has read from the disk.
    #[serde(default, skip_serializing_if = "is_none")]
    pub disk_pages: u64,
    /// Pages whose content was sent.
    pub data_pages: u64,
    /// From the stop here until it was known here that it runs there, microseconds.
    pub pause_us: u64,
    /// All of it, milliseconds.
    pub total_ms: u64,
    /// Ports of the other host's 127.0.0.1 that lead into it.
    pub forwards: Vec<Forward>,
    /// The other host reads the disk on storage that both have.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shares_disk: bool,
}

/// What an earlier build knows nothing of is left out.
fn is_none(number: &u64) -> bool {
    *number == 0
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

impl Departure {
    /// That of a machine, if it was ever to go.
    ///
    /// # Errors
    /// [`MachineError::File`].
    pub fn of(home: &MachineHome) -> Result<Option<Departure>, MachineError> {
        read(&home.migration_file())
    }

    /// Writes it down, durably.
    ///
    /// # Errors
    /// [`MachineError::Directory`].
    pub fn write(&self, home: &MachineHome) -> Result<(), MachineError> {
        write(&home.migration_file(), self)
    }

    /// By what the other host knows it.
    pub fn which(&self, home: &MachineHome) -> Which {
        Which { name: home.name().clone(), token: self.token.clone() }
    }

    /// The disk as the other host may find it on storage that both have.
    pub(crate) fn shared_disk(&self, home: &MachineHome) -> SharedDisk {
        let directory = home.root().join(&self.disk);
        // As the other host finds it; where that is not known it does not.
        let directory = directory.canonicalize().unwrap_or(directory);
        let (begun, last) = (format!("{}{BEGUN}", self.snapshot), self.snapshot.clone());
        SharedDisk { directory, begun, last, beneath: PathBuf::new() }
    }

    /// What is said to who asks whether it was given away.
    pub fn verdict(home: &MachineHome, token: &str) -> Verdict {
        match Departure::of(home) {
            Ok(Some(departure)) if departure.token == token => match departure.state {
                // It runs there, or did: whatever has become of it here since.
                DepartureState::Gone => Verdict::Given,
                // What was read may not be durable yet.
                _ if desired_state::is_migrated(home) => match synchronize(home) {
                    Ok(()) => Verdict::Given,
                    Err(_) => Verdict::Undecided,
                },
                DepartureState::Kept => Verdict::Kept,
                DepartureState::Begun => Verdict::Undecided,
            },
            // Another one has begun since: it was here.
            Ok(Some(_)) => Verdict::Kept,
            Ok(None) => Verdict::Unknown,
            Err(_) => Verdict::Undecided,
        }
    }

    /// A keeper that finds a migration under way which it does not do itself: that came to nothing, or the machine was
    /// given away.
    ///
    /// # Errors
    /// As [`Departure::of`] and [`Departure::write`].
    pub fn resolve(home: &MachineHome) -> Result<(), MachineError> {
        match Departure::of(home)? {
            Some(departure) if departure.state == DepartureState::Begun && !desired_state::is_migrated(home) => {
                Departure { state: DepartureState::Kept, ..departure }.write(home)
            }
            _ => Ok(()),
        }
    }

    /// Of a machine that does not run: where it was protected and has died, it goes on at the other host; else as
    /// [`Departure::resolve`]. The caller holds the keeper's lock, or is the keeper.
    ///
    /// # Errors
    /// As [`Departure::resolve`].
    pub fn resolve_ended(home: &MachineHome) -> Result<(), MachineError> {
        match Departure::of(home)? {
            Some(known) if known.may_go_on_there() && desired_state::was_to_go_on(home)? => {
                desired_state::note(home, desired_state::DesiredState::Migrated)
            }
            _ => Departure::resolve(home),
        }
    }

    /// The other host may have a copy of this machine that goes on there without being asked here.
    ///
    /// # Errors
    /// As [`Departure::of`].
    pub fn protecting(home: &MachineHome) -> Result<Option<Departure>, MachineError> {
        Ok(Departure::with_copy(home)?.filter(|_| !desired_state::is_migrated(home)))
    }

    /// The same, also of one that was handed over and is not known to run there.
    pub(crate) fn with_copy(home: &MachineHome) -> Result<Option<Departure>, MachineError> {
        Ok(Departure::of(home)?.filter(Departure::may_go_on_there))
    }

    /// It is protected, or copied to be that.
    ///
    /// # Errors
    /// As [`Departure::of`].
    pub fn of_copy(home: &MachineHome) -> Result<Option<Departure>, MachineError> {
        let known = Departure::of(home)?.filter(|known| known.protects && known.state == DepartureState::Begun);
        Ok(known.filter(|_| !desired_state::is_migrated(home)))
    }

    /// Who decides whether the other host's copy goes on, where that may be whole.
    pub fn etcd(&self) -> Option<Etcd> {
        Etcd::of(&self.etcd, &self.keys).filter(|_| self.may_go_on_there())
    }

    /// It is protected by a copy that may be whole.
    fn may_go_on_there(&self) -> bool {
        self.protects && self.is_whole && self.state == DepartureState::Begun
    }

    /// It begins: what was before is no more.
    ///
    /// # Errors
    /// [`MachineError::Moved`]: the machine was given away; [`MachineError::Protection`]: the copy of before may go on;
    /// [`MachineError::Directory`].
    pub fn begin(&self, home: &MachineHome) -> Result<(), MachineError> {
        let _alone = alone(home)?;
        match (desired_state::is_migrated(home), Departure::with_copy(home)?) {
            (true, _) => Err(MachineError::Moved { name: home.name().clone() }),
            (false, Some(known)) => Err(MachineError::Protection {
                machine: home.name().to_string(),
                to: known.to,
                reason: "its copy of before may go on there".to_owned(),
            }),
            (false, None) => self.write(home),
        }
    }

    /// The other host's copy can be whole from now on: it may go on there without being asked here.
    ///
    /// # Errors
    /// [`MachineError::Moved`]: the copy is of no use any more; [`MachineError::Directory`].
    pub fn note_whole_copy(&self, home: &MachineHome) -> Result<(), MachineError> {
        let _alone = alone(home)?;
        let known = Departure::of(home)?.filter(|known| known.token == self.token);
        match known.filter(|known| known.state == DepartureState::Begun && !desired_state::is_migrated(home)) {
            Some(known) => Departure { is_whole: true, fences: self.fences, ..known }.write(home),
            None => Err(MachineError::Moved { name: home.name().clone() }),
        }
    }

    /// The other host's copy is of no use any more: nothing that this machine says from now on waits for it.
    ///
    /// # Errors
    /// [`MachineError::Moved`]: it goes on there; [`MachineError::Protection`]: it is whole, which is not known to who
    /// asks; [`MachineError::Directory`].
    pub fn forget_copy(&self, home: &MachineHome) -> Result<(), MachineError> {
        let _alone = alone(home)?;
        let known = Departure::of(home)?.filter(|known| known.token == self.token);
        match known {
            // Whoever asks for that has not asked etcd.
            Some(known) if known.etcd().is_some() && !self.is_whole => Err(MachineError::Protection {
                machine: home.name().to_string(),
                to: known.to,
                reason: "its copy there has become whole meanwhile, and may go on".to_owned(),
            }),
            Some(known) if known.state == DepartureState::Begun && !desired_state::is_migrated(home) => {
                Departure { state: DepartureState::Kept, ..known }.write(home)
            }
            // What was read may not be durable yet.
            Some(known) if known.state == DepartureState::Kept => synchronize(home),
            _ => Err(MachineError::Moved { name: home.name().clone() }),
        }
    }

    /// The machine has died, or is to: it goes on at the other host alone.
    ///
    /// # Errors
    /// [`MachineError::Moved`]: that host's copy is of no use; [`MachineError::Directory`].
    pub fn hand_over(&self, home: &MachineHome) -> Result<(), MachineError> {
        let _alone = alone(home)?;
        let known = Departure::of(home)?.filter(|known| known.token == self.token);
        match known.is_some_and(|known| known.may_go_on_there()) {
            true => desired_state::note(home, desired_state::DesiredState::Migrated),
            false => Err(MachineError::Moved { name: home.name().clone() }),
        }
    }

    /// It runs there: nobody takes it back any more. Where somebody just has, and this side has not let it go, that is
    /// void.
    ///
    /// # Errors
    /// [`MachineError::Moved`]: another migration has begun since.
    pub fn conclude(self, home: &MachineHome) -> Result<(), MachineError> {
        let _alone = alone(home)?;
        let known = Departure::of(home)?.filter(|known| known.token == self.token);
        let Some(known) = known else { return Err(MachineError::Moved { name: home.name().clone() }) };
        if desired_state::is_taking(home)? {
            desired_state::note(home, desired_state::DesiredState::Migrated)?;
        }
        Departure { state: DepartureState::Gone, is_whole: known.is_whole || self.is_whole, ..self }.write(home)
    }

    /// It was given away and never ran there: it stands for a take again, which whoever looks after it ends. Nothing
    /// happens where it was taken back already.
    ///
    /// # Errors
    /// [`MachineError::Moved`]: it runs there, or its disk has gone on.
    pub fn take_back(&self, home: &MachineHome, user: &ServiceUser) -> Result<(), MachineError> {
        let _alone = alone(home)?;
        let moved = || MachineError::Moved { name: home.name().clone() };
        let known = Departure::of(home)?.filter(|known| known.token == self.token).ok_or_else(moved)?;
        match known.state {
            DepartureState::Gone => Err(moved()),
            DepartureState::Kept if !desired_state::is_migrated(home) => synchronize(home),
            DepartureState::Kept | DepartureState::Begun => {
                desired_state::take_back(home, user)?;
                Departure { state: DepartureState::Kept, ..known }.write(home)
            }
        }
    }

    /// Given away, and not known to run there.
    pub(crate) fn is_in_doubt(home: &MachineHome) -> bool {
        let is_gone =
            || Departure::of(home).is_ok_and(|known| known.is_some_and(|known| known.state == DepartureState::Gone));
        desired_state::is_migrated(home) && !is_gone()
    }

    /// Whether another host still needs the disk's snapshot, or may never go on with the machine, whose only disk this
    /// is then.
    pub fn is_needed(home: &MachineHome) -> bool {
        // What a migration gives away is whole only where it runs; a copy before.
        let runs_there = |known: &Departure| match known.state {
            DepartureState::Gone => true,
            DepartureState::Begun => !known.protects,
            DepartureState::Kept => false,
        };
        let has_all = |known: &Departure| known.is_whole && runs_there(known);
        let is_needed = || Departure::of(home).map_or(true, |known| known.is_some_and(|known| !has_all(&known)));
        desired_state::is_migrated(home) && is_needed()
    }
}

impl Arrival {
    /// That of a machine, if it has come from elsewhere.
    ///
    /// # Errors
    /// [`MachineError::File`].
    pub fn of(home: &MachineHome) -> Result<Option<Arrival>, MachineError> {
        read(&home.arrival_file())
    }

    /// Writes it down, durably.
    ///
    /// # Errors
    /// [`MachineError::Directory`].
    pub fn write(&self, home: &MachineHome) -> Result<(), MachineError> {
        write(&home.arrival_file(), self)
    }

    /// What is there to say of it, durably; none: not decided here.
    ///
    /// # Errors
    /// [`MachineError::File`].
    pub fn outcome(&self, home: &MachineHome) -> Result<Option<Gone>, MachineError> {
        let gone = match self.state {
            ArrivalState::Begun => return Ok(None),
            ArrivalState::Here => Gone::Running(home.configuration()?.forwards),
            ArrivalState::Discarded => Gone::Lost("it was discarded".to_owned()),
        };
        synchronize(home)?;
        Ok(Some(gone))
    }

    /// It never runs here: written down durably. The caller holds the keeper's lock, or is the keeper.
    ///
    /// # Errors
    /// [`MachineError::Moved`]: it is here already.
    pub fn discard(home: &MachineHome, token: &str) -> Result<(), MachineError> {
        match Arrival::of(home)? {
            Some(record) if record.token == token && record.state != ArrivalState::Here => {
                Arrival { state: ArrivalState::Discarded, compares_disk: false, ..record }.write(home)
            }
            _ => Err(MachineError::Moved { name: home.name().clone() }),
        }
    }

    /// Whether the disk that this host has of a machine may be compared with what comes: the machine went from here to
    /// the host that knows this secret, and to no other one; also where it was to come back before, and did not.
    ///
    /// # Errors
    /// As [`Arrival::of`] and [`Departure::of`].
    pub fn may_compare(home: &MachineHome, came_by: Option<&str>) -> Result<bool, MachineError> {
        // It saves bytes only.
        let went_by = read::<String>(&home.went_by_file()).unwrap_or_else(|error| {
            tracing::warn!(%error, "the disk that the machine had here is not compared");
            None
        });
        let is_that = came_by.is_some() && went_by.as_deref() == came_by;
        let has_gone = || {
            let departure = Departure::of(home)?.filter(|known| known.state == DepartureState::Gone);
            Ok::<_, MachineError>(desired_state::is_migrated(home) && departure.is_some())
        };
        Ok(is_that && (has_gone()? || Arrival::is_broken_off(home)))
    }

    /// One that has not arrived, or never will, and of which nothing runs: it can go.
    pub fn is_broken_off(home: &MachineHome) -> bool {
        let arrival = Arrival::of(home).ok().flatten();
        arrival.is_some_and(|arrival| arrival.state != ArrivalState::Here) && home.process_id().is_none()
    }

    /// Who decides whether it goes on here.
    pub fn etcd(&self) -> Option<Etcd> {
        Etcd::of(&self.etcd, &self.keys).filter(|_| self.protects && self.state == ArrivalState::Begun)
    }

    /// By what the source's host knows it.
    pub fn which(&self, home: &MachineHome) -> Which {
        Which { name: home.name().clone(), token: self.token.clone() }
    }
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
