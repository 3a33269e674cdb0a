//! The source's hot pages, asked for while a clone is made, so that its start does not wait for them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use onecopy_postgres::{ConnectionParameters, ServerOptions};
use tokio::sync::watch;

use super::{HotPages, autoprewarm};
use crate::CloneError;

/// How long a clone that could be started waits for the answer: a source with very large shared buffers takes longer,
/// and a clone that answers is worth more than a warm one.
const WAIT_MAX: Duration = Duration::from_millis(150);

/// A clone has the source's settings, so also as many buffers; the module stops when they are full.
const BUFFERS_MAX: usize = usize::MAX;

/// The answer; none while the source is still asked.
type Answer = Option<Result<Arc<HotPages>, String>>;

/// A question to a source, whose answer serves all clones of one order.
#[derive(Debug, Clone)]
pub struct Prewarming(watch::Receiver<Answer>);

impl Prewarming {
    /// Asks, and returns at once. Must be called inside a runtime.
    pub fn begin(source: ConnectionParameters) -> Prewarming {
        let (sender, receiver) = watch::channel(None);
        tokio::spawn(async move {
            let pages = HotPages::of_source(&source).await;
            sender.send_replace(Some(pages.map(Arc::new).map_err(|error: CloneError| error.to_string())));
        });
        Prewarming(receiver)
    }

    /// Makes a clone's server, which does not run yet, read these pages into its shared buffers when it starts.
    ///
    /// # Errors
    /// In words, why it will not. The clone is as good without.
    pub async fn apply(&self, options: &mut ServerOptions, data_directory: &Path) -> Result<(), String> {
        // Before the file is written: without the module nobody would read it.
        let settings =
            autoprewarm::settings(&options.binaries, &options.settings).map_err(|error| error.to_string())?;
        let mut answer = self.0.clone();
        let known = tokio::time::timeout(WAIT_MAX, answer.wait_for(Option::is_some)).await;
        let known = known.map_err(|_| "its hot pages were not found out in time".to_owned())?;
        let pages = match known.as_deref() {
            Ok(Some(Ok(pages))) => Arc::clone(pages),
            Ok(Some(Err(reason))) => return Err(reason.clone()),
            _ => return Err("nobody asks the source any more".to_owned()),
        };
        let written = autoprewarm::write(&pages, &options.user, data_directory, BUFFERS_MAX);
        written.map_err(|error| error.to_string())?;
        options.settings = settings;
        Ok(())
    }
}
