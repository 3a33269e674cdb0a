//! What can fail around a cluster, on what, and what to do about it.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use onecopy_directory::DirectoryError;
use onecopy_postgres::PostgresError;
use onecopy_router::RouterError;

/// An operation on a cluster that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// A file or directory operation failed.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// What was tried, as a verb.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The directory holds no cluster.
    #[error("{directory} holds no cluster; make one with: onecopy up --dir {directory}")]
    NotACluster {
        /// The directory.
        directory: PathBuf,
    },
    /// A new cluster is wanted where something else lies.
    #[error("{directory} holds other files ({found}) and no cluster; give an empty or a new directory with --dir")]
    DirectoryInUse {
        /// The directory.
        directory: PathBuf,
        /// One of the files.
        found: String,
    },
    /// Another daemon runs on the directory.
    #[error(
        "{directory} is served by another onecopy{}; stop it with: onecopy down --dir {directory}",
        process(*process_id)
    )]
    Locked {
        /// The directory.
        directory: PathBuf,
        /// The other process, when it has said its number.
        process_id: Option<u32>,
    },
    /// A server's machine cannot be forked now.
    #[error("{parent} cannot be forked: {reason}; leave out --mode, or give --mode copy for a base backup")]
    NotForked {
        /// The server.
        parent: String,
        /// Why.
        reason: String,
    },
    /// The disk has no room for a new server.
    #[error(
        "{directory} has {free_bytes} bytes free, {wanted_bytes} are needed for {servers} new servers; free some space \
         or give another directory with --dir"
    )]
    NoSpace {
        /// The directory.
        directory: PathBuf,
        /// Free for this user.
        free_bytes: u64,
        /// Needed.
        wanted_bytes: u64,
        /// Servers to be made.
        servers: usize,
    },
    /// A Unix socket would have a path that the kernel refuses, and the short directory cannot be used either.
    #[error("the socket directory {path} belongs to another account; remove it or give a shorter directory with --dir")]
    SocketDirectoryForeign {
        /// The short directory.
        path: PathBuf,
    },
    /// The cluster's servers ran as another account.
    #[error(
        "the servers in {directory} belong to the account with number {owner_id}, here they would run as {user:?}; run \
         onecopy as the account that made the cluster"
    )]
    OtherAccount {
        /// The cluster's directory.
        directory: PathBuf,
        /// Who owns its servers.
        owner_id: u32,
        /// Who would run them now.
        user: String,
    },
    /// `cluster.toml` cannot be understood.
    #[error(
        "{path} is not a cluster's state: {reason}; restore it from a backup, \
         the data directories beside it are untouched"
    )]
    InvalidState {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        reason: String,
    },
    /// A file of passwords is empty.
    #[error("{path} holds no password; restore the file, or set the role's password in PostgreSQL and write it there")]
    EmptyPassword {
        /// The file.
        path: PathBuf,
    },
    /// More followers than are supported.
    #[error("{wanted} replicas are wanted, at most {maximum} fit on one machine; give a smaller number")]
    TooManyReplicas {
        /// What was asked for.
        wanted: usize,
        /// The bound.
        maximum: usize,
    },
    /// Fewer followers than exist are wanted.
    #[error(
        "{wanted} replicas are wanted, but the cluster has {existing}: a follower holds a slot on the leader and a \
         copy of the data, which `up` does not throw away; give --replicas {existing} or more, or remove followers of \
         the running cluster with: onecopy scale {wanted}"
    )]
    FewerReplicas {
        /// What was asked for.
        wanted: usize,
        /// What is there.
        existing: usize,
    },
    /// Followers are being changed already.
    #[error("the cluster is being changed ({change}); wait until that is done, `onecopy status` tells how far it is")]
    ChangeRunning {
        /// What is going on.
        change: String,
    },
    /// A change has failed when some of it was done.
    #[error(
        "{source}; what was done before stays: the followers are now {}; ask for the same again, or for fewer",
        or_none(followers)
    )]
    PartlyChanged {
        /// What failed.
        source: Box<HostError>,
        /// What is there.
        followers: Vec<String>,
    },
    /// There is no follower of this name.
    #[error("there is no follower {follower:?}; there are: {}", or_none(followers))]
    NoSuchFollower {
        /// What was asked for.
        follower: String,
        /// What is there.
        followers: Vec<String>,
    },
    /// A follower runs and does not answer through the router.
    #[error(
        "{follower} runs, but does not answer through the router within {seconds} s; it goes on trying, \
         `onecopy status` tells how far it is"
    )]
    NotAnswering {
        /// The follower.
        follower: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// A clone cannot be made or filled.
    #[error("{follower}: {source}")]
    Clone {
        /// The follower.
        follower: String,
        /// Why not.
        source: onecopy_clone::CloneError,
    },
    /// The daemon has refused or failed; its own words.
    #[error("{0}")]
    Daemon(String),
    /// The data directory of the leader is gone.
    #[error(
        "{path} is missing although cluster.toml names it: nothing else has all the data; restore it, or remove the \
         whole directory to begin anew"
    )]
    LeaderMissing {
        /// The data directory.
        path: PathBuf,
    },
    /// A tool that a killed daemon left behind does not end.
    #[error(
        "process {process_id} still writes into {home} and does not end when killed; \
         see why, then call `onecopy up` again"
    )]
    OrphanStays {
        /// The process.
        process_id: i32,
        /// The incomplete server.
        home: PathBuf,
    },
    /// A slot of an incomplete follower is still in use.
    #[error(
        "{leader}: the replication slot {slot:?} is still in use by process {process_id}; \
         end that process, then call `onecopy up` again"
    )]
    SlotInUse {
        /// The leader.
        leader: String,
        /// The slot.
        slot: String,
        /// The leader's process that serves it.
        process_id: i32,
    },
    /// Something around one server failed.
    #[error("{server}: {source}")]
    Server {
        /// The server's name.
        server: String,
        /// What failed.
        source: PostgresError,
    },
    /// PostgreSQL's programs or the service user are not there.
    #[error(transparent)]
    Postgres(#[from] PostgresError),
    /// A statement on a server failed.
    #[error("{server}: cannot {action}: {}", describe(source))]
    Sql {
        /// The server's name.
        server: String,
        /// What the statement was for.
        action: &'static str,
        /// What the server said.
        source: tokio_postgres::Error,
    },
    /// The extension that resizes pools is wanted and not installed.
    #[error(
        "PostgreSQL in {directory} lacks the extension that resizes memory ({missing}); install it (`make build` from \
         the sources does), or allow to go without: `extension = \"auto\"` in [memory] of onecopy.toml"
    )]
    ExtensionMissing {
        /// The directory of PostgreSQL's programs.
        directory: PathBuf,
        /// What is not there.
        missing: onecopy_postgres::ExtensionMissing,
    },
    /// The extension's schema can be written by others.
    #[error(
        "the schema {schema} belongs to the role {owner:?}, which is no superuser; \
         drop it, or give it to a superuser with ALTER SCHEMA"
    )]
    ForeignSchema {
        /// The schema.
        schema: &'static str,
        /// Its owner.
        owner: String,
    },
    /// Something around a machine failed.
    #[error(transparent)]
    Machine(#[from] onecopy_machine::MachineError),
    /// The memory of the host or its servers cannot be looked after.
    #[error(transparent)]
    Memory(#[from] onecopy_memory::MemoryError),
    /// Another agent for memory listens already.
    #[error("another onecopy looks after memory behind {socket}; end it, or give another socket with --socket")]
    MemoryAgentRuns {
        /// The socket.
        socket: PathBuf,
    },
    /// What is configured of memory does not fit a cluster.
    #[error("{0}")]
    InvalidMemory(String),
    /// Nothing tells how a server of `[[memory.instance]]` is reached.
    #[error("[[memory.instance]] {name:?}: {reason}; start the server, or write its `dsn`")]
    InstanceUnreachable {
        /// The instance.
        name: String,
        /// Why not.
        reason: String,
    },
    /// No agent for memory listens.
    #[error(
        "no onecopy looks after memory behind {socket}; \
         start it with: onecopy memory agent, or name a cluster with --dir"
    )]
    NoMemoryAgent {
        /// Its socket.
        socket: PathBuf,
    },
    /// The port for clients is not free.
    #[error("cannot listen for clients on {listen}: {source}; give another port with --port, 0 for any free one")]
    RouterListen {
        /// Where.
        listen: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The router did not start.
    #[error("the router did not start: {0}")]
    Router(#[from] RouterError),
    /// The page of metrics cannot be served.
    #[error("cannot serve metrics on {listen}: {source}; give another port with --metrics-port, 0 for any free one")]
    MetricsListen {
        /// Where.
        listen: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The daemon's reply cannot be parsed.
    #[error(
        "the daemon of {directory} sent no reply that can be parsed: {reason}; see its log, {directory}/onecopy.log; \
         if it is of another version, start it again: `onecopy down`, then `onecopy up`"
    )]
    InvalidReply {
        /// The cluster's directory.
        directory: PathBuf,
        /// What was wrong.
        reason: String,
    },
    /// The reply of an agent for memory cannot be parsed.
    #[error(
        "the memory agent behind {socket} sent no reply that can be parsed: {reason}; \
         if it is of another version, start it again"
    )]
    InvalidAgentReply {
        /// Its socket.
        socket: PathBuf,
        /// What was wrong.
        reason: String,
    },
    /// No daemon runs.
    #[error("no onecopy serves {directory}; start it with: onecopy up --dir {directory}")]
    NotRunning {
        /// The directory.
        directory: PathBuf,
    },
    /// The daemon did not end.
    #[error(
        "onecopy{} does not end within {seconds} s; what it is doing is in {directory}/onecopy.log",
        process(*process_id)
    )]
    DoesNotEnd {
        /// The directory.
        directory: PathBuf,
        /// The daemon.
        process_id: Option<u32>,
        /// How long it was waited for.
        seconds: u64,
    },
}

