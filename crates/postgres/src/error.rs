//! What can fail around a PostgreSQL server, on what, and what to do about it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::{MAJOR_VERSION_MAX, MAJOR_VERSION_MIN};

/// An operation on a PostgreSQL server that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum PostgresError {
    #[error(
        "no PostgreSQL {} to {} server programs found (looked at: {looked_at}); \
         install postgresql or give the directory of `postgres` and `initdb` with --pg-bindir",
        MAJOR_VERSION_MIN,
        MAJOR_VERSION_MAX
    )]
    BinariesNotFound { looked_at: String },
    #[error(
        "{program} is PostgreSQL {found:?}, supported are {} to {}; give another directory with \
         --pg-bindir",
        MAJOR_VERSION_MIN,
        MAJOR_VERSION_MAX
    )]
    UnsupportedVersion { program: PathBuf, found: String },
    #[error(
        "no account {name:?} on this machine ({reason}); PostgreSQL refuses to run as root: \
         create it or name another account"
    )]
    UnknownServiceUser { name: String, reason: String },
    #[error(
        "{path} is not reachable for the account {user:?}: {blocked_by} is not searchable for it; choose another \
         directory or run: chmod o+x {blocked_by}"
    )]
    NotReachable { path: PathBuf, blocked_by: PathBuf, user: String },
    #[error("cannot {action} {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot run {program}: {source}")]
    Spawn { program: PathBuf, source: io::Error },
    #[error("{program} failed ({status}): {output}")]
    Program { program: String, status: String, output: String },
    #[error("{path} exists and is not empty; open the server that it holds, or choose another directory")]
    DataDirectoryNotEmpty { path: PathBuf },
    #[error("{path} is not a PostgreSQL data directory (no readable PG_VERSION)")]
    NotADataDirectory { path: PathBuf },
    #[error(
        "{path} was made by PostgreSQL {data}, the programs are PostgreSQL {programs}; \
         give the programs of version {data} with --pg-bindir"
    )]
    VersionMismatch { path: PathBuf, data: u32, programs: u32 },
    #[error("the socket path {path} has {length} bytes, the kernel allows {length_max}; choose a shorter directory")]
    SocketPathTooLong { path: PathBuf, length: usize, length_max: usize },
    #[error("the setting {name:?} cannot be written to a configuration file: {reason}")]
    InvalidSetting { name: String, reason: &'static str },
    #[error("the server in {path} did not start ({status}); its log says:\n{log}")]
    StartFailed { path: PathBuf, status: String, log: String },
    #[error("the server in {path} was not ready within {} s (last: {last}); its log says:\n{log}", waited.as_secs())]
    NotReady { path: PathBuf, waited: Duration, last: String, log: String },
    #[error(
        "the server in {path} (process {process_id}) did not stop within {} s; stop it with a harder mode; \
         its log says:\n{log}",
        waited.as_secs()
    )]
    NotStopped { path: PathBuf, process_id: u32, waited: Duration, log: String },
    #[error("the server in {path} is not running; start it first")]
    NotRunning { path: PathBuf },
    #[error(
        "the server in {path} runs already (process {process_id}) on port {found}, not on {wanted}; \
         stop it first or give that port"
    )]
    RunningOnOtherPort { path: PathBuf, process_id: u32, found: u16, wanted: u16 },
    #[error("cannot connect to {target}: {}", describe(source))]
    Connect { target: String, source: tokio_postgres::Error },
    #[error("{target} did not answer within {} s", waited.as_secs())]
    ConnectTimeout { target: String, waited: Duration },
    #[error(
        "cannot understand the connection string: {0}; give host=.. port=.. user=.. or \
         postgresql://user@host:port/database"
    )]
    InvalidConnectionString(String),
    #[error("cannot {action}: {}", describe(source))]
    Sql { action: &'static str, source: tokio_postgres::Error },
    #[error("cannot {action}: unexpected answer {answer:?}")]
    UnexpectedAnswer { action: &'static str, answer: String },
    #[error("control file {path}: {source}")]
    ControlFile { path: PathBuf, source: ControlFileError },
    #[error("{reason}")]
    Machine { reason: String },
    #[error("the server is down and will be tried again: {reason}")]
    Down { reason: String },
    #[error("the supervisor of the server has ended already")]
    SupervisorGone,
}

impl PostgresError {
    /// Wraps a failed file operation; for `map_err`.
    pub fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> PostgresError {
        let path = path.into();
        move |source| PostgresError::File { action, path, source }
    }

    /// Wraps a failed statement; for `map_err`.
    pub fn sql(action: &'static str) -> impl FnOnce(tokio_postgres::Error) -> PostgresError {
        move |source| PostgresError::Sql { action, source }
    }
}

/// The server's own message and hint when there is one: the driver's `Display` says only "db error".
fn describe(error: &tokio_postgres::Error) -> String {
    if let Some(server) = error.as_db_error() {
        let hint = server.hint().map(|hint| format!("; {hint}")).unwrap_or_default();
        return format!("{} ({}){hint}", server.message(), server.code().code());
    }
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// A control file that cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum ControlFileError {
    #[error("it has {0} bytes, less than its layout needs: it is torn or no control file")]
    TooShort(usize),
    #[error("format {format} with catalog {catalog} is not PostgreSQL {} to {}", MAJOR_VERSION_MIN, MAJOR_VERSION_MAX)]
    UnsupportedVersion { format: u32, catalog: u32 },
    #[error("its checksum is {found:08x} and should be {computed:08x}: it is torn or damaged")]
    WrongChecksum { found: u32, computed: u32 },
    #[error("its field {field} has the impossible value {value}")]
    ImpossibleValue { field: &'static str, value: i64 },
}
