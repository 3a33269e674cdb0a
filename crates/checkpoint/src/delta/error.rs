//! What can go wrong with an epoch that travels.

use std::io;

use super::HeldEpoch;
use crate::take::Cause;

/// Why an epoch was not encoded or decoded. It does not count; what the other side held before, it holds.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeltaError {
    /// The bytes are no epoch of this machine.
    #[error("the other host sent no epoch of this machine: {what}; the connection is given up")]
    Malformed {
        /// What is wrong with them.
        what: String,
    },
    /// An epoch of other changes than those since what is held.
    #[error("changes since {since:?} have come, and {held:?} is held: agree anew what is held")]
    Order {
        /// The epoch that it stands on.
        since: HeldEpoch,
        /// The one that is held.
        held: HeldEpoch,
    },
    /// What was sent again is not what it is said to be.
    #[error("of epoch {epoch} {pieces} pieces differ still after they were sent as they are")]
    StillDifferent {
        /// Its number.
        epoch: u64,
        /// How many.
        pieces: usize,
    },
    /// An epoch that cannot travel as it was given.
    #[error("epoch {epoch} cannot travel: {what}")]
    Epoch {
        /// Its number.
        epoch: u64,
        /// Why.
        what: String,
    },
    /// This host's machine cannot be read or written.
    #[error("cannot {action} of the machine: {cause}")]
    Machine {
        /// What was tried, as in "read a page".
        action: &'static str,
        /// Why it failed.
        cause: Cause,
    },
    /// The connection.
    #[error("the connection to the other host failed: {0}")]
    Connection(#[from] io::Error),
}

impl DeltaError {
    pub(super) fn malformed(what: impl Into<String>) -> DeltaError {
        DeltaError::Malformed { what: what.into() }
    }

    /// The error of one call, with what it was for.
    pub(super) fn machine(action: &'static str) -> impl FnOnce(Cause) -> DeltaError {
        move |cause| DeltaError::Machine { action, cause }
    }
}
