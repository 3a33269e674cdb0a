//! What an earlier router left running on the leader.
//!
//! A router may be gone while a server process still executes a COMMIT that it sent. Such a transaction knows nothing
//! of the next router's tripwire: committed after that one's first gate, it could undo what an epoch has shown. So its
//! process is ended, and has ended, before anybody is served. Only serializable transactions matter; they are found by
//! the SIREAD locks of what they have read, whatever name their client gave itself.

use std::time::{Duration, Instant};

use crate::backend::Backend;
use crate::error::RouterError;

/// How long server processes may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// Time between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

const END: &str = "SELECT pid, pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity \
     WHERE backend_type = 'client backend' AND pid <> pg_catalog.pg_backend_pid() AND xact_start IS NOT NULL \
     AND (application_name = 'onecopy session' \
     OR pid IN (SELECT pid FROM pg_catalog.pg_locks WHERE mode = 'SIReadLock'))";

/// Ends the serializable transactions that run on the leader, asked through `leader`. Call it before the first client.
///
/// # Errors
/// [`RouterError::OrphanedTransactions`] when one does not end in time; [`RouterError::Leader`] when the leader is
/// lost.
pub async fn end_transactions(leader: &mut Backend) -> Result<(), RouterError> {
    let deadline = Instant::now() + END_TIMEOUT;
    loop {
        let rows = leader.rows(END).await?;
        let processes: Vec<String> = rows.into_iter().filter_map(|row| row.into_iter().next()?).collect();
        if processes.is_empty() {
            return Ok(());
        }
        tracing::info!(?processes, "ends transactions that an earlier router left");
        if Instant::now() > deadline {
            return Err(RouterError::OrphanedTransactions {
                server: leader.server.name.clone(),
                processes: processes.join(", "),
            });
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}
