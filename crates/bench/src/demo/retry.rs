//! What a careful client runs again.
//!
//! A transaction that ends with 40001 has done nothing, and may end well the next time. A follower that misses a gate's
//! deadline, on a busy machine or while it replays a new database, serves no reads until it has caught up: sessions
//! that leave the choice to the router do not notice; one with `onecopy.server` gets 57P03 and shall try again.

use std::time::{Duration, Instant};

use tokio_postgres::Error;
use tokio_postgres::error::SqlState;

/// How long one thing is tried again: a server that stays away, or other transactions that stand in the way.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// How long to wait for a server that is away.
const PAUSE: Duration = Duration::from_millis(50);

/// Longest pause after a serialization failure: a millisecond at first, then longer; a random part of it.
const BACK_OFF_MAX_MS: u64 = 20;

/// Until when one thing is tried again.
pub struct RetryDeadline {
    ends_at: Instant,
    failures: u32,
}

impl RetryDeadline {
    /// The whole time from now on.
    pub fn new() -> RetryDeadline {
        RetryDeadline { ends_at: Instant::now() + RETRY_MAX, failures: 0 }
    }

    /// Waits when `error` says that the server is away, or that the transaction was not serializable; then it is time
    /// for the next attempt.
    ///
    /// # Errors
    /// `error`, when it says anything else or has come for too long.
    pub async fn wait_or_fail(&mut self, error: anyhow::Error) -> anyhow::Result<()> {
        let code = error.chain().find_map(|cause| cause.downcast_ref::<Error>()).and_then(Error::code);
        let pause = match code {
            Some(code) if *code == SqlState::CANNOT_CONNECT_NOW => PAUSE,
            Some(code) if *code == SqlState::T_R_SERIALIZATION_FAILURE => {
                let longest_ms = (1 << self.failures.min(10)).min(BACK_OFF_MAX_MS);
                Duration::from_millis(rand::random_range(0..=longest_ms))
            }
            _ => return Err(error),
        };
        if Instant::now() >= self.ends_at {
            return Err(error.context(format!("given up after {} s", RETRY_MAX.as_secs())));
        }
        self.failures += 1;
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

/// What a future gives that ends well, made anew as [`RetryDeadline`] says; the tally has how often. A function would
/// borrow for longer than a task that may move to another thread can tell.
macro_rules! again {
    ($tally:expr, $attempt:expr) => {{
        let mut deadline = $crate::demo::retry::RetryDeadline::new();
        loop {
            match $attempt.await {
                Ok(outcome) => break outcome,
                Err(error) => deadline.wait_or_fail(error.into()).await?,
            }
            $tally.retries.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }};
}

pub(super) use again;

/// Runs `attempt`, and again as [`RetryDeadline`] says.
///
/// # Errors
/// As [`RetryDeadline::wait_or_fail`].
pub async fn until_back<T>(mut attempt: impl AsyncFnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let mut deadline = RetryDeadline::new();
    loop {
        match attempt().await {
            Ok(outcome) => return Ok(outcome),
            Err(error) => deadline.wait_or_fail(error).await?,
        }
    }
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
