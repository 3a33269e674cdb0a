//! In how many of the choices of a server for a read a server takes part.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A whole: a share is kept in so many parts.
const WHOLE: u64 = 1_000_000;

/// The golden ratio's part of [`WHOLE`], made odd and no multiple of five, so that the steps visit every part once a
/// round; any few turns in a row are spread over the whole (Weyl's sequence).
const STEP: u64 = 618_033;

/// Where each server begins its round: servers of one share do not all take part in the same turns.
const START: u64 = 271_829;

/// A share of reads, from none to all.
#[derive(Debug)]
pub struct ReadShare(AtomicU64);

impl Default for ReadShare {
    fn default() -> Self {
        ReadShare(AtomicU64::new(WHOLE))
    }
}

impl ReadShare {
    /// Takes `share` from now on; false when it is not from 0 to 1.
    #[must_use]
    pub fn set(&self, share: f64) -> bool {
        let valid = (0.0..=1.0).contains(&share);
        if valid {
            // What is not nothing stays something.
            self.0.store((share * WHOLE as f64).ceil() as u64, Relaxed);
        }
        valid
    }

    /// The share, from 0 to 1.
    pub fn ratio(&self) -> f64 {
        self.0.load(Relaxed) as f64 / WHOLE as f64
    }

    /// Whether it takes no part at all.
    pub fn is_none(&self) -> bool {
        self.0.load(Relaxed) == 0
    }

    /// Whether server `number` takes part in this turn: in exactly its share of every million turns.
    pub fn takes_part(&self, number: u64, turn: usize) -> bool {
        let share = self.0.load(Relaxed);
        share == WHOLE || ((turn as u64 % WHOLE) * STEP + number % WHOLE * START) % WHOLE < share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share_of(ratio: f64) -> ReadShare {
        let share = ReadShare::default();
        assert!(share.set(ratio));
        share
    }

    #[test]
    fn a_share_is_exact_over_a_round_and_near_over_a_few_turns() {
        for (ratio, parts) in [(0.0, 0), (1e-9, 1), (0.1, 100_000), (0.5, 500_000), (1.0, 1_000_000)] {
            let share = share_of(ratio);
            let taken = |turns: std::ops::Range<usize>| turns.filter(|turn| share.takes_part(3, *turn)).count();
            assert_eq!(taken(17..1_000_017), parts, "{ratio}");
            for start in [0, 1234, 999_990] {
                let few = taken(start..start + 200) as f64;
                assert!((few - 200.0 * ratio).abs() <= 4.0, "{ratio}: {few} of 200 from {start}");
            }
        }
    }

    #[test]
    fn a_share_says_nothing_of_whether_a_turn_is_even() {
        let share = share_of(0.5);
        let even = (0..1000).filter(|turn| turn % 2 == 0 && share.takes_part(1, *turn)).count();
        assert!((200..=300).contains(&even), "{even}");
    }

    #[test]
    fn what_is_no_share_changes_nothing() {
        let share = share_of(0.25);
        for wrong in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            assert!(!share.set(wrong));
        }
        assert_eq!(share.ratio(), 0.25);
    }
}
