//! The servers behind the router, and what it knows of their health.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::config::ServerConfiguration;
use crate::read_share::ReadShare;
use crate::timeline::SystemTimeline;
use crate::topology::Role;
use crate::wire::Address;

/// A server's password cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the password file {path}: {source}")]
pub struct UnreadablePassword {
    path: PathBuf,
    source: std::io::Error,
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

/// Server processes whose sessions are known; all are forgotten beyond this, until their next transaction.
const SESSIONS_KNOWN_MAX: usize = 10_000;

/// One server.
pub struct Server {
    /// Its own among all servers that this router ever had; the leader's is 0.
    pub number: u64,
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
    /// The database in which its health is asked after.
    pub probe_database: String,
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
    /// In how many choices of a server for a read it takes part.
    pub read_share: ReadShare,
    /// Connections of the router's to it.
    pub connections: AtomicUsize,
    /// The sessions whose transactions its processes run, by the processes' numbers: who has sent a notification.
    sessions: Mutex<HashMap<u32, u32>>,
    /// Grows when a statement begins that may end server processes here, and again when it has ended.
    endings: watch::Sender<u64>,
    /// It has been in an epoch, or was there when the router started: what it knows of roles and tables is not ages
    /// old.
    pub has_caught_up: AtomicBool,
    /// Of which history it was when an epoch's connections to it were last made; kept of the leader only.
    pub timeline: watch::Sender<Option<SystemTimeline>>,
    /// It was not there when the router started: what an earlier router has left running must end before it is used.
    pub is_held_back: AtomicBool,
    /// The router has given it up: nothing begins there any more.
    pub is_removed: AtomicBool,
    /// What still runs there after its removal is given up as well.
    pub is_cut_off: watch::Sender<bool>,
}

impl fmt::Debug for Server {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Server").field("name", &self.name).field("address", &self.address).finish()
    }
}

impl Server {
    /// A server that was not asked yet.
    ///
    /// # Errors
    /// A password file that cannot be read.
    pub fn new(
        number: u64,
        role: Role,
        configuration: &ServerConfiguration,
    ) -> Result<Arc<Server>, UnreadablePassword> {
        let password = password_in(configuration)?;
        Ok(Arc::new(Server {
            number,
            name: configuration.name.clone(),
            role,
            address: Address::of(&configuration.host, configuration.port),
            user: configuration.user.clone(),
            password,
            probe_database: configuration.database.clone(),
            health: watch::Sender::new(Health::Unknown),
            reads_in_flight: AtomicUsize::new(0),
            updates_in_flight: AtomicUsize::new(0),
            reads: AtomicU64::new(0),
            wal_position_bytes: AtomicU64::new(0),
            read_share: ReadShare::default(),
            connections: AtomicUsize::new(0),
            sessions: Mutex::default(),
            endings: watch::Sender::default(),
            has_caught_up: AtomicBool::new(role == Role::Leader),
            timeline: watch::Sender::new(None),
            is_held_back: AtomicBool::new(false),
            is_removed: AtomicBool::new(false),
            is_cut_off: watch::Sender::new(false),
        }))
    }

    /// Whether `configuration` says of it what it was made of.
    ///
    /// # Errors
    /// A password file that cannot be read.
    pub fn is_as_in(&self, configuration: &ServerConfiguration) -> Result<bool, UnreadablePassword> {
        Ok(self.name == configuration.name
            && self.address == Address::of(&configuration.host, configuration.port)
            && self.user == configuration.user
            && self.probe_database == configuration.database
            && self.password == password_in(configuration)?)
    }

    /// A statement that may end server processes here begins, or has ended.
    pub fn note_ending(&self) {
        self.endings.send_modify(|endings| *endings += 1);
    }

    /// Another number than before when somebody may have ended server processes here on purpose since.
    pub fn endings(&self) -> u64 {
        *self.endings.borrow()
    }

    /// [`Server::endings`], to be waited for.
    pub fn watch_endings(&self) -> watch::Receiver<u64> {
        self.endings.subscribe()
    }

    /// Server process `process_id` works for the client that is known by the number `session` from now on.
    pub fn note_session(&self, process_id: u32, session: u32) {
        let mut sessions = self.sessions.lock().expect("no code panics while it holds this lock");
        if sessions.len() >= SESSIONS_KNOWN_MAX && !sessions.contains_key(&process_id) {
            sessions.clear();
        }
        sessions.insert(process_id, session);
    }

    /// By which number clients know whom server process `process_id` works for; none when it is not the router's.
    pub fn session_of(&self, process_id: u32) -> Option<u32> {
        self.sessions.lock().expect("no code panics while it holds this lock").get(&process_id).copied()
    }

