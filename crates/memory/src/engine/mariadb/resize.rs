//! Resizing: one statement at a time, in a client of its own, because it may last as long as dirty pages are written.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::client::{Client, MariaDbAccess};
use crate::{Bytes, InstanceName, Kind, MemoryError};

/// A resize that lasts longer is given up; the server then goes on by itself or takes its old size.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(1800);

/// Gives the server its sizes. Clones are the same.
#[derive(Clone)]
pub(super) struct Resizer {
    shared: Arc<Shared>,
}

struct Shared {
    access: MariaDbAccess,
    instance: InstanceName,
    kind: Kind,
    state: Mutex<State>,
    /// Counts the sizes that were given or refused, so that one can wait for its own.
    finished: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    /// Sizes wished for so far.
    wishes: u64,
    /// The last one; a wish that a newer one overtakes is never sent.
    wish: Option<(u64, Bytes)>,
    /// Whether a task works on them.
    working: bool,
    /// Why the last one failed.
    failure: Option<String>,
}

impl Resizer {
    pub(super) fn new(access: MariaDbAccess, instance: InstanceName, kind: Kind) -> Resizer {
        let shared = Shared { access, instance, kind, state: Mutex::default(), finished: watch::Sender::new(0) };
        Resizer { shared: Arc::new(shared) }
    }

    /// Sends a size, and waits for the server's answer at most `patience`: a size that is refused is refused at once.
    /// The work goes on when nobody waits.
    ///
    /// # Errors
    /// [`MemoryError::Statement`] with the server's words.
    pub(super) async fn resize(&self, target_bytes: Bytes, patience: Duration) -> Result<(), MemoryError> {
        let mut finished = self.shared.finished.subscribe();
        let number = {
            let mut state = self.lock();
            state.wishes += 1;
            state.wish = Some((state.wishes, target_bytes));
            if !state.working {
                state.working = true;
                tokio::spawn(self.clone().work());
            }
            state.wishes
        };
        let done = finished.wait_for(|last| *last >= number);
        match tokio::time::timeout(patience, done).await {
            Err(_) => Ok(()),
            Ok(_) => match self.failure() {
                None => Ok(()),
                Some(reason) => {
                    let instance = self.shared.instance.clone();
                    Err(MemoryError::Statement { instance, action: "take this size", reason })
                }
            },
        }
    }

    /// Why the last size was not taken; none while one is on its way.
    pub(super) fn failure(&self) -> Option<String> {
        self.lock().failure.clone()
    }

    /// Whether a size is on its way.
    pub(super) fn is_working(&self) -> bool {
        self.lock().working
    }

    async fn work(self) {
        loop {
            let (number, target_bytes) = {
                let mut state = self.lock();
                let Some(wish) = state.wish.take() else {
                    state.working = false;
                    return;
                };
                state.failure = None;
                wish
            };
            let failure = self.send(target_bytes).await.err().map(|error| match error {
                MemoryError::Program { output, .. } => output,
                other => other.to_string(),
            });
            if let Some(reason) = &failure {
                tracing::warn!(
                    instance = %self.shared.instance,
                    target_bytes,
                    reason,
                    "memory: the size was not taken"
                );
            }
            self.lock().failure = failure;
            self.shared.finished.send_replace(number);
        }
    }

    async fn send(&self, target_bytes: Bytes) -> Result<(), MemoryError> {
        let mut client = Client::start(&self.shared.access, &self.shared.instance, self.shared.kind)?;
        let statement = format!("SET GLOBAL innodb_buffer_pool_size = {target_bytes};");
        match tokio::time::timeout(RESIZE_TIMEOUT, client.ask(&statement)).await {
            Ok(answer) => answer.map(|_| ()),
            Err(_) => Err(MemoryError::NoAnswer {
                instance: self.shared.instance.clone(),
                action: "resize its pool",
                waited: RESIZE_TIMEOUT,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
