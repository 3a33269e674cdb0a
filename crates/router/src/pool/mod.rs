//! Back ends for clients: for reads at epochs, shared by all; on the leader, kept by their sessions while there are
//! enough.

mod catalog;
mod leader;
mod queue;
mod reader;
mod readers;
#[cfg(test)]
mod tests;

pub use catalog::CatalogBackend;
pub use leader::LeaderPool;
pub use queue::Slot;
pub use reader::ReaderPool;
pub use readers::ReaderPools;

use std::time::Duration;

use crate::backend::BackendError;
use crate::wire::{SqlError, sqlstate};

/// A back end that nobody used for this long is closed.
pub const IDLE_MAX: Duration = Duration::from_secs(60);

/// Why a session gets no back end.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum PoolError {
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error("the server process that holds this session's state has ended")]
    StateLost,
    #[error("it is not known yet what has become of this session's last commit")]
    InDoubt,
    #[error("all {limit} back ends of {server} are in use")]
    Exhausted { server: String, limit: usize },
}

impl PoolError {
    /// What a client is told of it.
    pub fn to_sql(&self) -> SqlError {
        match self {
            PoolError::Backend(error) => error.to_sql(),
            PoolError::StateLost => SqlError::error(sqlstate::ADMIN_SHUTDOWN, self.to_string()).hint("Connect again."),
            PoolError::InDoubt => SqlError::error(sqlstate::CANNOT_CONNECT_NOW, self.to_string())
                .hint("Try again when the leader is back."),
            PoolError::Exhausted { .. } => SqlError::error(sqlstate::TOO_MANY_CONNECTIONS, self.to_string())
                .hint("Try again, or raise leader_backends_max or reader_backends_max."),
        }
    }
}
