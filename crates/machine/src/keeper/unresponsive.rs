//! A guest that runs and says nothing: its kernel hangs, or it gets no processor.
//!
//! ```text
//!   Answering ──probe missed──> Doubtful ──PROBES_MISSED_MAX in a row──> Silent
//!       ^                          |                                       |
//!       └──── an answer, or the machine stands and cannot answer ──────────┘
//! ```
//!
//! A probe asks for nothing but an answer, waits behind nothing, and has much time: a guest without hardware help on a
//! busy host takes long.

use std::time::{Duration, SystemTime};

use onecopy_hypervisor::{Agent, Machine, State};

use super::state::Keeper;

/// Probes in a row without an answer that are no accident: one is lost when the guest boots again.
const PROBES_MISSED_MAX: u32 = 3;

/// Pauses between probes that a probe is as long as.
const PAUSES_PER_PROBE: u32 = 6;

/// Probes in a row that a guest did not answer.
#[derive(Debug, Default)]
struct MissedProbes {
    missed: u32,
    /// When the first of the missed ones was sent.
    since_unix_ms: u64,
}

impl MissedProbes {
    /// A probe that was sent then was not answered; since when the guest is unresponsive, once it is.
    fn missed(&mut self, sent_unix_ms: u64) -> Option<u64> {
        if self.missed == 0 {
            self.since_unix_ms = sent_unix_ms;
        }
        self.missed = self.missed.saturating_add(1);
        (self.missed >= PROBES_MISSED_MAX).then_some(self.since_unix_ms)
    }
}

/// Probes the agent until its connection is lost, and tells `keeper` whether the guest is unresponsive: when it has not
/// answered for `patience` while QEMU let it run. `told` is called each time it has become so.
pub(super) async fn watch(machine: &Machine, agent: &Agent, keeper: &Keeper, patience: Duration, told: impl Fn()) {
    let probe = patience / PROBES_MISSED_MAX;
    let mut probes = MissedProbes::default();
    loop {
        let (sent_unix_ms, ran) = (unix_ms(), machine.state() == State::Running);
        let is_answered = tokio::select! {
            answered = agent.probe(probe) => answered.is_ok(),
            () = agent.wait_lost() => return,
        };
        if agent.lost().is_some() {
            return;
        }
        let was_unresponsive = probes.missed >= PROBES_MISSED_MAX;
        let stands = !ran || machine.state() != State::Running;
        let since = if is_answered || stands { None } else { probes.missed(sent_unix_ms) };
        if is_answered || stands {
            probes = MissedProbes::default();
        }
        if since.is_some() != was_unresponsive {
            keeper.set_silent(since);
        }
        match since {
            Some(_) if !was_unresponsive => {
                tracing::warn!(seconds = patience.as_secs(), "the guest runs and does not answer");
                told();
            }
            None if was_unresponsive => tracing::info!(stands, "the guest is not unresponsive any more"),
            _ => {}
        }
        tokio::select! {
            () = tokio::time::sleep(probe / PAUSES_PER_PROBE) => {}
            () = agent.wait_lost() => return,
        }
    }
}

/// Now, in milliseconds since 1970.
pub fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_missed_probe_is_no_silence_and_silence_began_with_the_first() {
        let mut probes = MissedProbes::default();
        assert_eq!([probes.missed(10), probes.missed(20), probes.missed(30)], [None, None, Some(10)]);
        assert_eq!(probes.missed(40), Some(10));
        probes = MissedProbes::default();
        assert_eq!(probes.missed(50), None, "it has answered meanwhile");
    }
}
