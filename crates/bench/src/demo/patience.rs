//! A session that asked for one server waits while that server is out of the epochs.
//!
//! A follower that misses a gate's deadline, on a busy machine or while it replays a new database, serves no reads until
//! it has caught up. Sessions that leave the choice to the router do not notice; one with `onecopy.server` gets 57P03
//! and shall try again.

use std::time::{Duration, Instant};

use tokio_postgres::Error;
use tokio_postgres::error::SqlState;

/// How long a server may stay away.
const ABSENCE_MAX: Duration = Duration::from_secs(15);

/// How long to wait before trying again.
const PAUSE: Duration = Duration::from_millis(50);

/// Runs `attempt`, and again while its server is away.
///
/// # Errors
/// Any other error of `attempt`, and the last one when the server does not come back.
pub async fn until_back<T>(mut attempt: impl AsyncFnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let deadline = Instant::now() + ABSENCE_MAX;
    loop {
        match attempt().await {
            Err(error) if is_away(&error) && Instant::now() < deadline => tokio::time::sleep(PAUSE).await,
            outcome => return outcome,
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
