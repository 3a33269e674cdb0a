//! How long stopping rings wait for requests that wait for another host.
//!
//! A front end stops its rings one after the other, and QEMU's main loop stands meanwhile: they share one deadline.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long all rings of a device wait together when the front end stops them; what is not done then ends with an error.
const ASKED_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 20 });
/// How long they wait when the front end has gone: what is not done then stays marked in flight and is done again.
const LOST_TIMEOUT: Duration = Duration::from_secs(2);
/// A stop that begins later than this after the one before it has a time of its own.
const PAUSE: Duration = Duration::from_secs(5);

/// Why a ring stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The front end asks for the index at which the ring goes on: every request must have its answer then.
    Asked,
    /// The front end has gone. Answers that are kept back, and requests that wait, stay in flight for whoever comes next.
    Lost,
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
    pub(super) fn during<T>(&self, ending: Ending, stop: impl FnOnce(Instant) -> T) -> T {
        let now = Instant::now();
        let before = self.period().filter(|period| now.saturating_duration_since(period.last) < PAUSE);
        let timeout = if ending == Ending::Asked { ASKED_TIMEOUT } else { LOST_TIMEOUT };
        let own = now + timeout;
        let deadline = before.map_or(own, |period| period.deadline.min(own));
        let outcome = stop(deadline);
        *self.period() = Some(Period { deadline, last: Instant::now() });
        outcome
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

    #[test]
    fn b37_stops_one_after_the_other_share_a_deadline_until_a_ring_starts() {
        // Again where this thread was held up: then they are not stops one after the other.
        let told = (0..100).find_map(|_| {
            let (drain, begin) = (Drain::default(), Instant::now());
            let deadline_of = |ending| drain.during(ending, |deadline| deadline);
            let told = (deadline_of(Ending::Asked), deadline_of(Ending::Asked), deadline_of(Ending::Lost));
            drain.forget();
            let later = deadline_of(Ending::Asked);
            (begin.elapsed() < ASKED_TIMEOUT - LOST_TIMEOUT).then_some((told, later))
        });
        let ((first, second, lost), later) = told.expect("this thread is not always held up");
        assert_eq!(second, first);
        assert!(lost < first);
        assert!(later > first);
    }
}
