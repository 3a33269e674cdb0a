//! What a machine's host has written down of its going to another one.

use std::path::PathBuf;

use onecopy_postgres::ServiceUser;
use serde::{Deserialize, Serialize};

use super::hosts::{Verdict, Which};
use super::{BEGUN, SharedDisk, alone, read, synchronize, write};
use crate::{Endpoint, Etcd, Forward, MachineError, MachineHome, desired_state};

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
