//! Making clones: everything that can be done before the freeze, the freeze, and what is left.
//!
//! ```text
//!  for each order:  directories, sparse files ─┐
//!                   slots, redo point ─────────┼─> close gate ─> final image ─> follow ─> open gate ─> where it is consistent
//!                   source armed, adopted ─────┘                                                           │
//!        (orders that come meanwhile join)                     ready <── marks, listener <── small files, control file, guard
//! ```

mod completing;
mod freezing;
mod preparing;
mod remote;

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc;

use super::clone_job::{CloneJob, Running};
use super::{Hydrator, ending, failed, lock};
use crate::CloneError;
use crate::plan::Plan;
use crate::recovery::Begun;
use crate::service::Event;
use crate::target::Skeleton;

#[cfg(test)]
pub(super) use completing::make_runnable;
pub(super) use freezing::{OTHER_FREEZE_INTERVAL, OTHER_FREEZE_TIMEOUT};
pub use preparing::SOURCE_GROUP_KEPT;
pub(super) use remote::dialler;

/// Clones of one freeze, at most; further orders wait for the next one.
const BATCH_CLONES_MAX: usize = 64;

/// What is told to whoever ordered; with a clone that is ready comes what it needs.
pub type Notification = (Event, Option<Arc<Running>>);

/// Clones that were wanted together.
#[derive(Debug)]
pub struct Order {
    plans: Vec<Plan>,
    notifications: mpsc::Sender<Notification>,
}

impl Order {
    /// With where its news arrive.
    pub fn new(plans: Vec<Plan>) -> (Order, mpsc::Receiver<Notification>) {
        // All that is ever said fits: two words about all and one about each.
        let (notifications, receiver) = mpsc::channel(plans.len() + 4);
        (Order { plans, notifications }, receiver)
    }
}

/// Says something; nobody need listen.
fn notify(notifications: &mpsc::Sender<Notification>, event: Event, running: Option<Arc<Running>>) {
    let _ = notifications.try_send((event, running));
}

/// Tells in the log how long a step took.
async fn timed<T>(step: &'static str, work: impl Future<Output = T>) -> T {
    let begin = Instant::now();
    let done = work.await;
    tracing::debug!(step, elapsed_us = begin.elapsed().as_micros(), "done");
    done
}

/// A clone that waits for the freeze.
struct Candidate {
    clone: Arc<CloneJob>,
    notifications: mpsc::Sender<Notification>,
    /// Or why it has no shape any more.
    skeleton: Result<Skeleton, CloneError>,
}

/// Clones that are recovered alike.
struct RecoveryGroup<T> {
    begun: Begun,
    members: Vec<T>,
}

/// Makes what is ordered, one freeze after another.
pub async fn make_orders(hydrator: Arc<Hydrator>) {
    loop {
        hydrator.ordered.notified().await;
        loop {
            let lingering = hydrator.linger();
            if lock(&hydrator.orders).is_empty() {
                break;
            }
            make_batch(&hydrator).await;
            drop(lingering);
        }
    }
}

async fn make_batch(hydrator: &Arc<Hydrator>) {
    let mut groups = Vec::new();
    let mut clones = 0;
    // Who orders before the gate is closed joins.
    while clones < BATCH_CLONES_MAX {
        let Some(order) = lock(&hydrator.orders).pop_front() else { break };
        clones += order.plans.len();
        groups.extend(preparing::prepare(hydrator, order).await);
    }
    if groups.is_empty() {
        return;
    }
    match timed("freeze", freezing::freeze(hydrator, groups)).await {
        Ok(freeze) => completing::complete(hydrator, freeze).await,
        Err((groups, error)) => {
            for group in groups {
                give_up(hydrator, group, &error).await;
            }
        }
    }
}

/// Gives up clones that were not frozen.
async fn give_up(hydrator: &Arc<Hydrator>, group: RecoveryGroup<Candidate>, error: &CloneError) {
    group.begun.abandon().await;
    for candidate in group.members {
        candidate.clone.note_no_slot();
        drop(candidate.skeleton);
        fail(hydrator, candidate.clone, &candidate.notifications, error).await;
    }
}

/// A clone that is not ready fails: what was made of it is removed.
async fn fail(
    hydrator: &Arc<Hydrator>,
    clone: Arc<CloneJob>,
    notifications: &mpsc::Sender<Notification>,
    error: &CloneError,
) {
    let target = clone.plan.target.clone();
    ending::discard(Arc::clone(hydrator), clone, error.to_string()).await;
    notify(notifications, failed(Some(&target), error), None);
}
