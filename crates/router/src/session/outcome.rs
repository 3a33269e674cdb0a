//! How a unit of work ends, and how often it is tried.

use std::time::Duration;

use crate::wire::SqlError;

/// Tries of an autocommit statement that PostgreSQL refuses with 40001 on the leader.
pub(super) const LEADER_TRIES_MAX: u32 = 5;

/// First pause before such a try; doubled each time.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Why a back end has not what a statement of the client's must find there.
#[derive(Debug)]
pub(super) struct Unfit {
    /// What the client is told.
    pub error: SqlError,
    /// The server has refused it, and the back end is as it was; else the back end is lost.
    pub is_whole: bool,
}

/// How a unit ended, as far as the session goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It is done.
    Done,
    /// An error has been reported.
    Failed,
}
