//! Checkpoints of a server whose pages cannot be dropped because they are not on disk yet.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::session::{Reach, Session};
use crate::InstanceName;

/// Between two of them: each writes all that is dirty, which the server would rather spread.
const PAUSE: Duration = Duration::from_secs(30);

/// Asks for checkpoints, on a connection of its own: the server answers when it is done, and the figures must not wait
/// for that.
pub(super) struct Checkpoints {
    instance: InstanceName,
    session: Arc<Session>,
    last: Mutex<Option<Instant>>,
}

impl Checkpoints {
    pub(super) fn new(instance: InstanceName, reach: Reach) -> Checkpoints {
        let session = Arc::new(Session::new(instance.clone(), reach));
        Checkpoints { instance, session, last: Mutex::new(None) }
    }

    /// Asks for one, unless one was asked for a moment ago, and does not wait for it.
    pub(super) fn ask(&self) {
        {
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            if last.is_some_and(|last| last.elapsed() < PAUSE) {
                return;
            }
            *last = Some(Instant::now());
        }
        let (session, instance) = (Arc::clone(&self.session), self.instance.clone());
        tokio::spawn(async move {
            // The time limit of the session ends our waiting, not the checkpoint.
            let asked =
                session.run("write its pages", |client| async move { client.batch_execute("CHECKPOINT").await }).await;
            match asked {
                Ok(()) => tracing::info!(%instance, "memory: dirty pages were written, so that they can be dropped"),
                Err(error) => {
                    tracing::info!(%instance, %error, "memory: the checkpoint did not end yet or is not allowed")
                }
            }
        });
    }
}
