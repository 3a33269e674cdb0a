//! How fast the background may go.

#[cfg(test)]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// What was not used is saved up for this long.
const SAVED_UP_MS: u64 = 50;
/// Who waits looks this often whether it shall stop.
const STOP_CHECK: Duration = Duration::from_millis(100);

/// A bucket of tokens, one a byte, whose rate may change at any time.
#[derive(Debug)]
pub struct Limiter {
    state: Mutex<State>,
    changed: Condvar,
    /// How often somebody has begun to wait.
    #[cfg(test)]
    waits: AtomicU64,
}

#[derive(Debug)]
struct State {
    bytes_per_second: Option<u64>,
    /// May be negative: a taker takes all it wants at once, and the next one waits.
    tokens: i128,
    /// Up to when tokens were added.
    added: Instant,
}

impl Limiter {
    /// `None`: no limit; 0: nothing passes until that is changed.
    pub fn new(bytes_per_second: Option<u64>) -> Limiter {
        let state = State { bytes_per_second, tokens: 0, added: Instant::now() };
        Limiter {
            state: Mutex::new(state),
            changed: Condvar::new(),
            #[cfg(test)]
            waits: AtomicU64::new(0),
        }
    }

    /// Changes the rate, also for who waits now.
    pub fn set_bytes_per_second(&self, bytes_per_second: Option<u64>) {
        let mut state = self.lock();
        state.add(Instant::now());
        state.bytes_per_second = bytes_per_second;
        self.changed.notify_all();
    }

    /// The present rate.
    pub fn bytes_per_second(&self) -> Option<u64> {
        self.lock().bytes_per_second
    }

    /// Returns when `bytes` may pass, or soon after `stop` is set.
    pub fn take(&self, bytes: u64, stop: &AtomicBool) {
        let mut state = self.lock();
        while !stop.load(Ordering::Acquire) {
            state.add(Instant::now());
            let Some(wait) = state.wait() else {
                state.tokens -= i128::from(bytes);
                return;
            };
            #[cfg(test)]
            self.waits.fetch_add(1, Ordering::SeqCst);
            let waited = self.changed.wait_timeout(state, wait.min(STOP_CHECK));
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    #[cfg(test)]
    pub(super) fn waits(&self) -> u64 {
        self.waits.load(Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl State {
    fn add(&mut self, now: Instant) {
        let elapsed_us = now.saturating_duration_since(self.added).as_micros() as i128;
        let Some(rate) = self.bytes_per_second.map(i128::from) else {
            (self.tokens, self.added) = (0, now);
            return;
        };
        let gained = rate * elapsed_us / 1_000_000;
        // Time that has not made a whole token yet is kept for the next one.
        if gained > 0 || rate == 0 {
            self.added = now;
        }
        self.tokens = (self.tokens + gained).min(rate * i128::from(SAVED_UP_MS) / 1000);
    }

    /// How long until something may pass.
    fn wait(&self) -> Option<Duration> {
        match self.bytes_per_second {
            None => None,
            Some(0) => Some(STOP_CHECK),
            Some(_) if self.tokens >= 0 => None,
            Some(rate) => {
                let wait_us = (-self.tokens) * 1_000_000 / i128::from(rate) + 1;
                Some(Duration::from_micros(u64::try_from(wait_us).unwrap_or(u64::MAX)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A limiter's state that looked at the clock last at `added`.
    fn state(bytes_per_second: Option<u64>, tokens: i128, added: Instant) -> State {
        State { bytes_per_second, tokens, added }
    }

    #[test]
    fn who_took_more_than_there_was_makes_the_next_one_wait() {
        let start = Instant::now();
        let mut bucket = state(Some(10 * MIB), 0, start);
        assert_eq!(bucket.wait(), None);
        bucket.tokens -= i128::from(5 * MIB);
        assert_eq!(bucket.wait(), Some(Duration::from_micros(500_001)));
        bucket.add(start + Duration::from_millis(400));
        assert_eq!(bucket.tokens, -i128::from(MIB));
        bucket.add(start + Duration::from_millis(500));
        assert_eq!(bucket.wait(), None);
    }

    #[test]
    fn little_is_saved_up_and_no_time_is_lost() {
        let start = Instant::now();
        let mut bucket = state(Some(1000), 0, start);
        bucket.add(start + Duration::from_secs(3600));
        assert_eq!(bucket.tokens, 50);
        let mut bucket = state(Some(10), -1, start);
        for step in 1..=100 {
            bucket.add(start + Duration::from_millis(step));
        }
        assert_eq!(bucket.tokens, 0, "a hundred looks gain what one would have");
    }

    #[test]
    fn the_rate_may_change_while_somebody_waits() {
        let (limiter, stop) = (Limiter::new(Some(0)), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| limiter.take(u64::MAX / 4, &stop));
            onecopy_testing::until("it waits", || limiter.waits() > 0);
            assert!(!waiting.is_finished());
            limiter.set_bytes_per_second(None);
            waiting.join().unwrap();
            limiter.take(u64::MAX / 4, &stop);
            limiter.set_bytes_per_second(Some(0));
            assert_eq!(limiter.bytes_per_second(), Some(0));
            let stopped = scope.spawn(|| limiter.take(1, &stop));
            stop.store(true, Ordering::Release);
            stopped.join().unwrap();
        });
    }
}
