//! Where an access lies while somebody waits for a follower's disk: whoever sees that it takes too long takes it from
//! there.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::follower::Following;
use super::traffic::Waiting;

/// One thread's.
#[derive(Default)]
pub(super) struct Seat {
    state: Mutex<State>,
}

#[derive(Default)]
enum State {
    /// It waits for nobody.
    #[default]
    Free,
    /// For this follower, since then.
    Taken { waiting: Waiting, following: Following, since: Instant },
    /// It waits still, and its access is somebody else's: it has nothing more to do here.
    Left,
}

impl Seat {
    /// The thread is about to wait.
    pub(super) fn sit(&self, waiting: Waiting, following: Following) {
        *self.lock() = State::Taken { waiting, following, since: Instant::now() };
    }

    /// It waits no more; none when its access is somebody else's by now.
    pub(super) fn rise(&self) -> Option<Waiting> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Left) {
            State::Taken { waiting, .. } => {
                *state = State::Free;
                Some(waiting)
            }
            State::Free | State::Left => None,
        }
    }

    /// The access of a thread that has waited for longer, and for whom. The thread is to be replaced.
    pub(super) fn relieve(&self, longer_than: Duration) -> Option<(Waiting, Following)> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Left) {
            State::Taken { waiting, following, since } if since.elapsed() > longer_than => Some((waiting, following)),
            before => {
                *state = before;
                None
            }
        }
    }

    /// Whether its thread was replaced.
    pub(super) fn is_left(&self) -> bool {
        matches!(&*self.lock(), State::Left)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
