//! The servers behind the router, and what it knows of their health.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::config::{RouterConfiguration, ServerConfiguration};
use crate::error::RouterError;
use crate::wire::Address;

/// What a server is in its cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Executes and certifies updates.
    Leader,
    /// A hot standby of it.
    Follower,
}

/// Whether a server answers. Kept by [`crate::health`].
///
/// ```text
/// Unknown --answer--> Up --probe refused--> Down --answer--> Up
///                      \--probe unanswered--> Unresponsive --answer--> Up
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// Not asked yet.
    Unknown,
    /// It answers.
    Up,
    /// It refuses connections or ends them.
    Down,
    /// It accepts bytes and answers nothing; what waits for it is given up.
    Unresponsive,
}

/// One server.
pub struct Server {
    /// Its place in the router's list; the leader is 0.
    pub index: usize,
    /// Its name in messages.
    pub name: String,
    /// Leader or follower.
    pub role: Role,
    /// Where it listens.
    pub address: Address,
    /// The router's own role there.
    pub user: String,
    /// The password of that role.
    pub password: Option<String>,
    /// Whether it answers.
    pub health: watch::Sender<Health>,
    /// Reads that run there now.
    pub reads_in_flight: AtomicUsize,
    /// Transactions of sessions that run there now.
    pub updates_in_flight: AtomicUsize,
    /// Reads that ran there.
    pub reads: AtomicU64,
    /// Bytes of WAL that it has replayed, or written on the leader.
    pub wal_position_bytes: AtomicU64,
}

impl fmt::Debug for Server {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Server").field("name", &self.name).field("address", &self.address).finish()
    }
}

impl Server {
    fn new(index: usize, role: Role, configuration: &ServerConfiguration) -> Result<Arc<Server>, RouterError> {
        let password = match (&configuration.password, &configuration.password_file) {
            (Some(password), _) => Some(password.clone()),
            (None, Some(path)) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|source| RouterError::PasswordFile { path: path.clone(), source })?;
                Some(text.lines().next().unwrap_or_default().to_owned())
            }
            (None, None) => None,
        };
        Ok(Arc::new(Server {
            index,
            name: configuration.name.clone(),
            role,
            address: Address::of(&configuration.host, configuration.port),
            user: configuration.user.clone(),
            password,
            health: watch::Sender::new(Health::Unknown),
            reads_in_flight: AtomicUsize::new(0),
            updates_in_flight: AtomicUsize::new(0),
            reads: AtomicU64::new(0),
            wal_position_bytes: AtomicU64::new(0),
        }))
    }

    /// Whether it answers.
    pub fn health(&self) -> Health {
        *self.health.borrow()
    }

    /// Notes what a probe found.
    pub fn set_health(&self, health: Health) {
        self.health.send_if_modified(|known| {
            let changed = *known != health;
            if changed {
                tracing::info!(server = self.name, from = ?*known, to = ?health, "server health");
            }
            *known = health;
            changed
        });
    }

    /// Waits until the server is given up as unresponsive.
    pub async fn unresponsive(&self) {
        let mut health = self.health.subscribe();
        if health.wait_for(|health| *health == Health::Unresponsive).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// All servers, the leader first.
pub fn servers_of(configuration: &RouterConfiguration) -> Result<Arc<[Arc<Server>]>, RouterError> {
    let mut servers = vec![Server::new(0, Role::Leader, &configuration.leader)?];
    for follower in &configuration.followers {
        servers.push(Server::new(servers.len(), Role::Follower, follower)?);
    }
    for (index, server) in servers.iter().enumerate() {
        if servers[..index].iter().any(|earlier| earlier.name == server.name) {
            return Err(RouterError::DuplicateServer(server.name.clone()));
        }
    }
    Ok(servers.into())
}
