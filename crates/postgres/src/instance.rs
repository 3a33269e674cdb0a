//! A server that is kept running, wherever it runs: as a process of this host, or in a machine of its own.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use crate::{ConnectionParameters, PostgresError, ReplicationState, Server, StartOutcome, StopMode, standby};

/// What a method of [`Instance`] gives that takes its time.
pub type InstanceFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A server as its [`crate::Supervisor`] needs it. All methods take `&self`: share it in an `Arc`.
pub trait Instance: fmt::Debug + Send + Sync {
    /// Where it is, for messages.
    fn place(&self) -> String;

    /// Starts it and waits until it accepts connections; or takes over one that runs. A server that is not ready in
    /// time goes on starting: call it again to wait on.
    fn start(&self) -> InstanceFuture<'_, Result<StartOutcome, PostgresError>>;

    /// Stops it and waits until nothing of it runs; one that does not run is stopped already.
    fn stop(&self, mode: StopMode) -> InstanceFuture<'_, Result<(), PostgresError>>;

    /// Waits until it does not run any more, for whatever reason.
    fn wait_exit(&self) -> InstanceFuture<'_, ()>;

    /// The process of this host that it runs in (its postmaster, or its machine), while it runs.
    fn process_id(&self) -> Option<u32>;

    /// How its superuser reaches it, database `postgres`.
    fn administration(&self) -> ConnectionParameters;

    /// The length of its log in bytes.
    fn log_end(&self) -> u64;

    /// Why it does not run any more, as far as it said so after its log had this length.
    fn last_words(&self, log_start: u64) -> String;

    /// Cuts its log when that has become too long.
    ///
    /// # Errors
    /// [`PostgresError::File`].
    fn bound_log(&self) -> Result<(), PostgresError>;

    /// It as a process of this host, whose data directory and memory can be reached; none where it is not one.
    fn into_process(self: Arc<Self>) -> Option<Arc<Server>> {
        None
    }
}

impl dyn Instance {
    /// Its part in replication, now.
    ///
    /// # Errors
    /// [`PostgresError::Connect`], [`PostgresError::Sql`].
    pub async fn replication_state(&self) -> Result<ReplicationState, PostgresError> {
        ReplicationState::ask(&self.administration().connect().await?).await
    }

    /// Makes a physical replication slot that keeps the log from now on; one that exists is left as it is.
    ///
    /// # Errors
    /// [`PostgresError::Sql`].
    pub async fn create_slot(&self, name: &str) -> Result<(), PostgresError> {
        standby::create_slot(&self.administration(), name).await
    }

    /// Drops a replication slot; one that does not exist is dropped already.
    ///
    /// # Errors
    /// [`PostgresError::Sql`], also while a standby uses it.
    pub async fn drop_slot(&self, name: &str) -> Result<(), PostgresError> {
        standby::drop_slot(&self.administration(), name).await
    }
}

impl Instance for Server {
    fn place(&self) -> String {
        self.data_directory().display().to_string()
    }

    fn start(&self) -> InstanceFuture<'_, Result<StartOutcome, PostgresError>> {
        Box::pin(Server::start(self))
    }

    fn stop(&self, mode: StopMode) -> InstanceFuture<'_, Result<(), PostgresError>> {
        Box::pin(Server::stop(self, mode))
    }

    fn wait_exit(&self) -> InstanceFuture<'_, ()> {
        Box::pin(Server::wait_exit(self))
    }

    fn process_id(&self) -> Option<u32> {
        Server::process_id(self)
    }

    fn administration(&self) -> ConnectionParameters {
        self.socket_connection()
    }

    fn log_end(&self) -> u64 {
        Server::log_end(self)
    }

    fn last_words(&self, log_start: u64) -> String {
        format!("its postmaster died; its log says:\n{}", self.log_complaints_since(log_start))
    }

    fn bound_log(&self) -> Result<(), PostgresError> {
        Server::bound_log(self)
    }

    fn into_process(self: Arc<Self>) -> Option<Arc<Server>> {
        Some(self)
    }
}
