//! How fast content came of late.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// What is older does not count.
const WINDOW: Duration = Duration::from_secs(5);
/// Of what is closer together only the first counts; bounds what is remembered.
const STEP: Duration = Duration::from_millis(100);

/// The filled bytes of the last seconds.
#[derive(Debug, Default)]
pub struct Rate {
    seen: VecDeque<(Instant, u64)>,
}

impl Rate {
    /// Notes that so many bytes are filled now; returns bytes a second.
    pub fn note(&mut self, now: Instant, filled_bytes: u64) -> u64 {
        while self.seen.front().is_some_and(|(then, _)| now.saturating_duration_since(*then) > WINDOW) {
            self.seen.pop_front();
        }
        if self.seen.back().is_none_or(|(then, _)| now.saturating_duration_since(*then) >= STEP) {
            self.seen.push_back((now, filled_bytes));
        }
        let Some((then, before)) = self.seen.front() else { return 0 };
        let passed_ms = u64::try_from(now.saturating_duration_since(*then).as_millis()).unwrap_or(u64::MAX);
        filled_bytes.saturating_sub(*before).saturating_mul(1000).checked_div(passed_ms).unwrap_or(0)
    }
}

/// Seconds for what is missing at this rate, rounded up; none when nothing comes.
pub fn seconds_left(missing_bytes: u64, rate_bytes_per_second: u64) -> Option<u64> {
    (rate_bytes_per_second > 0).then(|| missing_bytes.div_ceil(rate_bytes_per_second))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_seconds_count() {
        let begin = Instant::now();
        let mut rate = Rate::default();
        let mut at = |ms: u64, bytes| rate.note(begin + Duration::from_millis(ms), bytes);
        assert_eq!(at(0, 1_000_000), 0);
        assert_eq!(at(10, 1_500_000), 50_000_000);
        assert_eq!(at(1000, 2_000_000), 1_000_000);
        assert_eq!(at(5000, 6_000_000), 1_000_000);
        assert_eq!(at(60_000, 7_000_000), 0, "a long pause");
        for step in 1..10_000 {
            at(60_000 + step, 7_000_000 + step * 4000);
        }
        assert_eq!(at(70_000, 47_000_000), 4_000_000);
        assert!(rate.seen.len() <= 51, "{}", rate.seen.len());
        assert_eq!((seconds_left(10, 0), seconds_left(10, 3), seconds_left(0, 3)), (None, Some(4), Some(0)));
    }
}
