//! A leader and followers that speak PostgreSQL's protocol and are models otherwise, for tests of gates and pools.
//!
//! They hear what the gatekeeper says, all in one order; a test holds a statement, refuses it, or decides how far a
//! follower has replayed. Positions in the WAL are those of markers: the first one is `0/1`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::config::ServerConfiguration;
use crate::wire::{Channel, ChannelError, Reply, Socket, SqlError};

/// Part of a statement, by which a test means it.
type Part = &'static str;

/// The servers of one test.
pub(crate) struct ModelServers {
    /// The leader first.
    servers: Vec<ModelServer>,
    heard: Arc<watch::Sender<Vec<String>>>,
}

struct ModelServer {
    configuration: ServerConfiguration,
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// What a server's connections share.
struct Shared {
    name: String,
    heard: Arc<watch::Sender<Vec<String>>>,
    held: watch::Sender<Option<Part>>,
    refused: Mutex<Option<Part>>,
    /// Processes that do not end although they are told to.
    running: Mutex<usize>,
    /// The newest marker that it has replayed.
    replayed: AtomicU64,
    /// The newest marker that it has made.
    marker: AtomicU64,
    snapshots: AtomicU64,
    processes: AtomicU32,
    /// What it answers when it is asked of which history it is.
    timeline: Mutex<String>,
    /// Nobody gets in.
    is_gone: AtomicBool,
    /// Grows by one when all connections are cut.
    cuts: watch::Sender<u64>,
    /// The parameters of each log-in.
    log_ins: Mutex<Vec<HashMap<String, String>>>,
}

impl ModelServers {
    /// A leader and followers `follower-1`, `follower-2` and so on, that replay whatever comes.
    pub(crate) async fn start(followers: usize) -> ModelServers {
        let heard = Arc::new(watch::Sender::new(Vec::new()));
        let mut servers = Vec::new();
        for number in 0..=followers {
            let name = if number == 0 { "leader".to_owned() } else { format!("follower-{number}") };
            servers.push(ModelServer::start(name, heard.clone()).await);
        }
        ModelServers { servers, heard }
    }

    /// How to reach them, the leader first.
    pub(crate) fn configurations(&self) -> Vec<ServerConfiguration> {
        self.servers.iter().map(|server| server.configuration.clone()).collect()
    }

    /// `server` answers statements with `part` only after [`ModelServers::let_go`].
    pub(crate) fn hold(&self, server: &str, part: Part) {
        self.shared(server).held.send_replace(Some(part));
    }

    pub(crate) fn let_go(&self, server: &str) {
        self.shared(server).held.send_replace(None);
    }

    /// `server` answers statements with `part` by an error; none: it refuses nothing.
    pub(crate) fn refuse(&self, server: &str, part: Option<Part>) {
        *self.shared(server).refused.lock().unwrap() = part;
    }

    /// `server` has replayed markers up to this.
    pub(crate) fn set_replayed(&self, server: &str, marker: u64) {
        self.shared(server).replayed.store(marker, SeqCst);
    }

    /// So many processes on the leader do not end.
    pub(crate) fn set_running(&self, processes: usize) {
        *self.shared("leader").running.lock().unwrap() = processes;
    }

    /// Everything that was said, as `server: statement`.
    pub(crate) fn heard(&self) -> Vec<String> {
        self.heard.borrow().clone()
    }

    /// When `server` first heard a statement with `part`: its place in [`ModelServers::heard`].
    pub(crate) fn when(&self, server: &str, part: &str) -> Option<usize> {
        self.heard.borrow().iter().position(|said| is_said(said, server, part))
    }

    /// Forgets what was said.
    pub(crate) fn forget(&self) {
        self.heard.send_replace(Vec::new());
    }

    /// Nobody gets in to `server` any more, or again.
    pub(crate) fn set_gone(&self, server: &str, is_gone: bool) {
        self.shared(server).is_gone.store(is_gone, SeqCst);
    }

    /// `server` is in recovery (`t` or `f`), of this system and timeline.
    pub(crate) fn set_lineage(&self, server: &str, timeline: &str) {
        timeline.clone_into(&mut self.shared(server).timeline.lock().unwrap());
    }

    /// Ends all connections to `server`; new ones can be made.
    pub(crate) fn cut_off(&self, server: &str) {
        self.shared(server).cuts.send_modify(|cuts| *cuts += 1);
    }

    /// As what each connection to `server` was begun, and at which level its transactions are.
    pub(crate) fn levels(&self, server: &str) -> Vec<(String, String)> {
        let log_ins = self.shared(server).log_ins.lock().unwrap();
        let value = |log_in: &HashMap<String, String>, name: &str| log_in.get(name).cloned().unwrap_or_default();
        let of = |log_in| (value(log_in, "application_name"), value(log_in, "default_transaction_isolation"));
        log_ins.iter().map(of).collect()
    }

    /// Waits until `server` has heard statements with `part` so many times.
    pub(crate) async fn hears(&self, server: &str, part: &str, times: usize) {
        let mut heard = self.heard.subscribe();
        let enough = |heard: &Vec<String>| heard.iter().filter(|said| is_said(said, server, part)).count() >= times;
        let is_heard = heard.wait_for(enough).await.is_ok();
        assert!(is_heard, "it is said as long as this lives");
    }

