//! A session that asked for one server waits while that server is out of the epochs.
//!
//! A follower that misses a gate's deadline, on a busy machine or while it replays a new database, serves no reads
//! until it has caught up. Sessions that leave the choice to the router do not notice; one with `onecopy.server` gets
//! 57P03 and shall try again.

use std::time::{Duration, Instant};

use tokio_postgres::Error;
use tokio_postgres::error::SqlState;

/// How long a server may stay away.
const ABSENCE_MAX: Duration = Duration::from_secs(60);

/// How long to wait before trying again.
const PAUSE: Duration = Duration::from_millis(50);

/// Until when one thing is tried again.
pub struct RetryDeadline {
    ends_at: Instant,
}

impl RetryDeadline {
    /// The whole time from now on.
    pub fn new() -> RetryDeadline {
        RetryDeadline { ends_at: Instant::now() + ABSENCE_MAX }
    }

    /// Waits a moment when `error` says that the server is away; then it is time for the next attempt.
    ///
    /// # Errors
    /// `error`, when it says anything else or the server has been away for too long.
    pub async fn wait_or_fail(&self, error: anyhow::Error) -> anyhow::Result<()> {
        if !is_away(&error) || Instant::now() >= self.ends_at {
            return Err(error);
        }
        tokio::time::sleep(PAUSE).await;
        Ok(())
    }
}

/// Runs `attempt`, and again while its server is away.
///
/// # Errors
/// As [`RetryDeadline::wait_or_fail`].
pub async fn until_back<T>(mut attempt: impl AsyncFnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let deadline = RetryDeadline::new();
    loop {
        match attempt().await {
            Ok(outcome) => return Ok(outcome),
            Err(error) => deadline.wait_or_fail(error).await?,
        }
    }
}

fn is_away(error: &anyhow::Error) -> bool {
    let code = error.chain().find_map(|cause| cause.downcast_ref::<Error>()).and_then(Error::code);
    code == Some(&SqlState::CANNOT_CONNECT_NOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn other_errors_are_not_waited_for() {
        let mut attempts = 0;
        let outcome: anyhow::Result<()> = until_back(async || {
            attempts += 1;
            anyhow::bail!("the disk is full")
        })
        .await;
        assert_eq!((outcome.unwrap_err().to_string(), attempts), ("the disk is full".to_owned(), 1));
    }
}
