//! How a clone ends: whole, or removed.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::clone_job::CloneJob;
use super::keeper_client::copy_of;
use super::record::kept_name;
use super::removal::{Remains, Removal, blocking, drop_slot_after, remove};
use super::{Hydrator, lock};
use crate::CloneError;
use crate::fanotify::Group;
use crate::keeper::KeptFiles;
use crate::service::{CloneState, state_without_service};
use crate::target;

/// Accesses that the kernel was just about to ask for when the marks went are still answered for so long.
const LINGER: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 500 });

/// Makes a filled clone an ordinary directory, of which nothing here knows any more.
pub async fn finish(hydrator: Arc<Hydrator>, clone: Arc<CloneJob>) {
    let Some(running) = clone.begin_finish() else { return };
    let work = Arc::clone(&running);
    let made_whole = blocking(move || {
        target::finish(&work.location, work.major_version)?;
        work.group.flush()
    });
    if let Err(error) = made_whole.await {
        let reason = format!("it could not be made durable: {error}");
        return discard(hydrator, clone, reason).await;
    }
    hydrator.unfollow(&running.filling);
    hydrator.journal.note_progress();
    // Somebody may have begun to remove it meanwhile: then its end is his to tell.
    if !clone.end_finish(running.filling.progress()) {
        return;
    }
    tracing::info!(target = %clone.plan.target.display(), "whole");
    hydrator.write_targets();
    let lingering = hydrator.linger();
    tokio::time::sleep(LINGER).await;
    let _ = blocking(move || {
        running.stop_threads();
        running.origin.end(true);
        Ok(())
    })
    .await;
    hydrator.forget(&clone);
    drop(lingering);
}

/// Removes a clone that will not be whole, with its server and its slot, and says why to those who watch.
pub async fn discard(hydrator: Arc<Hydrator>, clone: Arc<CloneJob>, reason: String) {
    let Some(running) = clone.begin_end() else { return };
    tracing::error!(target = %clone.plan.target.display(), reason, "discarded");
    let progress = running.as_ref().map(|running| running.filling.progress()).unwrap_or_default();
    if let Some(running) = &running {
        running.filling.fail(&reason);
        running.origin.let_readers_go(&reason);
        hydrator.unfollow(&running.filling);
    }
    let remains = Remains::of(&clone.plan, &hydrator.rendezvous);
    let parts = running.as_ref().map(|running| (Arc::clone(&running.group), running.origin.clone()));
    let removed = remove(remains, running).await;
    // One that could run was made whole just then: it is an ordinary server, which may follow by its slot.
    let is_whole = parts.is_some() && matches!(removed, Ok(Removal::NotOurs)) && is_whole(&clone.plan.target);
    if let Some((group, origin)) = parts {
        let ended = blocking(move || {
            origin.end(is_whole);
            if is_whole { group.let_go(LINGER) } else { Ok(()) }
        });
        if let Err(error) = ended.await {
            tracing::error!(target = %clone.plan.target.display(), %error, "its server may wait for ever: restart it");
        }
    }
    if is_whole {
        hydrator.forget(&clone);
        clone.set_over(CloneState::Whole, progress);
        return hydrator.write_targets();
    }
    let reason = match drop_slot_after(removed, clone.unfinished(), &hydrator.rendezvous).await {
        Ok(_) => reason,
        Err((left, error)) => {
            lock(&hydrator.left).push(left);
            format!("{reason}; and what is left of it could not be removed: {error}")
        }
    };
    hydrator.forget(&clone);
    clone.set_over(CloneState::Discarded { reason }, progress);
    hydrator.write_targets();
}

/// Lets go of a clone that was made whole by a service which died before it had forgotten it: marks and accesses that
/// wait for an answer. Its directory and its slot are its server's.
pub async fn let_go_of_whole(kept: &KeptFiles, number: u64) -> Result<(), CloneError> {
    let group = Group::from_descriptor(copy_of(kept, &kept_name(number, "group"))?);
    blocking(move || group.let_go(LINGER)).await
}

/// Whether this directory is that of a whole server; it says so of somebody else's, too.
pub fn is_whole(target: &Path) -> bool {
    state_without_service(target) == CloneState::Whole
}
