//! How fast the host's time stamp counter runs.
//!
//! A microvm under TCG shows its guest the host's counter and no other clock to measure it by: a kernel that is not
//! told its speed waits for ever at boot.

use std::time::{Duration, Instant};

/// Measured over this. The error is that of one sleep's ends: microseconds.
const MEASURED_OVER: Duration = Duration::from_millis(50);

/// Looks at both clocks, of which the shortest counts: a busy host may stop this thread in the midst of a look.
#[cfg(target_arch = "x86_64")]
const LOOKS: u32 = 16;

/// The counter's speed, kHz.
#[cfg(target_arch = "x86_64")]
pub(crate) fn speed_khz() -> Option<u64> {
    let (begin, first) = both_clocks();
    std::thread::sleep(MEASURED_OVER);
    let (end, last) = both_clocks();
    let (elapsed, ticks) = (end.saturating_duration_since(begin), last.saturating_sub(first));
    u64::try_from(u128::from(ticks) * 1_000_000 / elapsed.as_nanos().max(1)).ok().filter(|khz| *khz > 0)
}

/// The time and the counter at one moment.
#[cfg(target_arch = "x86_64")]
fn both_clocks() -> (Instant, u64) {
    // SAFETY: the instruction reads a counter; every processor of this architecture has it.
    let counter = || unsafe { std::arch::x86_64::_rdtsc() };
    let look = || {
        let before = counter();
        let now = Instant::now();
        (counter().saturating_sub(before), now, before)
    };
    let mut best = look();
    for _ in 1..LOOKS {
        let next = look();
        if next.0 < best.0 {
            best = next;
        }
    }
    (best.1, best.2 + best.0 / 2)
}

/// Elsewhere there is none.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn speed_khz() -> Option<u64> {
    None
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn two_measurements_agree() {
        let (one, two) = (speed_khz().unwrap(), speed_khz().unwrap());
        // The counter's speed is fixed; a host that is busy measures it within one part in a hundred nevertheless.
        assert!(one.abs_diff(two) < one / 100, "{one} {two}");
    }
}
