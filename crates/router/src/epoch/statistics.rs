//! How gates went: counts, and a histogram of the time the commit barrier was closed.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Upper bounds of the histogram's buckets, in microseconds; each is about 1.5 times the one before.
const BUCKET_MICROSECONDS: [u64; 20] = [
    100,
    150,
    220,
    330,
    500,
    750,
    1_100,
    1_700,
    2_500,
    3_800,
    5_700,
    8_500,
    13_000,
    19_000,
    29_000,
    43_000,
    65_000,
    100_000,
    500_000,
    u64::MAX,
];

/// Counters of one database's gates.
#[derive(Debug, Default)]
pub struct GateStatistics {
    buckets: [AtomicU64; BUCKET_MICROSECONDS.len()],
    closed: AtomicU64,
    gave_up: AtomicU64,
    failed: AtomicU64,
    epoch_microseconds: AtomicU64,
    closed_microseconds: AtomicU64,
    tripwires: AtomicU64,
    tripwire_aborts: AtomicU64,
}

/// What [`GateStatistics`] holds, for people.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GateSummary {
    /// Gates that made an epoch.
    pub epochs: u64,
    /// Gates that were kept from closing too long by commits in flight.
    pub gave_up: u64,
    /// Gates that a server's failure ended.
    pub failed: u64,
    /// Time that commits were held out, all together, in microseconds: by gates that made no epoch, too.
    pub closed_microseconds: u64,
    /// The same of the gates that made an epoch.
    #[serde(default)]
    pub epoch_microseconds: u64,
    /// How many gates took at most so many microseconds: upper bounds with the count of all gates up to each; the last
    /// bucket, which has no bound, is left out: it is `epochs`.
    #[serde(default)]
    pub gate_buckets: Vec<(u64, u64)>,
    /// Half of the gates took at most this, in microseconds (upper bound of a bucket).
    pub gate_p50_microseconds: u64,
    /// 99 of 100 gates took at most this, in microseconds (upper bound of a bucket).
    pub gate_p99_microseconds: u64,
    /// Commits that inserted into the tripwire.
    pub tripwires: u64,
    /// Those of them that PostgreSQL aborted for it.
    pub tripwire_aborts: u64,
}

impl GateStatistics {
    /// Counts a gate that made an epoch, and for how long it held commits: since they were asked to wait.
    pub(super) fn note_epoch(&self, held: Duration) {
        let microseconds = microseconds(held);
        let bucket = BUCKET_MICROSECONDS.partition_point(|bound| *bound < microseconds);
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.closed.fetch_add(1, Relaxed);
        self.epoch_microseconds.fetch_add(microseconds, Relaxed);
    }

    /// Counts the time from now until the gate ends, whatever ends it, as held out.
    pub(super) fn holding(&self) -> Holding<'_> {
        Holding { statistics: self, begun_at: Instant::now() }
    }

    pub(super) fn note_gave_up(&self) {
        self.gave_up.fetch_add(1, Relaxed);
    }

    pub(super) fn note_failed(&self) {
        self.failed.fetch_add(1, Relaxed);
    }

    /// Counts a commit that inserted into the tripwire, and whether it was aborted.
    pub fn note_tripwire(&self, aborted: bool) {
        self.tripwires.fetch_add(1, Relaxed);
        self.tripwire_aborts.fetch_add(u64::from(aborted), Relaxed);
    }

    /// Commits through the tripwire so far.
    pub fn tripwires(&self) -> u64 {
        self.tripwires.load(Relaxed)
    }

    /// The counters now.
    pub fn summary(&self) -> GateSummary {
        GateSummary {
            epochs: self.closed.load(Relaxed),
            gave_up: self.gave_up.load(Relaxed),
            failed: self.failed.load(Relaxed),
            closed_microseconds: self.closed_microseconds.load(Relaxed),
            epoch_microseconds: self.epoch_microseconds.load(Relaxed),
            gate_buckets: self.cumulative_buckets(),
            gate_p50_microseconds: self.quantile(50),
            gate_p99_microseconds: self.quantile(99),
            tripwires: self.tripwires.load(Relaxed),
            tripwire_aborts: self.tripwire_aborts.load(Relaxed),
        }
    }

    fn cumulative_buckets(&self) -> Vec<(u64, u64)> {
        let mut seen = 0;
        let bounded = self.buckets.iter().zip(BUCKET_MICROSECONDS).take(BUCKET_MICROSECONDS.len() - 1);
        bounded
            .map(|(bucket, bound)| {
                seen += bucket.load(Relaxed);
                (bound, seen)
            })
            .collect()
    }

    fn quantile(&self, percent: u64) -> u64 {
        let total: u64 = self.buckets.iter().map(|bucket| bucket.load(Relaxed)).sum();
        let rank = (total * percent).div_ceil(100);
        let mut seen = 0;
        for (bucket, bound) in self.buckets.iter().zip(BUCKET_MICROSECONDS) {
            seen += bucket.load(Relaxed);
            if rank > 0 && seen >= rank {
                return bound;
            }
        }
        0
    }
}

/// A gate that holds commits until this is dropped.
pub(super) struct Holding<'a> {
    statistics: &'a GateStatistics,
    begun_at: Instant,
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        self.statistics.closed_microseconds.fetch_add(microseconds(self.begun_at.elapsed()), Relaxed);
    }
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_upper_bounds_of_buckets() {
        let statistics = GateStatistics::default();
        assert_eq!(statistics.summary().gate_p50_microseconds, 0);
        for microseconds in [90, 400, 400, 90_000] {
            statistics.note_epoch(Duration::from_micros(microseconds));
        }
        let summary = statistics.summary();
        assert_eq!((summary.gate_p50_microseconds, summary.gate_p99_microseconds), (500, 100_000));
        assert_eq!(summary.epoch_microseconds, 90_890);
        let up_to = |bound| summary.gate_buckets.iter().find(|bucket| bucket.0 == bound).unwrap().1;
        assert_eq!((up_to(100), up_to(330), up_to(500), up_to(65_000), up_to(500_000)), (1, 1, 3, 3, 4));
    }
}
