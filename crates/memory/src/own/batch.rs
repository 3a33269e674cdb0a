//! Dropping some pages of neighbouring buffers at once. This is where the server's spinlocks are held.

use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::time::{Duration, Instant};

use super::header::State;
use super::pool::Pool;
use super::real_time::RealTimeSection;

/// Most buffers whose headers are locked at once: 512 kB with pages of 8 kB, which the kernel takes in about 0.1 ms.
pub(super) const BUFFERS_MAX: u32 = 64;
/// Fewest that a batch is made smaller to.
const BUFFERS_MIN: u32 = 4;
/// After this time no further header is locked: what is locked is finished.
const GATHERING_MAX: Duration = Duration::from_micros(100);
/// Batches that held longer than this are made smaller.
const HOLD_WISHED: Duration = Duration::from_micros(300);

/// What a batch did.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Done {
    /// Buffers without content now.
    pub buffers: u32,
    /// Memory given back.
    pub bytes: u64,
    /// How long their headers were locked.
    pub held: Duration,
    /// Whether ordinary processes could not preempt it.
    pub real_time: bool,
}

/// How large batches are: smaller when the kernel needs long, larger again when it does not.
#[derive(Debug)]
pub(super) struct Pace {
    buffers: u32,
}

impl Pace {
    pub fn new() -> Pace {
        Pace { buffers: BUFFERS_MAX }
    }

    /// How many buffers the next batch may have.
    pub fn buffers(&self) -> u32 {
        self.buffers
    }

    /// Learns from a batch.
    pub fn learn(&mut self, held: Duration) {
        self.buffers =
            if held > HOLD_WISHED { (self.buffers / 2).max(BUFFERS_MIN) } else { (self.buffers + 1).min(BUFFERS_MAX) };
    }
}

/// Drops the pages of up to `count` buffers from `first` on, as far as they can be dropped and were used at most
/// `usage` times lately.
///
/// Each header is locked, the memory of all of them is given back, each is unlocked as one whose page must be read.
/// While a header is locked, nobody begins to use the buffer: so nobody sees the page without its content, and nobody
/// reads into memory that goes away.
///
/// # Errors
/// The kernel did not take the memory. The pages are dropped all the same: how much of them is left is not known.
pub(super) fn drop_pages(pool: &Pool, first: u32, count: u32, usage: u32) -> io::Result<Done> {
    let count = count.min(BUFFERS_MAX).min(pool.buffers.saturating_sub(first));
    let mut states = [State(0); BUFFERS_MAX as usize];
    let urgent = RealTimeSection::begin();
    let began = Instant::now();
    let mut locked = 0;
    while locked < count && began.elapsed() < GATHERING_MAX {
        let Some(state) = lock(pool, first + locked, usage) else { break };
        states[locked as usize] = state;
        locked += 1;
    }
    let (place, length) = pool.place_of(first, locked);
    let given = if locked > 0 { pool.segment.give_back(place, length) } else { Ok(0) };
    for (buffer, state) in (first..first + locked).zip(states) {
        // Nobody changes a state that is locked by somebody else: it can be set as a whole (`UnlockBufHdr`).
        pool.state_word(buffer).store(state.without_content().0, Release);
    }
    let held = began.elapsed();
    let real_time = urgent.is_real_time();
    drop(urgent);
    Ok(Done { buffers: locked, bytes: given?, held, real_time })
}

/// Locks the header of a buffer if its page can be dropped. Never waits: who holds the lock uses the buffer.
fn lock(pool: &Pool, buffer: u32, usage: u32) -> Option<State> {
    let state = pool.state(buffer);
    if !state.is_droppable() || state.usage() > usage {
        return None;
    }
    let word = pool.state_word(buffer);
    word.compare_exchange(state.0, state.locked().0, AcqRel, Acquire).is_ok().then_some(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_become_smaller_when_they_hold_long_and_larger_again() {
        let mut pace = Pace::new();
        for _ in 0..20 {
            pace.learn(HOLD_WISHED * 2);
        }
        assert_eq!(pace.buffers(), BUFFERS_MIN);
        for _ in 0..100 {
            pace.learn(Duration::from_micros(10));
        }
        assert_eq!(pace.buffers(), BUFFERS_MAX);
    }
}
