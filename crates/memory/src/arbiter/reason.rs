//! What was decided and why, with the figures that led to it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Bytes, InstanceName, size};

/// A new target for one instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// For whom.
    pub instance: InstanceName,
    /// Its target before.
    pub from_bytes: Bytes,
    /// Its target from now on; the same where something was refused.
    pub to_bytes: Bytes,
    /// Why, with figures.
    pub reason: Reason,
}

impl Decision {
    /// Whether anything is to be done; else it only says what cannot be.
    pub fn is_change(&self) -> bool {
        self.from_bytes != self.to_bytes
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = (size::text(self.from_bytes), size::text(self.to_bytes));
        match self.is_change() {
            true => write!(formatter, "{} from {from} to {to}: {}", self.instance, self.reason),
            false => write!(formatter, "{} stays at {to}: {}", self.instance, self.reason),
        }
    }
}

/// Why a target is what it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reason")]
#[non_exhaustive]
pub enum Reason {
    /// Set by hand.
    Pinned {
        /// To this.
        target_bytes: Bytes,
    },
    /// The target was outside what the instance may have.
    OutOfRange {
        /// The least it may have.
        floor_bytes: Bytes,
        /// The most it may have.
        ceiling_bytes: Bytes,
    },
    /// It gives what must be given.
    Pressed {
        /// Who wants memory.
        cause: Cause,
    },
    /// More must be given than the floors allow: what was wanted is not reached.
    FloorsReached {
        /// Who wants memory.
        cause: Cause,
        /// How much was to be given by all.
        wanted_bytes: Bytes,
        /// How much of that could be.
        given_bytes: Bytes,
    },
    /// It gives to another instance that gains more by it.
    Traded {
        /// To whom.
        to: InstanceName,
        /// What the other one saves, reads a second by 1 MiB, times its weight.
        gain_per_mib: f64,
        /// What this one loses, reads a second by 1 MiB, times its weight; at most.
        loss_per_mib: f64,
    },
    /// It gets more, since it saves reads by it and there is room.
    Needed {
        /// Reads a second saved by 1 MiB.
        gain_per_mib: f64,
        /// So much was free for it.
        room_bytes: Bytes,
    },
    /// It should have more, but there is no memory for it now.
    NoRoom {
        /// What it should have.
        wanted_bytes: Bytes,
        /// How much larger it could be.
        room_bytes: Bytes,
    },
    /// It does not answer; its memory is counted and it is not changed.
    Unresponsive {
        /// What is counted for it.
        counted_bytes: Bytes,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Pinned { target_bytes } => write!(formatter, "set by hand to {}", size::text(*target_bytes)),
            Reason::OutOfRange { floor_bytes, ceiling_bytes } => {
                write!(formatter, "it may have {} to {}", size::text(*floor_bytes), size::text(*ceiling_bytes))
            }
            Reason::Pressed { cause } => cause.fmt(formatter),
            Reason::FloorsReached { cause, wanted_bytes, given_bytes } => {
                let (wanted, given) = (size::text(*wanted_bytes), size::text(*given_bytes));
                write!(formatter, "{cause}; of {wanted} that must be given only {given} can: the floors are reached")
            }
            Reason::Traded { to, gain_per_mib, loss_per_mib } => write!(
                formatter,
                "{to} saves {gain_per_mib:.2} reads/s by 1 MiB, here it costs {loss_per_mib:.2} at most"
            ),
            Reason::Needed { gain_per_mib, room_bytes } => {
                write!(
                    formatter,
                    "it saves {gain_per_mib:.2} reads/s by 1 MiB and {} are free",
                    size::text(*room_bytes)
                )
            }
            Reason::NoRoom { wanted_bytes, room_bytes } => {
                let (wanted, room) = (size::text(*wanted_bytes), size::text(*room_bytes));
                write!(formatter, "{wanted} are wanted, but there is room for {room} more only")
            }
            Reason::Unresponsive { counted_bytes } => {
                write!(formatter, "it does not answer and is counted at {}", size::text(*counted_bytes))
            }
        }
    }
}

/// Who wants memory back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "cause")]
#[non_exhaustive]
pub enum Cause {
    /// The targets together are above what all pools may have.
    Budget {
        /// The targets together.
        targets_bytes: Bytes,
        /// What they may have.
        budget_bytes: Bytes,
    },
    /// The host has too little memory available.
    LowMemory {
        /// So much is.
        available_bytes: Bytes,
        /// So much shall be.
        reserve_bytes: Bytes,
    },
    /// A cgroup is near its limit.
    NearLimit {
        /// Which cgroup.
        cgroup: String,
        /// Its limit.
        limit_bytes: Bytes,
        /// What can still be had there without swapping.
        available_bytes: Bytes,
        /// So much shall be.
        reserve_bytes: Bytes,
    },
    /// Tasks wait for memory.
    Stalled {
        /// In which cgroup; none for the whole host.
        cgroup: Option<String>,
        /// Share of the last 10 s in which some task waited, 0 to 100.
        some_avg10: f64,
        /// Share of the last 10 s in which all tasks waited, 0 to 100.
        full_avg10: f64,
    },
    /// Memory goes out to swap.
    Swapping {
        /// Of which cgroup; none for the whole host.
        cgroup: Option<String>,
        /// What is in swap.
        swap_bytes: Bytes,
        /// How much of that is new.
        grown_bytes: Bytes,
    },
}

impl fmt::Display for Cause {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scope =
            |cgroup: &Option<String>| cgroup.as_ref().map_or("the host".to_owned(), |path| format!("cgroup {path}"));
        match self {
            Cause::Budget { targets_bytes, budget_bytes } => {
                let (targets, budget) = (size::text(*targets_bytes), size::text(*budget_bytes));
                write!(formatter, "all targets together are {targets} and may be {budget}")
            }
            Cause::LowMemory { available_bytes, reserve_bytes } => {
                let (available, reserve) = (size::text(*available_bytes), size::text(*reserve_bytes));
                write!(formatter, "the host has {available} available and shall have {reserve}")
            }
            Cause::NearLimit { cgroup, limit_bytes, available_bytes, reserve_bytes } => {
                let (limit, available) = (size::text(*limit_bytes), size::text(*available_bytes));
                let reserve = size::text(*reserve_bytes);
                write!(formatter, "cgroup {cgroup} has {available} left of {limit} and shall have {reserve}")
            }
            Cause::Stalled { cgroup, some_avg10, full_avg10 } => {
                let scope = scope(cgroup);
                write!(formatter, "{scope} waits for memory: {some_avg10:.1} % some, {full_avg10:.1} % all tasks")
            }
            Cause::Swapping { cgroup, swap_bytes, grown_bytes } => {
                let (swap, grown) = (size::text(*swap_bytes), size::text(*grown_bytes));
                write!(formatter, "{} swaps: {swap} are out, {grown} of them new", scope(cgroup))
            }
        }
    }
}
