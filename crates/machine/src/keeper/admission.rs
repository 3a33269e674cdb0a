//! What may be done to the machine now: who looks after it asks here before it does what it was asked.
//!
//! | asked | what is looked at, in this order |
//! |---|---|
//! | pause | that it runs ([`Keeper::running`]), that no take and no stop is under way ([`Keeper::no_take`], `note`) |
//! | resume | the same, and that its guest may run here (`desired_state::check_may_run`, by [`Keeper::let_go`]) |
//! | checkpoint | that it runs, that nobody takes or sends it ([`Keeper::alone`]) or made it stand ([`check_runs`]) |
//! | forget | the same, and that it has not gone elsewhere; that it stands matters where checkpoints are named |
//! | migrate | as a checkpoint, and that its memory can be sent ([`check_sendable`]) |
//! | protect | that it runs, that nobody protects it, that its processors run, that its memory can be sent |
//! | stop | that it is not on its way here ([`Keeper::check_is_here`]); no copy either, as for unprotect |
//! | unprotect | that it is no copy that stands by for another host's machine ([`Keeper::check_no_copy`]) |
//!
//! What else an order needs (a bridge there, a disk that is whole) is looked at where it is done. Until it is its turn
//! a machine may have become another one: what matters then is looked at again.

use onecopy_hypervisor::{Machine, State};

use super::state::Keeper;
use super::work::RATE_MIN;
use crate::migration::{Arrival, ArrivalState};
use crate::{MachineConfiguration, MachineError, MachineHome};

impl Keeper {
    /// The machine, once it runs.
    pub(super) fn running(&self) -> Result<&Machine, MachineError> {
        self.machine.get().ok_or_else(|| MachineError::DoesNotRun { name: self.home.name().clone() })
    }

    /// Waits until no take makes the machine stand; none does as long as what is returned is held.
    pub(super) async fn no_take(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.taking.lock().await
    }

    /// For whoever takes a checkpoint. Nobody waits for that: those whose callers have gone would all be taken.
    pub(super) fn alone(&self) -> Result<tokio::sync::MutexGuard<'_, ()>, MachineError> {
        self.checkpointing.try_lock().map_err(|_| {
            let reason = match self.protecting() {
                Some(_) => format!("it is protected: onecopy vm unprotect {} ends that", self.home.name()),
                None => "another one is being taken".to_owned(),
            };
            MachineError::Checkpoint { machine: self.home.name().to_string(), reason }
        })
    }

    /// The same, for who must.
    pub(super) async fn alone_in_turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.checkpointing.lock().await
    }

    /// Refuses where it is a copy, or on its way here: stopped when it has come it would run nowhere.
    pub(super) fn check_is_here(&self) -> Result<(), MachineError> {
        self.check_no_copy()?;
        match Arrival::of(&self.home) {
            Ok(Some(Arrival { state: ArrivalState::Begun, .. })) => {
                Err(MachineError::Comes { name: self.home.name().clone() })
            }
            _ => Ok(()),
        }
    }

    /// Refuses where it is, or becomes, a copy that protects a machine of another host: only that one ends it.
    pub(super) fn check_no_copy(&self) -> Result<(), MachineError> {
        let is_copy = |record: &Arrival| record.protects && record.state == ArrivalState::Begun;
        match Arrival::of(&self.home) {
            Ok(Some(record)) if is_copy(&record) => Err(MachineError::StandsBy { name: self.home.name().clone() }),
            _ => Ok(()),
        }
    }
}

/// What somebody has made stand stays so.
pub(super) fn check_runs(home: &MachineHome, machine: &Machine) -> Result<(), MachineError> {
    match machine.state() {
        State::Running => Ok(()),
        _ => Err(MachineError::Paused { name: home.name().clone() }),
    }
}

/// Refuses to send a machine to another host of whose memory no epochs can be cut, or slower than it can be.
pub(super) fn check_sendable(
    configuration: &MachineConfiguration,
    bytes_per_second: Option<u64>,
) -> Result<(), String> {
    if !configuration.checkpoints {
        let reason = "its memory is QEMU's own; set `checkpoints = true` in its machine.toml, then stop and start it";
        return Err(reason.to_owned());
    }
    match bytes_per_second.filter(|rate| *rate < RATE_MIN) {
        Some(rate) => Err(format!("a bandwidth of {rate} bytes a second is too low: give {RATE_MIN} at least")),
        None => Ok(()),
    }
}
