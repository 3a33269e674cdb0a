//! Rates from counters that only grow, until the server begins anew.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Counters nearer than this are not compared: servers publish them now and then, and a rate over a moment says
/// nothing.
const WINDOW_MIN: Duration = Duration::from_millis(900);
/// A rate is over the last so much, at least.
const WINDOW: Duration = Duration::from_secs(10);
/// Readings that are kept: enough for one a second over the window.
const READINGS_MAX: usize = 16;

/// Pages found and pages read over the last seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Rates {
    /// Share of pages found; none when none were wanted.
    pub hit_ratio: Option<f64>,
    /// Pages found a second.
    pub hits_per_second: f64,
    /// Pages read a second.
    pub reads_per_second: f64,
}

/// Remembers counters.
#[derive(Debug, Default)]
pub(super) struct Counters {
    readings: Mutex<Vec<Reading>>,
}

#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    hits: u64,
    reads: u64,
}

impl Counters {
    /// Takes a new reading and gives the rates since one about [`WINDOW`] ago.
    pub(super) fn rates(&self, at: Instant, hits: u64, reads: u64) -> Rates {
        let mut readings = self.readings.lock().unwrap_or_else(PoisonError::into_inner);
        // The server began anew, or its statistics did.
        readings.retain(|old| old.hits <= hits && old.reads <= reads && old.at <= at);
        let age = |reading: &Reading| at.duration_since(reading.at);
        let old = readings.iter().rfind(|old| age(old) >= WINDOW).or_else(|| readings.first()).copied();
        if readings.last().is_none_or(|last| age(last) >= WINDOW_MIN) {
            if readings.len() == READINGS_MAX {
                readings.remove(0);
            }
            readings.push(Reading { at, hits, reads });
        }
        let Some(old) = old.filter(|old| age(old) >= WINDOW_MIN) else { return Rates::default() };
        let (hits, reads) = ((hits - old.hits) as f64, (reads - old.reads) as f64);
        let seconds = age(&old).as_secs_f64();
        let wanted = hits + reads;
        let hit_ratio = (wanted > 0.0).then(|| hits / wanted);
        Rates { hit_ratio, hits_per_second: hits / seconds, reads_per_second: reads / seconds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_over_the_last_seconds_and_begin_anew_with_the_server() {
        let counters = Counters::default();
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(counters.rates(at(0), 100, 100), Rates::default());
        assert_eq!(counters.rates(begin + Duration::from_millis(10), 200, 100), Rates::default());
        let rates = counters.rates(at(2), 300, 300);
        assert_eq!((rates.hit_ratio, rates.hits_per_second, rates.reads_per_second), (Some(0.5), 100.0, 100.0));
        for second in 3..40 {
            counters.rates(at(second), 300 + (second - 2) * 10, 300);
        }
        let rates = counters.rates(at(40), 300 + 380, 300);
        assert_eq!((rates.hit_ratio, rates.hits_per_second), (Some(1.0), 10.0));
        assert_eq!(counters.rates(at(41), 5, 5), Rates::default());
        assert_eq!(counters.rates(at(43), 5, 5).hit_ratio, None);
        assert_eq!(counters.rates(at(44), 5, 11).reads_per_second, 2.0);
    }
}
