//! What a host has written down of a machine that comes from another one.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::departure::{Departure, DepartureState};
use super::hosts::{Gone, Which};
use super::{SharedDisk, read, synchronize, write};
use crate::{Endpoint, Etcd, MachineError, MachineHome, desired_state};

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
    /// As in [`ReceiveOrder`](super::ReceiveOrder).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compares_disk: bool,
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
