//! What a router is told: where it listens, which servers it stands before, and how fresh its reads must be.
//!
//! The same structure is the `onecopy.toml` of `onecopy router` and what `onecopy up` builds in memory.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// A router over servers that exist already.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterConfiguration {
    /// The router itself; every value has a default.
    #[serde(default)]
    pub router: RouterSettings,
    /// The only server that executes and certifies updates.
    pub leader: ServerConfiguration,
    /// Its streaming standbys, in any number.
    #[serde(default, rename = "follower")]
    pub followers: Vec<ServerConfiguration>,
}

/// Limits and choices of the router itself. A change of most of them holds at once; of `freshness`, `clients_max`,
/// `message_bytes_max` and what is about clients that log in, stall or say nothing, for sessions that begin later; of
/// `unsafe_..`, for databases that are opened later; of the addresses, for the next start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterSettings {
    /// Address and port for clients.
    pub listen: SocketAddr,
    /// Address and port of `/metrics`, `/healthz` and `/status`; none: not served.
    pub metrics_listen: Option<SocketAddr>,
    /// How fresh reads are when a session does not say: `strict`, `session` or `bounded:<ms>`.
    pub freshness: Freshness,
    /// Most clients at once; one more is refused with 53300.
    pub clients_max: usize,
    /// Most back ends on the leader for the transactions of one database's sessions; a transaction waits for a free
    /// one.
    pub leader_backends_max: usize,
    /// Most back ends on one server for reads of one database at epochs.
    pub reader_backends_max: usize,
    /// How long a client waits for a back end before it gets 53300, in milliseconds.
    pub backend_wait_ms: u64,
    /// Shortest time between two gates of one database, in milliseconds.
    pub gate_interval_min_ms: u64,
    /// How often a new epoch is made while commits and readers come, in milliseconds; a reader that needs one sooner
    /// asks for it.
    pub epoch_interval_ms: u64,
    /// A gate that could not close within this gives up and is tried again, in milliseconds.
    pub gate_timeout_ms: u64,
    /// A follower that has not replayed up to the gate's marker within this leaves the epoch, in milliseconds.
    pub follower_timeout_ms: u64,
    /// An epoch is replaced after this when something committed since, after ten times this in any case, in
    /// milliseconds (vacuum horizon); where nobody reads it is let go.
    pub epoch_age_max_ms: u64,
    /// How long a server may leave a probe unanswered before its sessions are given up, in milliseconds.
    pub server_timeout_ms: u64,
    /// Largest message accepted from a client that is logged in, in bytes.
    pub message_bytes_max: usize,
    /// A client must be logged in within this, in seconds, as with PostgreSQL's `authentication_timeout`.
    pub authentication_timeout_s: u64,
    /// A client whose host has said nothing for this long is asked by TCP whether it is there, and is gone when nothing
    /// comes for as long again, in seconds (32767 at the most); 0: it is never asked.
    pub client_keepalive_s: u32,
    /// A client that takes nothing of its answer for this long, or stops for this long in the middle of a message for
    /// which a server waits, is cut off, in seconds; 0: never.
    pub client_stall_s: u64,
    /// A client that says nothing for this long outside a transaction is ended with 57P05, in seconds; 0: never.
    pub client_idle_s: u64,
    /// A client that says nothing for this long inside a transaction is ended with 25P03, in seconds; 0: never.
    pub idle_in_transaction_s: u64,
    /// The router's own connections to a database that no client was in for this long are closed, in seconds; 0: never.
    pub database_idle_s: u64,
    /// Reads go to servers without an epoch: wrong results, for tests that must fail without epochs.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unsafe_without_epochs: bool,
    /// Epochs without the tripwire: wrong results, for tests that must fail without it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unsafe_without_tripwire: bool,
}

impl Default for RouterSettings {
    fn default() -> Self {
        RouterSettings {
            listen: SocketAddr::from(([127, 0, 0, 1], 6432)),
            metrics_listen: None,
            freshness: Freshness::Session,
            clients_max: 1000,
            leader_backends_max: 64,
            reader_backends_max: 32,
            backend_wait_ms: 10_000,
            gate_interval_min_ms: 10,
            epoch_interval_ms: 50,
            gate_timeout_ms: 50,
            follower_timeout_ms: 100,
            epoch_age_max_ms: 1000,
            server_timeout_ms: 2000,
            message_bytes_max: 1 << 30,
            authentication_timeout_s: 60,
            client_keepalive_s: 60,
            client_stall_s: 60,
            client_idle_s: 0,
            idle_in_transaction_s: 0,
            database_idle_s: 600,
            unsafe_without_epochs: false,
            unsafe_without_tripwire: false,
        }
    }
}

/// The settings that hold now, and word of others: [`Router::reload`](crate::Router::reload) replaces them.
pub type LiveSettings = watch::Receiver<Arc<RouterSettings>>;

/// One server and how the router itself logs in to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerConfiguration {
    /// What the server is called in `status`, metrics and messages.
    pub name: String,
    /// Host name or address, or the directory of its Unix socket when it starts with `/`.
    pub host: String,
    /// Port.
    pub port: u16,
    /// The router's own role: a superuser (it reads SCRAM verifiers and makes the tripwire).
    pub user: String,
    /// Its password; none for `trust` or `peer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// The database in which the router asks after the server's health.
    #[serde(default = "maintenance_database")]
    pub database: String,
    /// A file whose first line is the password, instead of `password`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_file: Option<PathBuf>,
}

#[cfg(test)]
impl ServerConfiguration {
    /// One that nobody connects to.
    pub(crate) fn unconnected(name: &str) -> ServerConfiguration {
        let [name, host, user] = [name, "/nowhere", "u"].map(str::to_owned);
        let database = maintenance_database();
        ServerConfiguration { name, host, port: 1, user, password: None, database, password_file: None }
    }
}

fn maintenance_database() -> String {
    "postgres".to_owned()
}

/// Which epochs a reader may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freshness {
    /// Everything that was acknowledged to anybody before the read arrived.
    Strict,
    /// Everything that this session has seen or written, or that was acknowledged to anybody before it began.
    Session,
    /// As old as this, at the most.
    Bounded(Duration),
}

/// A freshness level that is not one of the three.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown freshness {0:?}: give \"strict\", \"session\" or \"bounded:<milliseconds>\"")]
pub struct UnknownFreshness(String);

impl FromStr for Freshness {
    type Err = UnknownFreshness;

    fn from_str(text: &str) -> Result<Self, UnknownFreshness> {
        match text {
            "strict" => Ok(Freshness::Strict),
            "session" => Ok(Freshness::Session),
            _ => text
                .strip_prefix("bounded:")
                .and_then(|milliseconds| milliseconds.trim_end_matches("ms").parse().ok())
                .map(|milliseconds| Freshness::Bounded(Duration::from_millis(milliseconds)))
                .ok_or_else(|| UnknownFreshness(text.to_owned())),
        }
    }
}

impl fmt::Display for Freshness {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Freshness::Strict => formatter.write_str("strict"),
            Freshness::Session => formatter.write_str("session"),
            Freshness::Bounded(age) => write!(formatter, "bounded:{}", age.as_millis()),
        }
    }
}

impl Serialize for Freshness {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Freshness {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
