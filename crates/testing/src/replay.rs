//! Waiting for a standby.

use anyhow::{Context, ensure};
use tokio_postgres::Client;

use crate::wait::until_async;

/// Waits until `standby` has replayed all that `primary` has flushed by now: all that is committed there. `primary` may
/// be a standby itself; what it has replayed counts then.
///
/// # Errors
///
/// What a server said.
///
/// # Panics
///
/// When it is not there after [`crate::WAIT_MAX`].
pub async fn wait_replayed(primary: &Client, standby: &Client) -> anyhow::Result<()> {
    // Not the insert position: nobody flushes what is not committed, so it may be long in coming.
    let position = "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() \
                    ELSE pg_current_wal_flush_lsn() END::text";
    let position: String = primary.query_one(position, &[]).await.context("the primary's position")?.get(0);
    let question = "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn";
    let mut failed = None;
    until_async(&format!("the standby has replayed {position}"), async || {
        match standby.query_one(question, &[&position]).await {
            Ok(row) => row.get::<_, Option<bool>>(0) == Some(true),
            Err(error) => {
                failed = Some(error);
                true
            }
        }
    })
    .await;
    ensure!(failed.is_none(), "the standby's position: {failed:?}");
    Ok(())
}