impl From<DirectoryError> for HostError {
    fn from(error: DirectoryError) -> HostError {
        match error {
            DirectoryError::File { action, path, source } => HostError::File { action, path, source },
            DirectoryError::SocketDirectoryForeign { path } => HostError::SocketDirectoryForeign { path },
            DirectoryError::Postgres(error) => HostError::Postgres(error),
        }
    }
}

impl HostError {
    /// Wraps a failed file operation; for `map_err`.
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> HostError {
        let path = path.into();
        move |source| HostError::File { action, path, source }
    }

    /// Names the server on which something failed; for `map_err`.
    pub(crate) fn server(name: &str) -> impl FnOnce(PostgresError) -> HostError {
        let server = name.to_owned();
        move |source| HostError::Server { server, source }
    }

    /// The same, and which followers there are now, where they are not those of `before`.
    pub(crate) fn after_change(self, before: &[String], now: Vec<String>) -> HostError {
        match now == before {
            true => self,
            false => HostError::PartlyChanged { source: Box::new(self), followers: now },
        }
    }

    /// Wraps a failed statement; for `map_err`.
    pub(crate) fn sql(name: &str, action: &'static str) -> impl FnOnce(tokio_postgres::Error) -> HostError {
        let server = name.to_owned();
        move |source| HostError::Sql { server, action, source }
    }
}

