//! What it takes to wait for the next epoch, and what a read on the leader takes instead: both as measured lately.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How much the newest figure counts for: one part in so many.
const WEIGHT: u32 = 16;

/// How fast what a read on the leader takes is forgotten while none is sent there: one part in so many for each that
/// was not, so that it is tried again.
const FORGOTTEN: u32 = 64;

/// Measured times.
#[derive(Debug, Default)]
pub struct WaitTimes(Mutex<Times>);

#[derive(Debug, Default)]
struct Times {
    next_gate: Option<Instant>,
    gate: Duration,
    leader_read: Duration,
}

fn average(known: Duration, newest: Duration) -> Duration {
    if known.is_zero() { newest } else { (known * (WEIGHT - 1) + newest) / WEIGHT }
}

impl WaitTimes {
    fn times(&self) -> std::sync::MutexGuard<'_, Times> {
        self.0.lock().expect("no code panics while it holds this lock")
    }

    /// No gate is tried before this.
    pub(super) fn note_next_gate(&self, at: Instant) {
        self.times().next_gate = Some(at);
    }

    /// A gate has taken this long.
    pub(super) fn note_gate(&self, taken: Duration) {
        let mut times = self.times();
        times.gate = average(times.gate, taken);
    }

    /// A read on the leader has taken this long.
    pub fn note_leader_read(&self, taken: Duration) {
        let mut times = self.times();
        times.leader_read = average(times.leader_read, taken);
    }

    /// Whether the leader will have answered before there is another epoch.
    pub fn leader_is_sooner(&self, now: Instant) -> bool {
        let mut times = self.times();
        let wait = times.next_gate.map_or(Duration::ZERO, |at| at.saturating_duration_since(now)) + times.gate;
        let is_sooner = times.leader_read <= wait;
        if !is_sooner {
            times.leader_read = times.leader_read * (FORGOTTEN - 1) / FORGOTTEN;
        }
        is_sooner
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    #[test]
    fn a_read_goes_where_it_is_answered_first() {
        let (waiting, now) = (WaitTimes::default(), Instant::now());
        assert!(waiting.leader_is_sooner(now), "nothing is known of it");
        waiting.note_gate(2 * MILLISECOND);
        waiting.note_leader_read(5 * MILLISECOND);
        assert!(!waiting.leader_is_sooner(now));
        waiting.note_next_gate(now + 4 * MILLISECOND);
        assert!(waiting.leader_is_sooner(now), "the gate is far away");
        assert!(!waiting.leader_is_sooner(now + 3 * MILLISECOND), "it is near");
    }

    /// A leader that was slow once is tried again.
    #[test]
    fn what_is_not_measured_any_more_is_forgotten() {
        let (waiting, now) = (WaitTimes::default(), Instant::now());
        waiting.note_gate(MILLISECOND);
        waiting.note_leader_read(Duration::from_secs(1));
        let waits = std::iter::repeat_with(|| waiting.leader_is_sooner(now)).take_while(|is_sooner| !is_sooner).count();
        assert!((100..1000).contains(&waits), "{waits}");
    }
}
