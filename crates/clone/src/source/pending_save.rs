//! Where an access lies while somebody waits for a follower's disk: whoever sees that it takes too long takes it from
//! there.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::follower::Following;
use crate::fanotify::{Event, JournalSlot};
use crate::image::FileIdentity;

/// An access that waits for its answer.
pub(super) struct Waiting {
    pub(super) event: Event,
    pub(super) identity: FileIdentity,
    /// Its entry in the journal, ended with it.
    pub(super) slot: Option<JournalSlot>,
    pub(super) since: Instant,
    /// A follower had to take something first.
    pub(super) saving: bool,
}

/// One thread's.
#[derive(Default)]
pub(super) struct PendingSave {
    state: Mutex<State>,
}

#[derive(Default)]
enum State {
    /// It waits for nobody.
    #[default]
    Idle,
    /// For this follower, since then.
    Pending { waiting: Waiting, following: Following, since: Instant },
    /// It waits still, and its access is somebody else's: it has nothing more to do here.
    TakenOver,
}

impl PendingSave {
    /// The thread is about to wait.
    pub(super) fn begin(&self, waiting: Waiting, following: Following) {
        *self.lock() = State::Pending { waiting, following, since: Instant::now() };
    }

    /// It waits no more; none when its access is somebody else's by now.
    pub(super) fn end(&self) -> Option<Waiting> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::TakenOver) {
            State::Pending { waiting, .. } => {
                *state = State::Idle;
                Some(waiting)
            }
            State::Idle | State::TakenOver => None,
        }
    }

    /// The access of a thread that has waited for longer, and for whom. The thread is to be replaced.
    pub(super) fn take_over(&self, longer_than: Duration) -> Option<(Waiting, Following)> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::TakenOver) {
            State::Pending { waiting, following, since } if since.elapsed() > longer_than => Some((waiting, following)),
            before => {
                *state = before;
                None
            }
        }
    }

    /// Whether its thread was replaced.
    pub(super) fn is_taken_over(&self) -> bool {
        matches!(&*self.lock(), State::TakenOver)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
