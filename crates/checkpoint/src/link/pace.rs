//! How fast bytes may go: a bucket of tokens.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What may go at once after a silence: so much time's worth.
const BURST: Duration = Duration::from_millis(50);
/// What goes at once is not less than this, however slow the link shall be.
const STEP_BYTES_MIN: u64 = 4 << 10;

/// A limit of bytes a second, which can be changed at any time. In any time T no more goes than the limit allows for
/// T + 50 ms, or 4 KiB, if that is more.
pub struct Pace(Mutex<Bucket>);

struct Bucket {
    bytes_per_second: Option<u64>,
    /// When the bucket will be, or was, full.
    full_at: Instant,
}

impl Pace {
    /// None: as fast as it goes.
    pub fn new(bytes_per_second: Option<u64>) -> Pace {
        Pace(Mutex::new(Bucket { bytes_per_second, full_at: Instant::now() }))
    }

    /// From now on so fast.
    pub fn set_limit(&self, bytes_per_second: Option<u64>) {
        let mut bucket = self.bucket();
        bucket.bytes_per_second = bytes_per_second;
        // What the old limit had booked ahead does not bind the new one.
        bucket.full_at = bucket.full_at.min(Instant::now() + BURST);
    }

    /// The limit.
    pub fn limit(&self) -> Option<u64> {
        self.bucket().bytes_per_second
    }

    fn bucket(&self) -> MutexGuard<'_, Bucket> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What may be written with one call.
    pub(super) fn step_bytes(&self, bytes_max: usize) -> usize {
        match self.limit() {
            None => bytes_max,
            Some(limit) => {
                let burst = (u128::from(limit) * BURST.as_micros() / 1_000_000) as u64;
                (burst.max(STEP_BYTES_MIN) as usize).min(bytes_max)
            }
        }
    }

    /// Waits until so many bytes may go.
    pub(super) fn wait(&self, bytes: usize) {
        let pause = self.bucket().take(Instant::now(), bytes);
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
}

impl Bucket {
    /// Takes tokens; how long to wait for them.
    fn take(&mut self, now: Instant, bytes: usize) -> Duration {
        let Some(limit) = self.bytes_per_second else { return Duration::ZERO };
        let takes = Duration::from_secs_f64(bytes as f64 / limit.max(1) as f64);
        self.full_at = self.full_at.max(now) + takes;
        self.full_at.saturating_duration_since(now + BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_no_time_more_goes_than_is_allowed_and_all_of_it_is_used() {
        let begin = Instant::now();
        for limit in [100_000, 12_500_000, 1_000_000_000] {
            let pace = Pace::new(Some(limit));
            let step = pace.step_bytes(64 << 10);
            let mut bucket = Bucket { bytes_per_second: Some(limit), full_at: begin };
            let (mut now, mut went) = (begin, Vec::new());
            for count in 0..2000_u32 {
                now += bucket.take(now, step);
                went.push(now);
                // Now and then nobody has anything to send.
                if count % 500 == 499 {
                    now += Duration::from_secs(1);
                }
            }
            for window in [1, 20, 400] {
                for pair in went.windows(window + 1) {
                    let allowed = (pair[window] - pair[0] + BURST).as_secs_f64() * limit as f64;
                    let bytes = (window * step) as f64;
                    assert!(
                        bytes <= allowed * 1.001 || step as u64 == STEP_BYTES_MIN,
                        "{bytes} of {allowed} at {limit}"
                    );
                }
            }
            let burst = BURST.as_secs_f64() * limit as f64;
            let least = ((499 * step) as f64 - burst).max(0.0) / limit as f64;
            let took = (went[498] - begin).as_secs_f64();
            assert!((took - least).abs() <= 0.01 * least + 1e-6, "{took} s in the place of {least} at {limit}");
        }
    }

    #[test]
    fn another_limit_holds_at_once() {
        let pace = Pace::new(Some(1));
        pace.bucket().take(Instant::now(), 1 << 20);
        pace.set_limit(Some(1 << 30));
        assert!(pace.bucket().take(Instant::now(), 4096) <= BURST);
        pace.set_limit(None);
        assert_eq!(pace.step_bytes(77), 77);
        assert_eq!(pace.bucket().take(Instant::now(), 1 << 40), Duration::ZERO);
    }
}
