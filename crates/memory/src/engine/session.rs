//! One connection to a PostgreSQL server that is kept, and made again when it is lost.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onecopy_postgres::ConnectionParameters;
use tokio_postgres::{Client, Error};

use crate::{InstanceName, MemoryError};

/// Between two tries to connect: doubled with each failure from the first to the second.
const RETRY_MIN: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// A statement of ours that takes longer is ended by the server itself: also when we are gone.
const SETUP: &str =
    "SET statement_timeout = '5s'; SET lock_timeout = '5s'; SET idle_in_transaction_session_timeout = '10s'";

/// What the server's list of connections shows.
const APPLICATION_NAME: &str = "onecopy memory";

/// How a server is reached: asked before each try to connect, since it may listen elsewhere after a restart.
#[derive(Clone)]
pub struct Reach(Arc<dyn Fn() -> Result<ConnectionParameters, String> + Send + Sync>);

impl Reach {
    /// As `find` says each time, or why not. It must not take long: it reads a file at most.
    pub fn found_by(find: impl Fn() -> Result<ConnectionParameters, String> + Send + Sync + 'static) -> Reach {
        Reach(Arc::new(find))
    }

    /// Where the server listens now.
    ///
    /// # Errors
    /// Why that is not known.
    pub fn find(&self) -> Result<ConnectionParameters, String> {
        (self.0)()
    }
}

impl From<&ConnectionParameters> for Reach {
    fn from(parameters: &ConnectionParameters) -> Reach {
        let parameters = parameters.clone();
        Reach::found_by(move || Ok(parameters.clone()))
    }
}

/// A server, its connection and what came of the last tries.
pub(super) struct Session {
    instance: InstanceName,
    reach: Reach,
    /// Held while connecting: several who want a connection share one try.
    connecting: tokio::sync::Mutex<()>,
    /// Locked for moments only, never over an await.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    client: Option<Arc<Client>>,
    failures: u32,
    /// Before this nothing is tried; with the reason of the last failure.
    rest: Option<(Instant, String)>,
}

impl Session {
    pub(super) fn new(instance: InstanceName, reach: Reach) -> Session {
        Session { instance, reach, connecting: tokio::sync::Mutex::new(()), state: Mutex::default() }
    }

    /// Runs statements. `action` is what is wanted, as a verb. Whoever stops waiting leaves an answer behind that
    /// nobody reads: the connection is given up then.
    ///
    /// # Errors
    /// [`MemoryError::Unreachable`], also without a try while the server rests; [`MemoryError::Statement`].
    pub(super) async fn run<T, F>(
        &self,
        action: &'static str,
        work: impl FnOnce(Arc<Client>) -> F,
    ) -> Result<T, MemoryError>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let client = self.client().await?;
        let mut in_use = InUse { session: self, client: &client, answered: false };
        let result = work(Arc::clone(&client)).await;
        // An error of the server leaves the connection as good as before.
        in_use.answered = result.as_ref().err().is_none_or(|error| error.as_db_error().is_some());
        drop(in_use);
        result.map_err(|error| {
            let (instance, reason) = (self.instance.clone(), reason(&error));
            MemoryError::Statement { instance, action, reason }
        })
    }

    async fn client(&self) -> Result<Arc<Client>, MemoryError> {
        let _connecting = self.connecting.lock().await;
        {
            let state = self.lock();
            if let Some(client) = state.client.as_ref().filter(|client| !client.is_closed()) {
                return Ok(Arc::clone(client));
            }
            if let Some((until, reason)) = &state.rest
                && Instant::now() < *until
            {
                return Err(self.unreachable(reason.clone()));
            }
        }
        match self.connect().await {
            Ok(client) => {
                let client = Arc::new(client);
                *self.lock() = State { client: Some(Arc::clone(&client)), failures: 0, rest: None };
                Ok(client)
            }
            Err(reason) => {
                let mut state = self.lock();
                state.client = None;
                let pause = RETRY_MIN.saturating_mul(1 << state.failures.min(10)).min(RETRY_MAX);
                state.failures = state.failures.saturating_add(1);
                state.rest = Some((Instant::now() + pause, reason.clone()));
                Err(self.unreachable(reason))
            }
        }
    }

    async fn connect(&self) -> Result<Client, String> {
        let mut parameters = self.reach.find()?;
        parameters.application_name.get_or_insert_with(|| APPLICATION_NAME.to_owned());
        let client = parameters.connect().await.map_err(|error| error.to_string())?;
        client.batch_execute(SETUP).await.map_err(|error| reason(&error))?;
        Ok(client)
    }

    fn unreachable(&self, reason: String) -> MemoryError {
        MemoryError::Unreachable { instance: self.instance.clone(), reason }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection in use; unless the answer came, it is given up.
struct InUse<'a> {
    session: &'a Session,
    client: &'a Arc<Client>,
    answered: bool,
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        if !self.answered {
            let mut state = self.session.lock();
            // Another task may have made a new one meanwhile.
            if state.client.as_ref().is_some_and(|kept| Arc::ptr_eq(kept, self.client)) {
                state.client = None;
            }
        }
    }
}

/// What the server said, with its detail and hint.
fn reason(error: &Error) -> String {
    let Some(said) = error.as_db_error() else {
        let cause = std::error::Error::source(error).map(|cause| format!(": {cause}"));
        return format!("{error}{}", cause.unwrap_or_default());
    };
    let parts = [Some(said.message()), said.detail(), said.hint()];
    let parts: Vec<&str> = parts.into_iter().flatten().collect();
    format!("{} (SQLSTATE {})", parts.join("; "), said.code().code())
}
