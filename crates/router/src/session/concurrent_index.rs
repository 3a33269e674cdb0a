//! Indexes that are built CONCURRENTLY, and snapshots on followers that must not use them.
//!
//! Such an index lacks what no snapshot sees that is as new as PostgreSQL's last look at the table. So PostgreSQL waits
//! for all older snapshots before it lets anybody use it (WaitForOlderSnapshots() in its indexcmds.c), but for those of
//! its own server only: a follower replays that the index is valid while a transaction there still reads by an older
//! snapshot. Therefore the router holds a snapshot of its own on the leader while the statement runs. Once PostgreSQL
//! waits for that, it has looked at the table for the last time: all epochs up to then are doomed, and then the
//! snapshot is closed. REINDEX of several indexes waits once for each of them.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;

use crate::backend::{Backend, BackendError, Credentials, Purpose, ServerProcess};
use crate::database::Database;

const OPEN_SNAPSHOT: [&str; 2] = ["BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "SELECT 1"];

/// A row, if somebody waits for the end of the transaction that asks.
const IS_WAITED_FOR: &str = "SELECT 1 FROM pg_catalog.pg_locks own JOIN pg_catalog.pg_locks other USING (virtualxid) \
     WHERE own.locktype = 'virtualxid' AND own.granted AND own.pid = pg_catalog.pg_backend_pid() \
     AND other.locktype = 'virtualxid' AND NOT other.granted LIMIT 1";

/// How often the leader is asked for that.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Keeps an index from being used before all epochs are doomed that are older. Ends when it is dropped.
#[derive(Debug)]
pub(super) struct OlderSnapshots(JoinHandle<()>);

impl Drop for OlderSnapshots {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl OlderSnapshots {
    /// To be called before `builder` is sent its statement.
    ///
    /// # Errors
    /// The leader gives no snapshot.
    pub(super) async fn guard(
        database: &Arc<Database>,
        builder: ServerProcess,
    ) -> Result<OlderSnapshots, BackendError> {
        let leader = database.servers.leader();
        let credentials = Credentials::of_router(leader);
        let connect = async || Backend::connect(leader, &database.name, &credentials, Purpose::Epoch).await;
        let mut holder = connect().await?;
        holder.pipeline(&OPEN_SNAPSHOT).await?;
        let spare = connect().await?;
        let database = database.clone();
        Ok(OlderSnapshots(tokio::spawn(async move {
            let Err(error) = doom_when_waited_for(&database, holder, spare).await;
            // PostgreSQL waits for nobody now.
            tracing::warn!(database = &*database.name, %error, "an index that is built concurrently is given up");
            database.commit_barrier.note_in_doubt(builder);
        })))
    }
}

/// Runs until the task is aborted.
async fn doom_when_waited_for(
    database: &Database,
    mut holder: Backend,
    mut spare: Backend,
) -> Result<std::convert::Infallible, BackendError> {
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        if holder.rows(IS_WAITED_FOR).await?.is_empty() {
            continue;
        }
        // For the next index: PostgreSQL looks at its table after this.
        spare.pipeline(&OPEN_SNAPSHOT).await?;
        database.epochs.doom();
        holder.rows("ROLLBACK").await?;
        std::mem::swap(&mut holder, &mut spare);
    }
}
