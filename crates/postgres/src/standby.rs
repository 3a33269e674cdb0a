//! Following a primary, and ending that.

use std::path::Path;
use std::time::Duration;

use tokio_postgres::error::SqlState;

use crate::beneath::Directory;
use crate::{ConnectionParameters, Lsn, PostgresError, Server, configuration_files};

impl Server {
    /// Makes a running standby a primary and waits until it takes updates; returns where its new timeline begins.
    ///
    /// # Errors
    /// [`PostgresError::Sql`], also when it is no standby; [`PostgresError::UnexpectedAnswer`] when recovery does not
    /// end in time.
    pub async fn promote(&self, timeout: Duration) -> Result<Lsn, PostgresError> {
        const ACTION: &str = "promote the standby";
        let client = self.socket_connection().connect().await?;
        let seconds = i32::try_from(timeout.as_secs().max(1)).unwrap_or(i32::MAX);
        let row = client.query_one("SELECT pg_promote(true, $1)", &[&seconds]).await;
        if !row.map_err(PostgresError::sql(ACTION))?.get::<_, bool>(0) {
            let answer = format!("still in recovery after {seconds} s");
            return Err(PostgresError::UnexpectedAnswer { action: ACTION, answer });
        }
        configuration_files::remove_standby(self.data_directory())?;
        let row = client.query_one("SELECT substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8)", &[]).await;
        let timeline: String = row.map_err(PostgresError::sql(ACTION))?.get(0);
        let name = Path::new("pg_wal").join(format!("{timeline}.history"));
        let read = Directory::open(self.data_directory()).and_then(|directory| directory.read_to_string(&name));
        let history = read.map_err(PostgresError::file("read", self.data_directory().join(&name)))?;
        timeline_start(&history).ok_or(PostgresError::UnexpectedAnswer { action: ACTION, answer: history })
    }

    /// Makes a physical replication slot that keeps the log from now on; one that exists is left as it is.
    ///
    /// # Errors
    /// [`PostgresError::Sql`].
    pub async fn create_slot(&self, name: &str) -> Result<(), PostgresError> {
        create_slot(&self.socket_connection(), name).await
    }

    /// Drops a physical replication slot; one that does not exist is dropped already.
    ///
    /// # Errors
    /// [`PostgresError::Sql`], also while a standby uses it.
    pub async fn drop_slot(&self, name: &str) -> Result<(), PostgresError> {
        drop_slot(&self.socket_connection(), name).await
    }
}

/// Makes a slot on any server; one that exists is left as it is.
pub(crate) async fn create_slot(server: &ConnectionParameters, name: &str) -> Result<(), PostgresError> {
    let client = server.connect().await?;
    match client.execute("SELECT pg_create_physical_replication_slot($1, true)", &[&name]).await {
        Err(error) if error.code() != Some(&SqlState::DUPLICATE_OBJECT) => {
            Err(PostgresError::sql("create a replication slot")(error))
        }
        _ => Ok(()),
    }
}

/// Drops a physical replication slot of any server; one that does not exist is dropped already. One for logical
/// replication is somebody else's, whatever its name.
pub(crate) async fn drop_slot(server: &ConnectionParameters, name: &str) -> Result<(), PostgresError> {
    let client = server.connect().await?;
    const STATEMENT: &str = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
        WHERE slot_name = $1 AND slot_type = 'physical'";
    match client.execute(STATEMENT, &[&name]).await {
        Err(error) if error.code() != Some(&SqlState::UNDEFINED_OBJECT) => {
            Err(PostgresError::sql("drop a replication slot")(error))
        }
        _ => Ok(()),
    }
}

/// Where the last timeline begins, from the last line of a history file: parent timeline, position, reason.
fn timeline_start(history: &str) -> Option<Lsn> {
    let last = history.lines().rfind(|line| !line.trim().is_empty() && !line.starts_with('#'))?;
    last.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_a_history_counts() {
        let history = "1\t0/3000060\tno recovery target specified\n\n2\t0/50000A0\tno recovery target specified\n";
        assert_eq!(timeline_start(history), Some(Lsn(0x0500_00A0)));
        assert_eq!(timeline_start(""), None);
        assert_eq!(timeline_start("nonsense\n"), None);
    }
}
