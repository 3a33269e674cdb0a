//! What a server says about replication.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_postgres::{Client, Row};

use crate::{Lsn, PostgresError, Server};

const ACTION: &str = "read the replication state";

/// A server's part in replication, now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplicationState {
    /// The server takes updates.
    Primary {
        /// End of the write-ahead log that is written.
        current: Lsn,
        /// The timeline that it writes.
        timeline: u32,
        /// Standbys that are connected, in order of their names.
        standbys: Vec<ConnectedStandby>,
    },
    /// The server is in recovery and follows another one.
    Standby {
        /// Received from the primary and flushed; none when nothing was received since the start.
        received: Option<Lsn>,
        /// Replayed; readers see everything up to here.
        replayed: Option<Lsn>,
        /// Received and not yet replayed, in bytes.
        lag_bytes: u64,
        /// Age of the last replayed commit; none before the first. Grows when the primary is idle.
        replayed_commit_age: Option<Duration>,
        /// `pg_stat_wal_receiver.status`; none when no receiver runs.
        receiver_status: Option<String>,
    },
}

/// A row of `pg_stat_replication`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectedStandby {
    /// `application_name` of the standby.
    pub name: String,
    /// `startup`, `catchup`, `streaming`, `backup` or `stopping`.
    pub state: String,
    /// `async`, `potential`, `sync` or `quorum`.
    pub sync_state: String,
    /// Sent to it.
    pub sent: Option<Lsn>,
    /// Flushed by it.
    pub flushed: Option<Lsn>,
    /// Replayed by it.
    pub replayed: Option<Lsn>,
    /// Written by the primary and not yet replayed there, in bytes.
    pub lag_bytes: u64,
}

impl ReplicationState {
    /// Asks the server behind this connection.
    ///
    /// # Errors
    /// [`PostgresError::Sql`], [`PostgresError::UnexpectedAnswer`].
    pub async fn ask(client: &Client) -> Result<ReplicationState, PostgresError> {
        let row = client.query_one("SELECT pg_is_in_recovery()", &[]).await.map_err(PostgresError::sql(ACTION))?;
        if row.get(0) { ask_standby(client).await } else { ask_primary(client).await }
    }
}

impl Server {
    /// Its part in replication, now.
    ///
    /// # Errors
    /// [`PostgresError::Connect`], [`PostgresError::Sql`].
    pub async fn replication_state(&self) -> Result<ReplicationState, PostgresError> {
        ReplicationState::ask(&self.socket_connection().connect().await?).await
    }
}

async fn ask_primary(client: &Client) -> Result<ReplicationState, PostgresError> {
    const POSITION: &str =
        "SELECT lsn::text, substr(pg_walfile_name(lsn), 1, 8) FROM (SELECT pg_current_wal_lsn()) AS now (lsn)";
    const STANDBYS: &str =
        "SELECT application_name, state, sync_state, sent_lsn::text, flush_lsn::text, replay_lsn::text
        FROM pg_stat_replication WHERE state IS NOT NULL ORDER BY application_name, pid";
    // First the standbys: a position that is read later is never behind theirs.
    let rows = client.query(STANDBYS, &[]).await.map_err(PostgresError::sql(ACTION))?;
    let row = client.query_one(POSITION, &[]).await.map_err(PostgresError::sql(ACTION))?;
    let current = lsn(&row, 0)?.unwrap_or(Lsn::INVALID);
    let timeline: String = row.get(1);
    let unexpected = || PostgresError::UnexpectedAnswer { action: ACTION, answer: timeline.clone() };
    let standbys = rows.iter().map(|row| connected_standby(row, current)).collect::<Result<_, _>>()?;
    Ok(ReplicationState::Primary {
        current,
        timeline: u32::from_str_radix(&timeline, 16).map_err(|_| unexpected())?,
        standbys,
    })
}

fn connected_standby(row: &Row, current: Lsn) -> Result<ConnectedStandby, PostgresError> {
    let text = |column| row.get::<_, Option<String>>(column).unwrap_or_default();
    let replayed = lsn(row, 5)?;
    Ok(ConnectedStandby {
        name: text(0),
        state: text(1),
        sync_state: text(2),
        sent: lsn(row, 3)?,
        flushed: lsn(row, 4)?,
        replayed,
        lag_bytes: current.bytes_since(replayed.unwrap_or(Lsn::INVALID)),
    })
}

async fn ask_standby(client: &Client) -> Result<ReplicationState, PostgresError> {
    const QUERY: &str = "SELECT pg_last_wal_receive_lsn()::text, pg_last_wal_replay_lsn()::text,
        extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp())::float8,
        (SELECT status FROM pg_stat_wal_receiver)";
    let row = client.query_one(QUERY, &[]).await.map_err(PostgresError::sql(ACTION))?;
    let (received, replayed) = (lsn(&row, 0)?, lsn(&row, 1)?);
    Ok(ReplicationState::Standby {
        received,
        replayed,
        lag_bytes: received.unwrap_or_default().bytes_since(replayed.unwrap_or_default()),
        // Negative when the clocks of the two machines differ: as young as can be.
        replayed_commit_age: row
            .get::<_, Option<f64>>(2)
            .map(|age| Duration::try_from_secs_f64(age).unwrap_or_default()),
        receiver_status: row.get(3),
    })
}

fn lsn(row: &Row, column: usize) -> Result<Option<Lsn>, PostgresError> {
    let text: Option<String> = row.get(column);
    let parsed = text.map(|text| text.parse::<Lsn>().map_err(|_| text)).transpose();
    parsed.map_err(|answer| PostgresError::UnexpectedAnswer { action: ACTION, answer })
}
