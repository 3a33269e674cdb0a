//! What may be done to the machine now: who looks after it asks here before it does what it was asked.
//!
//! | asked | refused, or waited for, here |
//! |---|---|
//! | pause, resume | it does not run ([`Keeper::running`]); a take is waited for ([`Keeper::no_take`]) |
//! | checkpoint, forget | that; somebody takes or sends it ([`Keeper::alone`]), or it stands ([`check_runs`]) |
//! | migrate, protect | that, and memory of which nothing can be sent ([`check_sendable`]) |
//! | stop, unprotect | it is a copy that stands by for another host's machine ([`Keeper::stands_by`]) |
//!
//! Whether its guest may be let go at all, on this host, is written down: `desired_state`.

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

    /// Whether it is, or becomes, a copy that protects a machine of another host.
    pub(super) fn stands_by(&self) -> bool {
        let is_copy = |record: Arrival| record.protects && record.state == ArrivalState::Begun;
        Arrival::of(&self.home).is_ok_and(|record| record.is_some_and(is_copy))
    }

    /// Why nobody but its own host ends such a copy.
    pub(super) fn is_copy(&self) -> String {
        let name = self.home.name();
        format!(
            "it is a copy that stands by for a machine elsewhere; to give it up: onecopy vm unprotect {name} at that \
             machine's host, or here onecopy vm migrate {name} --abandon"
        )
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