    fn shared(&self, server: &str) -> &Shared {
        let found = self.servers.iter().find(|model| model.shared.name == server);
        &found.unwrap_or_else(|| panic!("there is no {server}")).shared
    }
}

fn is_said(said: &str, server: &str, part: &str) -> bool {
    said.split_once(": ").is_some_and(|(name, sql)| name == server && sql.contains(part))
}

impl ModelServer {
    async fn start(name: String, heard: Arc<watch::Sender<Vec<String>>>) -> ModelServer {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let configuration = ServerConfiguration {
            name: name.clone(),
            host: "127.0.0.1".to_owned(),
            port: listener.local_addr().expect("it is bound").port(),
            user: "router".to_owned(),
            password: None,
            database: "postgres".to_owned(),
            password_file: None,
        };
        let is_leader = name == "leader";
        let shared = Arc::new(Shared {
            name,
            heard,
            held: watch::Sender::new(None),
            refused: Mutex::new(None),
            running: Mutex::new(0),
            replayed: AtomicU64::new(u64::MAX),
            marker: AtomicU64::new(0),
            snapshots: AtomicU64::new(0),
            processes: AtomicU32::new(0),
            timeline: Mutex::new(format!("{} 1 00000001", if is_leader { "f" } else { "t" })),
            is_gone: AtomicBool::new(false),
            cuts: watch::Sender::new(0),
            log_ins: Mutex::default(),
        });
        let serving = tokio::spawn(accept(listener, shared.clone()));
        ModelServer { configuration, shared, serving }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((socket, _)) = listener.accept().await {
        let (shared, mut cuts) = (shared.clone(), shared.cuts.subscribe());
        connections.spawn(async move {
            tokio::select! {
                _ = serve(socket, shared) => {}
                _ = cuts.changed() => {}
            }
        });
    }
}

/// Serves one connection until it is closed.
async fn serve(socket: TcpStream, shared: Arc<Shared>) -> Result<(), ChannelError> {
    let mut channel = Channel::new(Socket::Tcp(socket), 1 << 20);
    let packet = channel.startup_packet().await?;
    if shared.is_gone.load(SeqCst) {
        return Ok(());
    }
    shared.log_ins.lock().unwrap().push(parameters(&packet));
    // AuthenticationOk; the number of its process, and a key that cancels nothing.
    channel.output.message(b'R', &0_u32.to_be_bytes());
    let process = shared.processes.fetch_add(1, SeqCst) + 1;
    channel.output.message(b'K', &[process.to_be_bytes(), [0; 4]].concat());
    let mut status = b'I';
    loop {
        channel.output.ready_for_query(status);
        channel.flush().await?;
        let frame = channel.frame().await?;
        if frame.tag != b'Q' {
            return Ok(());
        }
        let body = frame.body();
        let sql = String::from_utf8_lossy(&body[..body.len() - 1]).into_owned();
        shared.heard.send_modify(|heard| heard.push(format!("{}: {sql}", shared.name)));
        let is_let_go = |held: &Option<Part>| !held.is_some_and(|part| sql.contains(part));
        let _ = shared.held.subscribe().wait_for(is_let_go).await;
        if sql.contains("generate_series") {
            // It waits itself.
            while shared.replayed.load(SeqCst) < position_in(&sql) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        match shared.rows(&sql) {
            Some(rows) => {
                for row in rows {
                    let values: Vec<_> = row.split('|').map(|value| Some(value.to_owned())).collect();
                    channel.output.text_row(&values);
                }
                channel.output.command_complete("SELECT");
                status = status_after(&sql, status);
            }
            None => SqlError::error("XX000", "the test refuses it").encode(&mut channel.output),
        }
    }
}

/// The parameters in a start-up packet, behind its version.
fn parameters(packet: &[u8]) -> HashMap<String, String> {
    let mut texts = packet[4..].split(|&byte| byte == 0).map(|text| String::from_utf8_lossy(text).into_owned());
    std::iter::from_fn(|| Some((texts.next()?, texts.next()?))).collect()
}

impl Shared {
    /// The rows a statement is answered with, values divided by `|`; none when it is refused.
    fn rows(&self, sql: &str) -> Option<Vec<String>> {
        if self.refused.lock().unwrap().is_some_and(|part| sql.contains(part)) {
            return None;
        }
        Some(if sql.contains("pg_terminate_backend") {
            vec!["t".to_owned(); *self.running.lock().unwrap()]
        } else if sql.contains("pg_stat_get_activity") {
            vec!["1|1700000000123456|t".to_owned()]
        } else if sql.contains("pg_logical_emit_message") {
            vec![format!("0/{:X}", self.marker.fetch_add(1, SeqCst) + 1)]
        } else if sql.contains("pg_export_snapshot") {
            vec![format!("{}-{}", self.name, self.snapshots.fetch_add(1, SeqCst) + 1)]
        } else if sql.contains("SELECT rolsuper") {
            vec!["f|t|1000".to_owned()]
        } else if sql.contains("pg_control_system") {
            vec![self.timeline.lock().unwrap().clone()]
        } else if sql.contains("pg_last_wal_replay_lsn") {
            let answer = if self.replayed.load(SeqCst) >= position_in(sql) { "t" } else { "f" };
            vec![answer.to_owned()]
        } else {
            Vec::new()
        })
    }
}

/// The position that a look at a standby asks after: `.. >= '0/1F'::pg_catalog.pg_lsn ..` or `.. >= 31`.
fn position_in(sql: &str) -> u64 {
    let position = sql.rsplit(">= ").next().unwrap_or_default();
    let parsed = match position.strip_prefix("'0/") {
        Some(hexadecimal) => u64::from_str_radix(hexadecimal.split('\'').next().unwrap_or_default(), 16),
        None => position.parse(),
    };
    parsed.unwrap_or_else(|error| panic!("{sql}: {error}"))
}

/// Whether a transaction is open after `sql`.
fn status_after(sql: &str, before: u8) -> u8 {
    match sql {
        _ if sql.starts_with("BEGIN") && !sql.contains("COMMIT") => b'T',
        "ROLLBACK" => b'I',
        _ => before,
    }
}
