//! What is looked at again and again: clones that are filled, failed, or too far behind.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::clone_job::{CloneJob, Stage};
use super::{Hydrator, ending};
use crate::recovery::slot::{self, SlotState};

/// How often clones are looked at.
const SUPERVISE_INTERVAL: Duration = Duration::from_millis(50);
/// How often the source is asked what it keeps for them.
const SLOTS_INTERVAL: Duration = Duration::from_secs(1);

/// Finishes what is filled, discards what has failed.
pub async fn supervise(hydrator: Arc<Hydrator>) {
    let filled_bytes = |clone: &CloneJob| Some(clone.running()?.filling.progress().filled_bytes);
    let taken_over = hydrator.clones().into_iter().filter_map(|clone| Some((clone.number, filled_bytes(&clone)?)));
    let mut filled_before: HashMap<u64, u64> = taken_over.collect();
    loop {
        tokio::time::sleep(SUPERVISE_INTERVAL).await;
        for clone in hydrator.clones() {
            let Stage::Running(running) = clone.stage() else { continue };
            let filled_bytes = running.filling.progress().filled_bytes;
            if filled_before.insert(clone.number, filled_bytes) != Some(filled_bytes) {
                hydrator.journal.note_progress();
            }
            // Looked at first: it may be through between this and the next look.
            let background_is_finished = running.background_is_finished();
            if let Some(reason) = running.filling.failure() {
                tokio::spawn(ending::discard(Arc::clone(&hydrator), clone, reason.to_string()));
            } else if running.filling.whole() {
                tokio::spawn(ending::finish(Arc::clone(&hydrator), clone));
            } else if background_is_finished {
                let reason = "the thread that fills it has ended before it was whole".to_owned();
                tokio::spawn(ending::discard(Arc::clone(&hydrator), clone, reason));
            }
        }
        filled_before.retain(|number, _| hydrator.clones().iter().any(|clone| clone.number == *number));
    }
}

/// Discards clones that cannot catch up with their source any more.
pub async fn watch_slots(hydrator: Arc<Hydrator>) {
    loop {
        tokio::time::sleep(SLOTS_INTERVAL).await;
        let running: Vec<_> = hydrator
            .clones()
            .into_iter()
            .filter(|clone| clone.elsewhere.is_none() && matches!(clone.stage(), Stage::Running(_)))
            .collect();
        let Some(first) = running.first() else { continue };
        // All have the same source. While it is down nothing is known, and nothing is lost.
        match first.plan.source.connection.connect().await {
            Ok(client) => {
                for clone in running {
                    watch_slot(&hydrator, &client, clone).await;
                }
            }
            Err(error) => tracing::debug!(%error, "the source does not answer"),
        }
    }
}

async fn watch_slot(hydrator: &Arc<Hydrator>, client: &tokio_postgres::Client, clone: Arc<CloneJob>) {
    match slot::watch(client, &clone.plan.slot, clone.plan.wal_keep_bytes_max).await {
        Ok(SlotState::Keeping { .. }) => {}
        Ok(SlotState::Useless { reason }) => {
            let reason = format!("it cannot catch up: {reason}");
            tokio::spawn(ending::discard(Arc::clone(hydrator), clone, reason));
        }
        Err(error) => tracing::debug!(slot = clone.plan.slot, %error, "a replication slot cannot be looked at"),
    }
}
