//! What was decided lately, and what came of it.

use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::InstanceName;
use crate::arbiter::Decision;

/// So many decisions are kept; the oldest go first.
pub const DECISIONS_MAX: usize = 256;

/// A decision and what came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Logged {
    /// Counts all decisions since the agent began, repetitions too.
    pub number: u64,
    /// When it was made last, in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// What was decided, with the figures of the last time.
    pub decision: Decision,
    /// The reason in words.
    pub why: String,
    /// What came of it.
    pub outcome: Outcome,
    /// How often the same was decided in a row.
    pub times: u64,
}

/// What came of a decision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub enum Outcome {
    /// The server was told and works towards it.
    Told,
    /// It changes nothing: it says that something is not possible.
    Noted,
    /// The memory for it has not come back yet; it is decided again.
    Postponed,
    /// The server refused or did not answer.
    Failed {
        /// Its words.
        reason: String,
    },
}

/// The last decisions, bounded.
#[derive(Default)]
pub(super) struct Decisions {
    entries: VecDeque<Logged>,
    noted: u64,
}

impl Decisions {
    /// Notes a decision. One that repeats the last of its server is counted there: a server that hangs must not push
    /// out all others.
    pub(super) fn note(&mut self, decision: Decision, outcome: Outcome) {
        let why = decision.reason.to_string();
        self.noted += 1;
        let number = self.noted;
        let at_unix_ms = unix_ms();
        let last = self.entries.iter_mut().rev().find(|entry| entry.decision.instance == decision.instance);
        if let Some(last) = last
            && same(&last.decision, &decision)
            && std::mem::discriminant(&last.outcome) == std::mem::discriminant(&outcome)
        {
            (last.at_unix_ms, last.decision, last.why, last.outcome) = (at_unix_ms, decision, why, outcome);
            (last.number, last.times) = (number, last.times + 1);
            return;
        }
        log(&decision, &why, &outcome);
        if self.entries.len() == DECISIONS_MAX {
            self.entries.pop_front();
        }
        self.entries.push_back(Logged { number, at_unix_ms, decision, why, outcome, times: 1 });
    }

    /// The last one for a server.
    pub(super) fn last_of(&self, instance: &InstanceName) -> Option<&Logged> {
        self.entries.iter().rev().find(|entry| entry.decision.instance == *instance)
    }

    /// How many there were, repetitions too.
    pub(super) fn noted(&self) -> u64 {
        self.noted
    }

    /// All of them, the oldest first.
    pub(super) fn all(&self) -> Vec<Logged> {
        self.entries.iter().cloned().collect()
    }
}

/// Whether two decisions say the same, figures of the reason aside.
fn same(one: &Decision, other: &Decision) -> bool {
    one.to_bytes == other.to_bytes
        && one.from_bytes == other.from_bytes
        && std::mem::discriminant(&one.reason) == std::mem::discriminant(&other.reason)
}

fn log(decision: &Decision, why: &str, outcome: &Outcome) {
    let Decision { instance, from_bytes, to_bytes, .. } = decision;
    match outcome {
        Outcome::Told => tracing::info!(%instance, from_bytes, to_bytes, why, "memory: new target"),
        Outcome::Noted => tracing::warn!(%instance, from_bytes, to_bytes, why, "memory: no change"),
        Outcome::Postponed => tracing::info!(%instance, from_bytes, to_bytes, why, "memory: growth waits for room"),
        Outcome::Failed { reason } => {
            tracing::warn!(%instance, from_bytes, to_bytes, why, reason, "memory: target not accepted");
        }
    }
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arbiter::Reason;

    fn decision(name: &str, to_bytes: u64) -> Decision {
        let reason = Reason::Pinned { target_bytes: to_bytes };
        Decision { instance: name.parse().expect("a name"), from_bytes: 1, to_bytes, reason }
    }

    #[test]
    fn the_log_is_bounded_and_repetitions_are_counted() {
        let mut decisions = Decisions::default();
        for round in 0..10_000_u64 {
            decisions.note(decision("stuck", 5), Outcome::Failed { reason: format!("no answer in round {round}") });
            decisions.note(decision("busy", round), Outcome::Told);
        }
        let all = decisions.all();
        assert_eq!(all.len(), DECISIONS_MAX);
        assert_eq!(all.last().expect("some").decision.to_bytes, 9_999);
        let stuck = all.iter().filter(|entry| entry.decision.instance.as_str() == "stuck").count();
        assert!(stuck <= 2, "{stuck} entries for one repetition");
        decisions.note(decision("stuck", 5), Outcome::Told);
        decisions.note(decision("stuck", 5), Outcome::Told);
        assert_eq!(decisions.last_of(&"stuck".parse().expect("a name")).expect("noted").times, 2);
    }
}
