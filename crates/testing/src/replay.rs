//! Waiting for a standby.

use std::time::{Duration, Instant};

use anyhow::Context;
use tokio_postgres::Client;

use crate::WAIT_MAX;

/// Between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// Waits until `standby` has replayed all that `primary` has flushed by now: all that is committed there. `primary` may
/// be a standby itself; what it has replayed counts then. One that is far behind may take as long as it goes on.
///
/// # Errors
///
/// What a server said.
///
/// # Panics
///
/// When it has replayed nothing more for [`WAIT_MAX`].
pub async fn wait_replayed(primary: &Client, standby: &Client) -> anyhow::Result<()> {
    // Not the insert position: nobody flushes what is not committed, so it may be long in coming.
    let position = "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() \
                    ELSE pg_current_wal_flush_lsn() END::text";
    let position: String = primary.query_one(position, &[]).await.context("the primary's position")?.get(0);
    let question = "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn, pg_last_wal_replay_lsn()::text";
    let (mut replayed, mut moved) = (None::<String>, Instant::now());
    loop {
        let asked = tokio::time::timeout(WAIT_MAX, standby.query_one(question, &[&position])).await;
        let row = asked.context("the standby does not answer")?.context("the standby's position")?;
        if row.get::<_, Option<bool>>(0) == Some(true) {
            return Ok(());
        }
        let now: Option<String> = row.get(1);
        if now != replayed {
            (replayed, moved) = (now, Instant::now());
        }
        let waited = moved.elapsed();
        assert!(waited < WAIT_MAX, "waited in vain until the standby has replayed {position}: it is at {replayed:?}");
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}
