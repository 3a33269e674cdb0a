//! What is asked of another host, and how.

use std::path::{Path, PathBuf};

use onecopy_clone::CloneError;
use onecopy_clone::network::client::connect;
use onecopy_clone::network::keys::HostKeys;
use onecopy_clone::network::protocol::{ProtocolError, words};
use onecopy_clone::network::request::{HostAnswer, HostRequest, read_line, write_line};
use onecopy_clone::plan::{FillOptions, Recovery};
use onecopy_clone::service::Progress;
use onecopy_postgres::{AccessRule, ConnectionParameters, Lsn, Settings};
use serde::{Deserialize, Serialize};

/// A clone that another host shall make of a source on this one. What is not here the other host decides: the account,
/// the address at which the clone listens, where its tablespaces, its log and its socket are, whom it follows (the host
/// that ordered it).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloneOrder {
    /// The source's data directory.
    pub source: PathBuf,
    /// How a superuser reaches the source on its own host, to which this is handed back; the clone follows it with the
    /// same role.
    pub connection: ConnectionParameters,
    /// The same for the primary that the source follows, if it is a standby.
    pub leader: Option<ConnectionParameters>,
    /// The clone's data directory on the other host.
    pub target: PathBuf,
    /// The replication slot that is made on the source.
    pub slot: String,
    /// Crash or backup.
    pub recovery: Recovery,
    /// How it is filled.
    pub fill: FillOptions,
    /// `HOST:PORT` of the source's `onecopy host`, as the other host reaches it; the source's server is at the same
    /// address.
    pub origin: String,
    /// The port at which the other host reaches the source's server.
    pub origin_port: u16,
    /// The source's major version of PostgreSQL: the clone's must be the same.
    pub major_version: u32,
    /// The clone's server listens on this port.
    pub port: u16,
    /// Who may log in to it, beside what is on its own machine: only what [`super::carried_rules`] gives.
    pub access_rules: Vec<AccessRule>,
    /// Its settings: only what [`super::carried_settings`] gives.
    pub settings: Settings,
}

/// What has become of an order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum OrderEvent {
    /// It is on its way.
    Preparing,
    /// The image is taken.
    Frozen {
        /// The source's accesses waited so long.
        pause_us: u64,
    },
    /// Its server is being started.
    Starting {
        /// It answers from here on.
        consistent_at: Lsn,
    },
    /// It answers queries.
    Answering {
        /// Since the order came.
        elapsed_ms: u64,
    },
    /// It is being filled; the last one says that it is whole.
    Filling(Progress),
}

/// Has another host make a clone; `tell` hears what becomes of it, until it is whole.
///
/// # Errors
/// [`CloneError::Network`], with the other host's own words when it refuses or fails; [`CloneError::Keys`].
pub async fn order_clone(
    address: &str,
    keys_directory: &Path,
    order: &CloneOrder,
    mut tell: impl FnMut(OrderEvent),
) -> Result<(), CloneError> {
    let failed = |reason: String| CloneError::Network { peer: address.to_owned(), reason };
    let mut stream = connect(address, &HostKeys::load(keys_directory)?).await?;
    let ordering = async {
        let wordless = |error: serde_json::Error| ProtocolError::Refused(format!("the order has no words: {error}"));
        let order = serde_json::to_value(order).map_err(wordless)?;
        write_line(&mut stream, &HostRequest::Clone { order }).await?;
        loop {
            match read_line(&mut stream).await? {
                HostAnswer::Progress { event } => match serde_json::from_value(event) {
                    Ok(event) => tell(event),
                    Err(error) => tracing::debug!(%error, "news that this program does not know"),
                },
                HostAnswer::Done => return Ok(()),
                HostAnswer::Refused { reason } => return Err(ProtocolError::refused(&reason)),
                _ => return Err(ProtocolError::Unexpected { got: "another answer", wanted: "news of the clone" }),
            }
        }
    };
    ordering.await.map_err(|error| failed(error.to_string()))
}

/// Asks whether a host is there; its program's version.
///
/// # Errors
/// [`CloneError::Network`], [`CloneError::Keys`].
pub async fn ping(address: &str, keys_directory: &Path) -> Result<String, CloneError> {
    let mut stream = connect(address, &HostKeys::load(keys_directory)?).await?;
    let asking = async {
        write_line(&mut stream, &HostRequest::Ping).await?;
        match read_line(&mut stream).await? {
            HostAnswer::Pong { version } => Ok(words(&version)),
            _ => Err(ProtocolError::Unexpected { got: "another answer", wanted: "an answer to a ping" }),
        }
    };
    asking.await.map_err(|error| CloneError::Network { peer: address.to_owned(), reason: error.to_string() })
}
