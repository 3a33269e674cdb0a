//! What the agent tells others.

use serde::{Deserialize, Serialize};

use super::State;
use super::decisions::Logged;
use super::members::{Member, Mode};
use crate::{Bytes, HostPressure, InstanceName, Kind, Level, Observation};

/// Counters since the agent began, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Rounds of observing and deciding.
    pub rounds: u64,
    /// How long the last round took.
    pub last_round_us: u64,
    /// Rounds that a stall of the host began.
    pub stalls: u64,
    /// Targets that servers were told to shrink to.
    pub shrinks: u64,
    /// Bytes of them.
    pub shrunk_bytes: u64,
    /// Targets that servers were told to grow to.
    pub growths: u64,
    /// Bytes of them.
    pub grown_bytes: u64,
    /// Growths that waited for memory to come back.
    pub postponed: u64,
    /// Bytes taken without asking.
    pub taken_bytes: u64,
    /// Decisions that said that something is not possible.
    pub refusals: u64,
    /// Targets that a server did not accept, or memory that could not be taken.
    pub failures: u64,
    /// Questions that a server did not answer.
    pub unanswered: u64,
    /// Rounds without figures of the host: nothing was decided in them.
    pub blind_rounds: u64,
}

/// One server as the agent knows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InstanceStatus {
    /// Its name.
    pub instance: InstanceName,
    /// What it is.
    pub kind: Kind,
    /// How it is driven.
    pub level: Level,
    /// Who says how much it gets.
    #[serde(flatten)]
    pub mode: Mode,
    /// Its last answer; none when it never gave one.
    pub observation: Option<Observation>,
    /// Why it did not answer the last time.
    pub failure: Option<String>,
    /// The last decision for it.
    pub decision: Option<Logged>,
}

/// Everything, at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Whether servers that come are automatic.
    pub automatic: bool,
    /// All pools together may never have more.
    pub budget_bytes: Bytes,
    /// What all pools use or may use now.
    pub committed_bytes: Bytes,
    /// The host, when it could be asked.
    pub pressure: Option<HostPressure>,
    /// The servers, by name.
    pub instances: Vec<InstanceStatus>,
    /// The last decisions, the oldest first.
    pub decisions: Vec<Logged>,
    /// Counters.
    pub figures: Figures,
}

impl Status {
    pub(super) fn of(state: &State) -> Status {
        let instance = |(name, member): (&InstanceName, &Member)| InstanceStatus {
            instance: name.clone(),
            kind: member.engine.kind(),
            level: member.engine.level(),
            mode: member.mode,
            observation: member.observation.clone(),
            failure: member.failure.clone(),
            decision: state.decisions.last_of(name).cloned(),
        };
        Status {
            automatic: state.members.automatic(),
            budget_bytes: state.policy.budget_bytes,
            committed_bytes: state.members.committed_bytes(),
            pressure: state.pressure.clone(),
            instances: state.members.iter().map(instance).collect(),
            decisions: state.decisions.all(),
            figures: state.figures,
        }
    }
}
