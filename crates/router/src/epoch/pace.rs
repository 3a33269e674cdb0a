//! How often gates may be: by the time for which they hold commits.

use std::time::{Duration, Instant};

/// Gates that nobody waits for hold commits for this share of the time at the most, in the long run.
const CLOSED_PERCENT: u32 = 3;

/// A gate that a reader waits for comes after this part of the pause: it waits as a commit would.
const ASKED_PART: u32 = 4;

/// What was not used for so long is not saved up any longer: so much may be closed in a row after a rest.
const SAVED_MAX: Duration = Duration::from_secs(1);

/// Longest pause. A gate that one follower was late for is not paid for in full: that stays out for a while itself, and
/// readers shall not wait for the others.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The time that gates may hold commits.
#[derive(Debug)]
pub(super) struct Pace {
    /// Up to when all closed time is paid for.
    paid_until: Instant,
}

impl Pace {
    /// One that has rested.
    pub(super) fn new(now: Instant) -> Pace {
        Pace { paid_until: now.checked_sub(SAVED_MAX).unwrap_or(now) }
    }

    /// Commits were held for `closed` until `now`.
    pub(super) fn note_closed(&mut self, closed: Duration, now: Instant) {
        let rested = now.checked_sub(SAVED_MAX).unwrap_or(now);
        let price = (closed * 100 / CLOSED_PERCENT).min(PAUSE_MAX);
        // Those that were asked for while an earlier one was not paid for leave no more debts than their own.
        self.paid_until = (self.paid_until.max(rested) + price).min(now + price);
    }

    /// How long the next gate has to wait that nobody asks for.
    pub(super) fn pause(&self, now: Instant) -> Duration {
        self.paid_until.saturating_duration_since(now)
    }

    /// The same for one that somebody asks for, right behind a gate.
    pub(super) fn pause_when_asked(&self, now: Instant) -> Duration {
        self.pause(now) / ASKED_PART
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs gates that close for `closed` each, as often as they may, for ten seconds; gives how many.
    fn gates(closed: Duration, pause: impl Fn(&Pace, Instant) -> Duration) -> u32 {
        let start = Instant::now();
        let (mut pace, mut now, mut gates) = (Pace::new(start), start, 0);
        while now < start + Duration::from_secs(10) {
            now += closed.max(Duration::from_millis(10));
            pace.note_closed(closed, now);
            now += pause(&pace, now);
            gates += 1;
        }
        gates
    }

    /// Whatever a gate takes, all together take their share and what was saved up before. Those that are asked for come
    /// sooner, and are not for nothing either.
    ///
    /// Gates that keep commits waiting and that no reader waits for take 3 % of the time at the most, as long as each
    /// takes up to 30 ms; a follower that is late again and again stays out ever longer.
    ///
    /// Spec: L3
    #[test]
    fn gates_hold_commits_for_their_share_of_the_time() {
        for (milliseconds, at_most) in [(3, 111), (30, 12)] {
            let closed = Duration::from_millis(milliseconds);
            let unasked = gates(closed, Pace::pause);
            assert!(unasked <= at_most && unasked + 1 >= at_most, "{milliseconds} ms: {unasked} gates");
            let asked = gates(closed, Pace::pause_when_asked);
            assert!(asked > unasked && asked < 1000, "{milliseconds} ms: {asked} gates");
        }
        assert_eq!(gates(Duration::ZERO, Pace::pause), 1000, "who holds nobody waits for nothing");
    }

    #[test]
    fn a_rest_is_saved_up_to_a_bound() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let later = start + Duration::from_secs(3600);
        pace.note_closed(Duration::from_millis(30), later);
        assert_eq!(pace.pause(later), Duration::ZERO);
        pace.note_closed(Duration::from_millis(30), later);
        assert_eq!(pace.pause(later), Duration::from_secs(1));
        assert_eq!(pace.pause(later + Duration::from_secs(2)), Duration::ZERO);
        pace.note_closed(Duration::from_secs(1), later);
        assert_eq!(pace.pause(later), PAUSE_MAX, "one that took very long is not made up for");
    }
}
