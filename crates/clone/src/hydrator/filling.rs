//! Filling what nobody asks for: what is hot first.

use std::sync::Arc;
use std::time::Duration;

use super::clone_job::{CloneJob, Content, Running};
use super::{Hydrator, ending};
use crate::fill::Background;
use crate::image::FileNumber;
use crate::plan::Warm;
use crate::{ByteRange, CloneError, warm};

/// The background begins at the latest after this, hot pages known or not.
pub(super) const HOT_TIMEOUT: Duration = Duration::from_secs(5);

impl Hydrator {
    /// Begins to fill a clone's files, in the background.
    pub(super) fn fill_in_background(self: &Arc<Self>, clone: Arc<CloneJob>, running: Arc<Running>) {
        let hydrator = Arc::clone(self);
        tokio::spawn(async move {
            let hot = hydrator.hot_ranges(&clone, &running).await;
            if let Err(error) = start(&running, hot) {
                ending::discard(hydrator, clone, format!("it cannot be filled: {error}")).await;
            }
        });
    }

    /// What the source uses most; nothing where that is not wanted, or not found out in time.
    async fn hot_ranges(&self, clone: &CloneJob, running: &Running) -> Vec<(FileNumber, ByteRange)> {
        let source = &clone.plan.source;
        if clone.plan.fill.warm == Warm::Off {
            return Vec::new();
        }
        let hot = async {
            match &running.origin {
                Content::Local(_) => {
                    warm::hot_ranges(&source.connection, running.filling.image(), &source.data_directory).await
                }
                Content::Remote(origin) => origin.hot_ranges().await,
            }
        };
        tokio::time::timeout(HOT_TIMEOUT, hot).await.unwrap_or_else(|_| {
            tracing::warn!("what is hot on the source was not found out in time: all is filled in the files' order");
            Vec::new()
        })
    }
}

fn start(running: &Arc<Running>, hot: Vec<(FileNumber, ByteRange)>) -> Result<(), CloneError> {
    let (group, origin, filling) = (Arc::clone(&running.group), running.origin.clone(), Arc::clone(&running.filling));
    let on_file_whole = move |file| {
        // A mark that stays is removed with all others at the end.
        if let Err(error) = group.unmark_file(filling.file(file)) {
            tracing::debug!(%error, "a mark stays for now");
        }
        origin.release(file);
    };
    let background = Background::start(Arc::clone(&running.filling), hot, Arc::clone(&running.limiter), on_file_whole)?;
    if let Some(threads) = running.lock_threads().as_mut() {
        threads.background = Some(background);
    }
    Ok(())
}
