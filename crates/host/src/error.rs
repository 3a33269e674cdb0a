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
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum HostError {
    #[error("cannot {action} {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{directory} holds no cluster; make one with: onecopy up --dir {directory}")]
    NotACluster { directory: PathBuf },
    #[error("{directory} holds other files ({found}) and no cluster; give an empty or a new directory with --dir")]
    DirectoryInUse { directory: PathBuf, found: String },
    #[error(
        "{directory} is served by another onecopy{}; stop it with: onecopy down --dir {directory}",
        process(*process_id)
    )]
    Locked { directory: PathBuf, process_id: Option<u32> },
    #[error("{parent} cannot be forked: {reason}; leave out --mode, or give --mode copy for a base backup")]
    NotForked { parent: String, reason: String },
    #[error("the fork {fork} is given up: {reason}; try again, or give --mode copy for a base backup")]
    ForkGivenUp { fork: String, reason: String },
    #[error(
        "{directory} has {free_bytes} bytes free, {wanted_bytes} are needed for {servers} new servers; free some space \
         or give another directory with --dir"
    )]
    NoSpace { directory: PathBuf, free_bytes: u64, wanted_bytes: u64, servers: usize },
    #[error("the socket directory {path} belongs to another account; remove it or give a shorter directory with --dir")]
    SocketDirectoryForeign { path: PathBuf },
    #[error(
        "the servers in {directory} belong to the account with number {owner_id}, here they would run as {user:?}; run \
         onecopy as the account that made the cluster"
    )]
    OtherAccount { directory: PathBuf, owner_id: u32, user: String },
    #[error(
        "{path} is not a cluster's state: {reason}; restore it from a backup, \
         the data directories beside it are untouched"
    )]
    InvalidState { path: PathBuf, reason: String },
    #[error("{path} holds no password; restore the file, or set the role's password in PostgreSQL and write it there")]
    EmptyPassword { path: PathBuf },
    #[error("{wanted} replicas are wanted, at most {maximum} fit on one machine; give a smaller number")]
    TooManyReplicas { wanted: usize, maximum: usize },
    #[error(
        "{wanted} replicas are wanted, but the cluster has {existing}: a follower holds a slot on the leader and a \
         copy of the data, which `up` does not throw away; give --replicas {existing} or more, or remove followers of \
         the running cluster with: onecopy scale {wanted}"
    )]
    FewerReplicas { wanted: usize, existing: usize },
    #[error("the cluster is being changed ({change}); wait until that is done, `onecopy status` tells how far it is")]
    ChangeRunning { change: String },
    #[error(
        "{source}; what was done before stays: the followers are now {}; ask for the same again, or for fewer",
        or_none(followers)
    )]
    PartlyChanged { source: Box<HostError>, followers: Vec<String> },
    #[error("there is no follower {follower:?}; there are: {}", or_none(followers))]
    NoSuchFollower { follower: String, followers: Vec<String> },
    #[error(
        "{follower} runs, but does not answer through the router within {seconds} s; it goes on trying, \
         `onecopy status` tells how far it is"
    )]
    NotAnswering { follower: String, seconds: u64 },
    #[error("{follower}: {source}")]
    Clone { follower: String, source: onecopy_clone::CloneError },
    #[error("{0}")]
    Daemon(String),
    #[error(
        "{path} is missing although cluster.toml names it: nothing else has all the data; restore it, or remove the \
         whole directory to begin anew"
    )]
    LeaderMissing { path: PathBuf },
    #[error(
        "process {process_id} still writes into {home} and does not end when killed; \
         see why, then call `onecopy up` again"
    )]
    OrphanStays { process_id: i32, home: PathBuf },
    #[error(
        "{leader}: the replication slot {slot:?} is still in use by process {process_id}; \
         end that process, then call `onecopy up` again"
    )]
    SlotInUse { leader: String, slot: String, process_id: i32 },
    #[error("{server}: {source}")]
    Server { server: String, source: PostgresError },
    #[error(transparent)]
    Postgres(#[from] PostgresError),
    #[error("{server}: cannot {action}: {}", describe(source))]
    Sql { server: String, action: &'static str, source: tokio_postgres::Error },
    #[error(
        "PostgreSQL in {directory} lacks the extension that resizes memory ({missing}); install it (`make build` from \
         the sources does), or allow to go without: `extension = \"auto\"` in [memory] of onecopy.toml"
    )]
    ExtensionMissing { directory: PathBuf, missing: onecopy_postgres::ExtensionMissing },
    #[error(
        "the schema {schema} belongs to the role {owner:?}, which is no superuser; \
         drop it, or give it to a superuser with ALTER SCHEMA"
    )]
    ForeignSchema { schema: &'static str, owner: String },
    #[error(transparent)]
    Machine(#[from] onecopy_machine::MachineError),
    #[error(transparent)]
    Memory(#[from] onecopy_memory::MemoryError),
    #[error("another onecopy looks after memory behind {socket}; end it, or give another socket with --socket")]
    MemoryAgentRuns { socket: PathBuf },
    #[error("{0}")]
    InvalidMemory(String),
    #[error("[[memory.instance]] {name:?}: {reason}")]
    InstanceUnreachable { name: String, reason: String },
    #[error(
        "no onecopy looks after memory behind {socket}; \
         start it with: onecopy memory agent, or name a cluster with --dir"
    )]
    NoMemoryAgent { socket: PathBuf },
    #[error("cannot listen for clients on {listen}: {source}; give another port with --port, 0 for any free one")]
    RouterListen { listen: SocketAddr, source: io::Error },
    #[error("the router did not start: {0}")]
    Router(#[from] RouterError),
    #[error("cannot serve metrics on {listen}: {source}; give another port with --metrics-port, 0 for any free one")]
    MetricsListen { listen: SocketAddr, source: io::Error },
    #[error(
        "the daemon of {directory} sent no reply that can be parsed: {reason}; see its log, {directory}/onecopy.log; \
         if it is of another version, start it again: `onecopy down`, then `onecopy up`"
    )]
    InvalidReply { directory: PathBuf, reason: String },
    #[error(
        "the memory agent behind {socket} sent no reply that can be parsed: {reason}; \
         if it is of another version, start it again"
    )]
    InvalidAgentReply { socket: PathBuf, reason: String },
    #[error(
        "the socket {socket} is another account's, and nothing that is said there is believed; ask as the account \
         that started onecopy, or as root where root did"
    )]
    StrangeDaemon { socket: PathBuf },
    #[error("no onecopy serves {directory}; start it with: onecopy up --dir {directory}")]
    NotRunning { directory: PathBuf },
    #[error(
        "onecopy{} does not end within {seconds} s; what it is doing is in {directory}/onecopy.log",
        process(*process_id)
    )]
    DoesNotEnd { directory: PathBuf, process_id: Option<u32>, seconds: u64 },
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
    /// Whether this host has no memory for forks.
    pub(crate) fn is_no_memory(&self) -> bool {
        matches!(self, HostError::Machine(onecopy_machine::MachineError::NoMemory { .. }))
    }

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
