//! Who is at work on the data file: so that a place is given to another block only when nobody can still reach it.
//!
//! A request enters before it looks up places and leaves when it has used them. A place that no map names any more may
//! be reused once all requests that were inside at that time have left. Requests count themselves in one of two
//! counters, chosen by the current phase; the reclaimer turns the phase and waits until the old counter is empty.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// How long the reclaimer sleeps while requests are inside.
const WAIT_INTERVAL: Duration = Duration::from_micros(100);

/// Two counters a stripe, apart from other stripes' in memory.
#[derive(Default)]
#[repr(align(128))]
struct Counters([AtomicU64; 2]);

pub(crate) struct Grace {
    phase: AtomicUsize,
    is_closed: AtomicBool,
    inside: Box<[Counters]>,
}

/// A request that is inside.
pub(crate) struct Inside<'a>(&'a AtomicU64);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Grace {
    pub(crate) fn new(stripes: usize) -> Grace {
        Grace {
            phase: AtomicUsize::new(0),
            is_closed: AtomicBool::new(false),
            inside: (0..stripes).map(|_| Counters::default()).collect(),
        }
    }

    /// Enters; none when the gate is closed.
    pub(crate) fn enter(&self, stripe: usize) -> Option<Inside<'_>> {
        loop {
            let phase = self.phase.load(SeqCst);
            let inside = Inside(&self.inside[stripe].0[phase]);
            inside.0.fetch_add(1, SeqCst);
            if self.is_closed.load(SeqCst) {
                return None;
            }
            // The phase may have turned before we were counted: then nobody waits for the counter that we are in.
            if self.phase.load(SeqCst) == phase {
                return Some(inside);
            }
        }
    }

    /// Waits until all who are inside now have left. One caller at a time.
    pub(crate) fn wait(&self) {
        let old = self.phase.load(SeqCst);
        self.phase.store(1 - old, SeqCst);
        self.wait_until_empty(old);
    }

    fn wait_until_empty(&self, phase: usize) {
        while self.inside.iter().any(|counters| counters.0[phase].load(SeqCst) != 0) {
            std::thread::sleep(WAIT_INTERVAL);
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(SeqCst)
    }

    /// Lets nobody in any more; whether this call did it.
    pub(crate) fn close(&self) -> bool {
        !self.is_closed.swap(true, SeqCst)
    }

    /// Waits until nobody is inside. Only after the gate was closed is there an end to it.
    pub(crate) fn drain(&self) {
        self.wait_until_empty(0);
        self.wait_until_empty(1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn waiting_is_for_those_inside_and_not_for_those_that_come_later() {
        let grace = Arc::new(Grace::new(4));
        let first = grace.enter(1).unwrap();
        let waiter = std::thread::spawn({
            let grace = grace.clone();
            move || grace.wait()
        });
        while grace.phase.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        let later = grace.enter(1).unwrap();
        assert!(!waiter.is_finished());
        drop(first);
        waiter.join().unwrap();
        assert!(grace.close() && !grace.close());
        assert!(grace.enter(0).is_none());
        drop(later);
        grace.drain();
    }
}
