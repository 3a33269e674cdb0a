//! How long stopping rings wait for requests that wait for another host.
//!
//! A front end stops its rings one after the other, and QEMU's main loop stands meanwhile: they share one deadline.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long all rings of a device wait together when the front end stops them. What is not done then stays marked in
/// flight. Where nobody would find it there, what waits for another host ends with an error, and what this host's disk
/// does is waited for.
const REQUESTED_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 20 });
/// How long they wait when the front end has gone: what is not done then stays marked in flight and is done again.
const DISCONNECTED_TIMEOUT: Duration = Duration::from_secs(2);
/// A stop that begins later than this after the one before it has a time of its own. A test that is held up makes no
/// pause.
const PAUSE: Duration = Duration::from_secs(if cfg!(test) { 600 } else { 5 });

/// Why a ring stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopReason {
    /// The front end asks for the index at which the ring goes on, and its record of what is in flight stays here: what
    /// waits too long for another host is done by the ring's next life.
    Requested,
    /// The same, and no record comes along, as when the machine moves: every request must have its answer then.
    Migrated,
    /// The front end has gone. Answers that are kept back, and requests that wait, stay in flight for whoever comes
    /// next.
    Disconnected,
}

/// The deadline that stops share.
#[derive(Debug, Default)]
pub(super) struct Drain(Mutex<Option<Period>>);

#[derive(Clone, Copy, Debug)]
struct Period {
    deadline: Instant,
    /// When the last stop in it ended.
    last: Instant,
}

impl Drain {
    /// Stops one ring or more until the deadline of all that stop now.
    pub(super) fn during<T>(&self, reason: StopReason, stop: impl FnOnce(Instant) -> T) -> T {
        let deadline = self.deadline(reason, Instant::now());
        let outcome = stop(deadline);
        *self.period() = Some(Period { deadline, last: Instant::now() });
        outcome
    }

    /// The deadline of a stop that begins at `now`.
    fn deadline(&self, reason: StopReason, now: Instant) -> Instant {
        let before = self.period().filter(|period| now.saturating_duration_since(period.last) < PAUSE);
        let timeout = if reason == StopReason::Disconnected { DISCONNECTED_TIMEOUT } else { REQUESTED_TIMEOUT };
        let own = now + timeout;
        before.map_or(own, |period| period.deadline.min(own))
    }

    /// The deadline of the stop that ended last.
    #[cfg(test)]
    pub(super) fn last_deadline(&self) -> Option<Instant> {
        self.period().map(|period| period.deadline)
    }

    /// A ring started: the next stop is not one of those before.
    pub(super) fn forget(&self) {
        *self.period() = None;
    }

    fn period(&self) -> std::sync::MutexGuard<'_, Option<Period>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec: D5
    #[test]
    fn b37_stops_one_after_the_other_share_a_deadline_until_a_ring_starts() {
        let (drain, begin) = (Drain::default(), Instant::now());
        let stop = |reason, begun| {
            let deadline = drain.deadline(reason, begun);
            *drain.period() = Some(Period { deadline, last: begun });
            deadline
        };
        let moment = Duration::from_millis(1);
        let first = stop(StopReason::Requested, begin);
        assert_eq!(first, begin + REQUESTED_TIMEOUT);
        assert_eq!(stop(StopReason::Requested, begin + moment), first);
        // One that has less time than is left takes its own.
        let lost = stop(StopReason::Disconnected, begin + moment);
        assert_eq!(lost, begin + moment + DISCONNECTED_TIMEOUT);
        // Long after the one before it, a stop has a time of its own.
        let later = begin + moment + PAUSE;
        assert_eq!(stop(StopReason::Requested, later), later + REQUESTED_TIMEOUT);
        drain.forget();
        assert_eq!(stop(StopReason::Requested, later + moment), later + moment + REQUESTED_TIMEOUT);
    }

    /// Spec: D5
    #[test]
    fn b37_a_stop_leaves_its_deadline_to_the_next_one() {
        let drain = Drain::default();
        assert_eq!(drain.last_deadline(), None);
        let first = drain.during(StopReason::Requested, |deadline| deadline);
        assert_eq!(drain.during(StopReason::Requested, |deadline| deadline), first);
        assert_eq!(drain.last_deadline(), Some(first));
    }
}
