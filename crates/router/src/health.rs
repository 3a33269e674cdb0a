//! Asks each server, again and again, whether it answers.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Backend, BackendError, Credentials, Purpose};
use crate::config::LiveSettings;
use crate::servers::{Health, Server};
use crate::topology::Role;

/// Time between two probes of a server that is up.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);

/// Bytes of WAL since the beginning, as a number. A commit that waited for its flush is written before any snapshot
/// shows it.
const PROBE_LEADER: &str = "SELECT pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_lsn(), '0/0')::bigint";
const PROBE_FOLLOWER: &str = "SELECT pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_last_wal_replay_lsn(), '0/0')::bigint";

/// Probes `server` until the task is aborted; an answer is waited for at most `server_timeout_ms`.
pub async fn watch(server: Arc<Server>, mut settings: LiveSettings) {
    let credentials = Credentials::of_router(&server);
    let mut connection: Option<Backend> = None;
    loop {
        let milliseconds = settings.borrow().server_timeout_ms;
        let timeout = Duration::from_millis(milliseconds);
        let is_other = async { settings.wait_for(|now| now.server_timeout_ms != milliseconds).await.is_ok() };
        let probed = tokio::select! {
            probed = tokio::time::timeout(timeout, probe(&server, &credentials, &mut connection)) => probed,
            true = is_other => {
                // Its answer may still come.
                connection = None;
                continue;
            }
        };
        let health = match probed {
            Ok(Ok(position)) => {
                server.note_wal_position(position);
                Health::Up
            }
            Ok(Err(error)) => {
                tracing::debug!(server = server.name, %error, "probe");
                connection = None;
                Health::Down
            }
            Err(_) => {
                connection = None;
                Health::Unresponsive
            }
        };
        server.set_health(health);
        tokio::time::sleep(PROBE_INTERVAL).await;
    }
}

/// Asks over the connection that is kept, and over a new one where that has ended: a server that ended one session is
/// not down.
async fn probe(
    server: &Arc<Server>,
    credentials: &Credentials,
    connection: &mut Option<Backend>,
) -> Result<u64, BackendError> {
    if let Some(backend) = connection {
        match wal_position(backend).await {
            Ok(position) => return Ok(position),
            Err(error) => tracing::debug!(server = server.name, %error, "the probe's session has ended"),
        }
    }
    let backend = Backend::connect(server, &server.probe_database, credentials, Purpose::Probe).await?;
    wal_position(connection.insert(backend)).await
}

/// How far the server at the other end has written, or replayed, in bytes of WAL since the beginning.
///
/// # Errors
/// What the server answers instead, or the loss of the connection.
pub async fn wal_position(backend: &mut Backend) -> Result<u64, BackendError> {
    let rows = backend
        .rows(match backend.server.role {
            Role::Leader => PROBE_LEADER,
            Role::Follower => PROBE_FOLLOWER,
        })
        .await?;
    let position = rows.first().and_then(|row| row.first()?.as_deref()?.parse().ok());
    Ok(position.unwrap_or_default())
}
