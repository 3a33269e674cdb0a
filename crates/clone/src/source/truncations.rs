//! Truncations that were let through before a freeze and have not happened yet when it begins: their processes wait for
//! a processor, or for the file system. A file that becomes shorter after it was listed cannot be read as it was
//! listed, and nobody is asked any more.

use std::time::{Duration, Instant};

use onecopy_postgres::processes_of;

use super::watched::Source;
use crate::fanotify::{Doing, doing, executed};

/// So long the source waits for them at most. What is cut after that costs the clones of this freeze: they are given
/// up.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// How often it is looked whether they have happened.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// A process that has executed for so long since it was let through has set the file's new size: the kernel does that
/// first, and what takes longer (giving pages and blocks back) afterwards.
const EXECUTED_ENOUGH: Duration = Duration::from_millis(2);

impl Source {
    /// Waits until every truncation has happened that was let through before the gate was closed. Of those that come
    /// now none happens: they are held.
    pub(super) fn wait_for_truncations(&self) {
        let begin = Instant::now();
        let suspected = processes_of(&self.data_directory);
        let mut suspected: Vec<_> =
            suspected.into_iter().map(|process_id| (process_id, executed(process_id))).collect();
        loop {
            suspected.retain(|(process_id, executed)| self.may_truncate(*process_id, *executed));
            if suspected.is_empty() {
                return;
            }
            if begin.elapsed() > WAIT_MAX {
                let processes = suspected.len();
                return tracing::warn!(
                    processes,
                    "truncations may happen after the freeze that were let through before it"
                );
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Whether a process may still be about to make a file shorter. It had executed for `executed_before` when the gate
    /// was closed.
    fn may_truncate(&self, process_id: u32, executed_before: Option<Duration>) -> bool {
        match doing(process_id) {
            // One that is held cannot have been let through: a process does one thing at a time.
            Doing::Truncation => !self.dispatcher.holds(process_id),
            // What it does cannot be told; how long it has done it can.
            Doing::Executing => executed_before
                .zip(executed(process_id))
                .is_some_and(|(before, now)| now.saturating_sub(before) < EXECUTED_ENOUGH),
            Doing::Other => false,
        }
    }
}
