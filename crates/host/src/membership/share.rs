//! How many reads a new follower gets: as many as its cache is good for.
//!
//! A follower that has just come finds nothing in its memory. Reads that go there by halves would make half of all
//! reads slow, so its share grows with its own hit ratio, measured against the leader's.

use std::collections::VecDeque;

/// The smallest share: without any reads a cache never becomes warm.
const SHARE_MIN: f64 = 0.05;

/// Samples that a ratio is taken over. PostgreSQL publishes its counters once a second, a sample is taken four times as
/// often.
const SAMPLES_MAX: usize = 9;

/// Fewer blocks than this between the first and the last sample say nothing.
const BLOCKS_MIN: u64 = 200;

/// Blocks that a server's sessions asked for since its statistics began, over all databases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    /// Found in shared buffers.
    pub hit: u64,
    /// Not found there.
    pub read: u64,
}

/// The last few samples of one server.
#[derive(Debug, Default)]
pub struct HitWindow(VecDeque<Blocks>);

impl HitWindow {
    /// Adds a sample. A server that began to count anew is looked at anew.
    pub fn add(&mut self, sample: Blocks) {
        if self.0.back().is_some_and(|last| sample.hit < last.hit || sample.read < last.read) {
            self.0.clear();
        }
        if self.0.len() == SAMPLES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(sample);
    }

    /// The part of the recent blocks that was found, from 0 to 1; none when there were too few.
    pub fn ratio(&self) -> Option<f64> {
        let (first, last) = (self.0.front()?, self.0.back()?);
        let (hit, read) = (last.hit - first.hit, last.read - first.read);
        (hit + read >= BLOCKS_MIN).then(|| hit as f64 / (hit + read) as f64)
    }
}

/// The share of reads for a follower with these hit ratios and with `filled_ratio` of its data there.
pub fn read_share(own: Option<f64>, leader: Option<f64>, filled_ratio: f64) -> f64 {
    let share = match (own, leader) {
        (Some(own), Some(leader)) if leader > 0.0 => own / leader,
        (Some(own), None) => own,
        // Nobody reads there, or nothing is cached on the leader either: what is there can be read.
        _ => filled_ratio,
    };
    share.clamp(SHARE_MIN, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_follows_the_hit_ratio() {
        let cases = [
            (Some(0.5), Some(1.0), 1.0, 0.5),
            (Some(0.9), Some(0.6), 0.1, 1.0),
            (Some(0.0), Some(0.9), 1.0, SHARE_MIN),
            (Some(0.7), None, 0.0, 0.7),
            (None, Some(0.9), 0.3, 0.3),
            (None, None, 0.0, SHARE_MIN),
            (Some(0.2), Some(0.0), 0.8, 0.8),
        ];
        for (own, leader, filled, expected) in cases {
            assert_eq!(read_share(own, leader, filled), expected, "{own:?} {leader:?} {filled}");
        }
    }

    #[test]
    fn only_recent_blocks_count() {
        let mut window = HitWindow::default();
        assert_eq!(window.ratio(), None);
        window.add(Blocks { hit: 0, read: 10_000 });
        window.add(Blocks { hit: 0, read: 10_100 });
        assert_eq!(window.ratio(), None, "too few");
        for index in 1..=SAMPLES_MAX as u64 {
            window.add(Blocks { hit: index * 1000, read: 10_100 });
        }
        assert_eq!(window.ratio(), Some(1.0), "the reads of before are out of sight");
        window.add(Blocks { hit: 5, read: 5 });
        assert_eq!(window.ratio(), None, "its statistics began anew");
    }
}
