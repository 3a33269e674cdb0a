//! Bytes of data that all connections of a door may hold together: without a bound their own bounds add up to gigabytes.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes that a connection may hold whatever the others do, so that nobody can keep it from going on with requests of this length.
pub(super) const OWN_BYTES: u64 = 1 << 20;

/// Bytes beyond that, for all connections together. What is longer than a connection's own waits for room here.
const COMMON_BYTES_MAX: u64 = 256 << 20;

/// What all connections hold beyond their own.
#[derive(Default)]
pub(super) struct Budget {
    held_bytes: Mutex<u64>,
    /// Told when there is room again.
    room: Condvar,
}

impl Budget {
    fn held_bytes(&self) -> MutexGuard<'_, u64> {
        self.held_bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for room for so many bytes, and takes it. Where nothing is held, whatever is wanted is given.
    pub(super) fn take(&self, bytes: u64) {
        let is_full = |held: &mut u64| *held > 0 && held.saturating_add(bytes) > COMMON_BYTES_MAX;
        *self.room.wait_while(self.held_bytes(), is_full).unwrap_or_else(PoisonError::into_inner) += bytes;
    }

    /// Gives back what was taken.
    pub(super) fn give(&self, bytes: u64) {
        if bytes > 0 {
            *self.held_bytes() -= bytes;
            self.room.notify_all();
        }
    }

    /// What is taken now.
    #[cfg(test)]
    pub(super) fn taken_bytes(&self) -> u64 {
        *self.held_bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn whoever_wants_more_than_is_left_waits_until_it_is_given_back() {
        let budget = &Budget::default();
        budget.take(COMMON_BYTES_MAX - 1);
        std::thread::scope(|scope| {
            let (send, receive) = channel();
            scope.spawn(move || {
                budget.take(2);
                send.send(()).unwrap();
            });
            assert!(receive.recv_timeout(Duration::from_millis(100)).is_err());
            budget.take(1);
            budget.give(1);
            assert!(receive.recv_timeout(Duration::from_millis(100)).is_err());
            budget.give(COMMON_BYTES_MAX - 1);
            receive.recv_timeout(Duration::from_secs(120)).unwrap();
        });
        budget.give(2);
        budget.take(2 * COMMON_BYTES_MAX);
        assert_eq!(budget.taken_bytes(), 2 * COMMON_BYTES_MAX);
    }
}