    /// Whether it answers.
    pub fn health(&self) -> Health {
        *self.health.borrow()
    }

    /// Whether reads may begin there.
    pub fn is_open_for_reads(&self) -> bool {
        !self.is_removed() && matches!(self.health(), Health::Up | Health::Unknown)
    }

    /// Whether the router has given it up.
    pub fn is_removed(&self) -> bool {
        self.is_removed.load(SeqCst)
    }

    /// Whether what it knows of roles and tables is not ages old.
    pub fn has_caught_up(&self) -> bool {
        self.has_caught_up.load(SeqCst)
    }

    /// What runs there now: reads, and transactions of sessions.
    pub fn load(&self) -> usize {
        self.reads_in_flight.load(Relaxed) + self.updates_in_flight.load(Relaxed)
    }

    /// Notes how far it was seen to have written or replayed. It never goes back while the server is up: what somebody
    /// was told already must not be forgotten by a probe that had looked before.
    pub fn note_wal_position(&self, bytes: u64) {
        if self.health() == Health::Up {
            self.wal_position_bytes.fetch_max(bytes, Relaxed);
        } else {
            self.wal_position_bytes.store(bytes, Relaxed);
        }
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

    /// Waits until what still runs there after its removal is given up.
    pub async fn cut_off(&self) {
        let mut is_cut_off = self.is_cut_off.subscribe();
        if is_cut_off.wait_for(|is_cut_off| *is_cut_off).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

fn password_in(configuration: &ServerConfiguration) -> Result<Option<String>, UnreadablePassword> {
    match (&configuration.password, &configuration.password_file) {
        (Some(password), _) => Ok(Some(password.clone())),
        (None, Some(path)) => {
            let text =
                std::fs::read_to_string(path).map_err(|source| UnreadablePassword { path: path.clone(), source })?;
            Ok(Some(text.lines().next().unwrap_or_default().to_owned()))
        }
        (None, None) => Ok(None),
    }
}

/// One connection to a server, counted until it is dropped.
#[derive(Debug)]
pub struct Connection(Arc<Server>);

impl Connection {
    /// Counts one; none when the router has given the server up.
    pub fn to(server: &Arc<Server>) -> Option<Connection> {
        server.connections.fetch_add(1, SeqCst);
        let connection = Connection(server.clone());
        // In this order: whoever removes the server sets the flag first and counts then, so one of the two sees the
        // other.
        (!server.is_removed()).then_some(connection)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> Arc<Server> {
        let configuration = ServerConfiguration::unconnected("follower");
        Server::new(1, Role::Follower, &configuration).unwrap()
    }

    /// Whoever removes a server waits until its connections are gone: none begins behind the removal, and each that was
    /// begun is counted until it has ended.
    #[test]
    fn connections_are_counted_and_none_begins_on_a_removed_server() {
        let server = server();
        let (one, two) = (Connection::to(&server), Connection::to(&server));
        assert!(one.is_some() && two.is_some());
        assert_eq!(server.connections.load(SeqCst), 2);
        drop(one);
        server.is_removed.store(true, SeqCst);
        assert!(Connection::to(&server).is_none());
        assert_eq!(server.connections.load(SeqCst), 1, "who was refused is not counted");
        drop(two);
        assert_eq!(server.connections.load(SeqCst), 0);
    }

    /// A notification is its session's for whoever hears it, and the memory of that is bounded.
    ///
    /// Spec: I4
    #[test]
    fn processes_are_known_by_the_session_that_they_work_for() {
        let server = server();
        server.note_session(7, 1);
        server.note_session(7, 2);
        assert_eq!((server.session_of(7), server.session_of(8)), (Some(2), None));
        for process_id in 100..100 + SESSIONS_KNOWN_MAX as u32 {
            server.note_session(process_id, 3);
        }
        assert_eq!((server.session_of(7), server.session_of(100 + SESSIONS_KNOWN_MAX as u32 - 1)), (None, Some(3)));
    }

    /// Reads begin where a server answers, or was not asked yet; what waits for one that has become unresponsive is
    /// given up.
    #[tokio::test]
    async fn a_server_is_open_for_reads_until_it_fails_or_is_removed() {
        let server = server();
        let open = [Health::Unknown, Health::Up, Health::Down, Health::Unresponsive].map(|health| {
            server.set_health(health);
            server.is_open_for_reads()
        });
        assert_eq!(open, [true, true, false, false]);
        server.unresponsive().await;
        server.set_health(Health::Up);
        server.is_removed.store(true, SeqCst);
        assert!(!server.is_open_for_reads());
        server.is_cut_off.send_replace(true);
        server.cut_off().await;
    }
}
