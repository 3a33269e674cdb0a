//! Indexes that are built CONCURRENTLY, and snapshots on followers that must not use them.
//!
//! Such an index lacks what no snapshot sees that is as new as PostgreSQL's last look at the table. So PostgreSQL waits
//! for all older snapshots before it lets anybody use it (WaitForOlderSnapshots() in its indexcmds.c), but for those of
//! its own server only: a follower replays that the index is valid while a transaction there still reads by an older
//! snapshot. Therefore the router holds snapshots of its own on the leader while the statement runs. Once PostgreSQL
//! waits for one, it has looked at the table for the last time: all epochs up to then are doomed, and then these
//! snapshots are closed. REINDEX of several indexes waits once for each of them.
//!
//! There are two such snapshots, so that one stands while the other is taken anew, or is lost.

use std::convert::Infallible;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::backend::{Backend, BackendError, Credentials, Purpose, Row};
use crate::database::Database;
use crate::epoch::Epochs;

/// Takes a snapshot, by a connection that no limit of PostgreSQL 17 and later may end.
const OPEN_SNAPSHOT: [&str; 3] = [
    "SELECT pg_catalog.set_config(name, '0', false) FROM pg_catalog.pg_settings WHERE name = 'transaction_timeout'",
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
    "SELECT 1",
];

/// How often the leader is asked whether it waits.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The leader must answer within this.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// An index is built concurrently while this lives.
#[derive(Debug)]
pub(super) struct ConcurrentIndex(JoinHandle<()>);

impl Drop for ConcurrentIndex {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ConcurrentIndex {
    /// To be called before the statement is sent.
    ///
    /// # Errors
    /// The leader gives no snapshot.
    pub(super) async fn begin(database: &Database) -> Result<ConcurrentIndex, BackendError> {
        let leader = database.servers.leader();
        let credentials = Credentials::of_router(leader);
        let open = async || {
            let mut holder = Backend::connect(leader, &database.name, &credentials, Purpose::Index).await?;
            holder.pipeline(&OPEN_SNAPSHOT).await?;
            Ok::<_, BackendError>(holder)
        };
        let both = async { Ok([open().await?, open().await?]) };
        let mut holders = timeout(ANSWER_TIMEOUT, both).await.unwrap_or_else(|_| {
            Err(BackendError::TimedOut { server: leader.name.clone(), milliseconds: ANSWER_TIMEOUT.as_millis() })
        })?;
        let (epochs, name) = (database.epochs.clone(), database.name.clone());
        Ok(ConcurrentIndex(tokio::spawn(async move {
            let Err(error) = doom_when_waited_for(&epochs, &mut holders).await;
            // From here on nobody knows when the index will be valid: no epoch is read until it is, or has failed.
            tracing::warn!(database = &*name, %error, "lost a snapshot that an index built concurrently waits for");
            let _ddl_barrier = epochs.begin_ddl_barrier();
            let _dooming = epochs.begin_dooming();
            drop(holders);
            std::future::pending().await
        })))
    }
}

/// Ends by an error only.
async fn doom_when_waited_for(epochs: &Epochs, holders: &mut [Backend; 2]) -> Result<Infallible, BackendError> {
    // A row, if somebody waits for the end of one of their transactions.
    let [first, second] = &holders;
    let is_waited_for = format!(
        "SELECT 1 FROM pg_catalog.pg_locks own JOIN pg_catalog.pg_locks other USING (virtualxid) \
         WHERE own.pid IN ({}, {}) AND own.granted AND NOT other.granted LIMIT 1",
        first.process().id,
        second.process().id
    );
    loop {
        sleep(LOOK_INTERVAL).await;
        let mut is_waiting = false;
        for holder in holders.iter_mut() {
            is_waiting |= !ask(holder, &[&is_waited_for]).await?.is_empty();
        }
        if is_waiting {
            let [first, second] = holders;
            take_anew(first).await?;
            epochs.doom();
            take_anew(second).await?;
        }
    }
}

async fn take_anew(holder: &mut Backend) -> Result<(), BackendError> {
    let statements: Vec<&str> = std::iter::once("ROLLBACK").chain(OPEN_SNAPSHOT).collect();
    ask(holder, &statements).await?;
    Ok(())
}

/// The rows of the last statement.
async fn ask(holder: &mut Backend, statements: &[&str]) -> Result<Vec<Row>, BackendError> {
    let server = holder.server.name.clone();
    let answer = timeout(ANSWER_TIMEOUT, holder.pipeline(statements)).await;
    let timed_out = |_| BackendError::TimedOut { server, milliseconds: ANSWER_TIMEOUT.as_millis() };
    Ok(answer.map_err(timed_out)??.pop().unwrap_or_default())
}
