//! Bytes of data that all connections of a server may hold together: without a bound their own bounds add up to
//! gigabytes.
//!
//! A client may let the server wait for as long as it likes: it is frozen, or far away. But once somebody else waits
//! for the room that it holds, it is cut off when it has let wait for [`STALL_MAX`].

use std::io;
use std::net::Shutdown;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::nbd::socket::Socket;

/// Bytes that a connection may hold whatever the others do, so that nobody can keep it from going on with requests of
/// this length.
pub(super) const OWN_BYTES: u64 = 1 << 20;

/// Bytes beyond that, for all connections together. What is longer than a connection's own waits for room here.
const COMMON_BYTES_MAX: u64 = 256 << 20;

/// How long a client may take for each [`STEP_BYTES`] of data that it sends or takes while others wait for room.
const STALL_MAX: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 20 });

/// Who waits looks this often whether the client is there.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// So much is sent or received at a time.
pub(super) const STEP_BYTES: usize = 128 << 10;

/// What all connections hold beyond their own.
#[derive(Default)]
pub(super) struct Budget {
    state: Mutex<State>,
    /// Told when there is room again.
    room: Condvar,
}

#[derive(Default)]
struct State {
    held_bytes: u64,
    shares: Vec<Weak<Share>>,
}

/// What one connection has of it.
pub(super) struct Share {
    budget: Arc<Budget>,
    socket: Arc<Socket>,
    held_bytes: AtomicU64,
    /// Since when the client lets those wait who receive from it and who send to it.
    stalls: [Mutex<Option<Instant>>; 2],
}

/// Who waits for a client.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Receiving,
    Sending,
}

/// A client is waited for.
pub(super) struct Stall<'a>(&'a Mutex<Option<Instant>>);

impl Stall<'_> {
    /// It has sent or taken another step.
    pub(super) fn goes_on(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

impl Drop for Stall<'_> {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Budget {
    /// The share of a new connection.
    pub(super) fn share(self: &Arc<Budget>, socket: Arc<Socket>) -> Arc<Share> {
        let (held_bytes, stalls) = (AtomicU64::new(0), <[_; 2]>::default());
        let share = Arc::new(Share { budget: Arc::clone(self), socket, held_bytes, stalls });
        let mut state = self.state();
        state.shares.retain(|share| share.strong_count() > 0);
        state.shares.push(Arc::downgrade(&share));
        drop(state);
        share
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts off clients that let the server wait too long, and hold what others wait for.
    fn cut_stalled(&self) {
        let shares: Vec<Arc<Share>> = self.state().shares.iter().filter_map(Weak::upgrade).collect();
        for share in shares.iter().filter(|share| share.holds_stalled()) {
            tracing::warn!("an NBD client that stalls is cut off: others wait for the memory that it holds");
            share.socket.shutdown(Shutdown::Both);
        }
    }

    /// What is taken now.
    #[cfg(test)]
    pub(super) fn taken_bytes(&self) -> u64 {
        self.state().held_bytes
    }
}

impl Share {
    /// Waits for room for so many bytes, and takes it. Where nothing is held, whatever is wanted is given.
    ///
    /// # Errors
    /// The client has gone meanwhile.
    pub(super) fn take(&self, bytes: u64) -> io::Result<()> {
        let is_full =
            |state: &mut State| state.held_bytes > 0 && state.held_bytes.saturating_add(bytes) > COMMON_BYTES_MAX;
        let mut state = self.budget.state();
        while is_full(&mut state) {
            let waited = self.budget.room.wait_timeout_while(state, LOOK_INTERVAL, is_full);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if is_full(&mut state) {
                drop(state);
                if self.socket.is_left() {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                self.budget.cut_stalled();
                state = self.budget.state();
            }
        }
        state.held_bytes += bytes;
        self.held_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Gives back what was taken.
    pub(super) fn give(&self, bytes: u64) {
        if bytes > 0 {
            self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.budget.state().held_bytes -= bytes;
            self.budget.room.notify_all();
        }
    }

    /// From now on the client is waited for.
    pub(super) fn wait_for(&self, side: Side) -> Stall<'_> {
        let stall = Stall(&self.stalls[side as usize]);
        stall.goes_on();
        stall
    }

    fn holds_stalled(&self) -> bool {
        let is_stalled = |stall: &Mutex<Option<Instant>>| {
            stall.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|since| since.elapsed() >= STALL_MAX)
        };
        self.held_bytes.load(Ordering::Relaxed) > 0 && self.stalls.iter().any(is_stalled)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn whoever_wants_more_than_is_left_waits_until_it_is_given_back() {
        let (budget, (ours, client)) = (Arc::<Budget>::default(), UnixStream::pair().unwrap());
        let share = &budget.share(Arc::new(Socket::unix(ours)));
        share.take(COMMON_BYTES_MAX - 1).unwrap();
        std::thread::scope(|scope| {
            let (send, receive) = channel();
            scope.spawn(move || {
                share.take(2).unwrap();
                send.send(()).unwrap();
            });
            assert!(receive.recv_timeout(Duration::from_millis(100)).is_err());
            share.take(1).unwrap();
            share.give(1);
            assert!(receive.recv_timeout(Duration::from_millis(100)).is_err());
            share.give(COMMON_BYTES_MAX - 1);
            receive.recv_timeout(Duration::from_secs(120)).unwrap();
        });
        share.give(2);
        share.take(2 * COMMON_BYTES_MAX).unwrap();
        assert_eq!(budget.taken_bytes(), 2 * COMMON_BYTES_MAX);
        drop(client);
        assert!(share.take(1).is_err(), "a client that has gone waits for nothing");
    }
}
