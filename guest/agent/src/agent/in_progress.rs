//! The commands that are being worked on: bounded, and each can be given up.

use super::replies::{Result, failure};
use crate::protocol::{COMMANDS_MAX, FailureKind, URGENT_COMMANDS_MAX};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Set when nobody waits for a command any more.
pub(crate) type Cancelled = Arc<AtomicBool>;

/// Of the two kinds, urgent and not, each by the host's ids.
#[derive(Default)]
pub(crate) struct InProgress {
    by_urgency: Mutex<[HashMap<u64, Cancelled>; 2]>,
}

impl InProgress {
    /// A place for a command, kept until [`InProgress::end`].
    pub(crate) fn begin(&self, id: u64, is_urgent: bool) -> Result<Cancelled> {
        let most = if is_urgent { URGENT_COMMANDS_MAX } else { COMMANDS_MAX };
        let mut commands = self.commands();
        let commands = &mut commands[usize::from(is_urgent)];
        if commands.len() >= most {
            return Err(failure(FailureKind::Busy, format!("{most} commands are under way")));
        }
        if commands.contains_key(&id) {
            return Err(failure(FailureKind::Malformed, format!("a command with the id {id} is under way")));
        }
        let cancelled = Cancelled::default();
        commands.insert(id, Arc::clone(&cancelled));
        Ok(cancelled)
    }

    /// It is over.
    pub(crate) fn end(&self, id: u64, is_urgent: bool) {
        self.commands()[usize::from(is_urgent)].remove(&id);
    }

    /// Nobody waits for it. One that is over already needs nothing.
    pub(crate) fn cancel(&self, id: u64) {
        for cancelled in self.commands().iter().filter_map(|commands| commands.get(&id)) {
            cancelled.store(true, Ordering::Release);
        }
    }

    fn commands(&self) -> MutexGuard<'_, [HashMap<u64, Cancelled>; 2]> {
        self.by_urgency.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