/// Names in a row.
fn or_none(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// The number of a process in brackets, when it is known.
fn process(process_id: Option<u32>) -> String {
    process_id.map(|number| format!(" (process {number})")).unwrap_or_default()
}

/// The server's own words: the driver's `Display` says only "db error".
fn describe(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(server) => format!("{} ({})", server.message(), server.code().code()),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `scale` that fails keeps the followers that it has made, wants no others, and says which there are.
    ///
    /// Spec: A4
    #[test]
    fn c34_a_change_that_failed_tells_what_is_there_now() {
        let names = |count: usize| (1..=count).map(|number| format!("follower-{number}")).collect::<Vec<String>>();
        let failed = || HostError::Daemon("follower-3 cannot be cloned: no reason".to_owned());
        let nothing_done = failed().after_change(&names(1), names(1)).to_string();
        assert_eq!(nothing_done, failed().to_string());
        let one_made = failed().after_change(&names(1), names(2)).to_string();
        assert!(one_made.starts_with("follower-3 cannot be cloned: no reason; "), "{one_made}");
        assert!(one_made.contains("the followers are now follower-1, follower-2;"), "{one_made}");
        let all_gone = failed().after_change(&names(1), names(0)).to_string();
        assert!(all_gone.contains("the followers are now none;"), "{all_gone}");
    }
}
