//! What can fail around a PostgreSQL server, on what, and what to do about it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::control_file::ControlFileError;

/// An operation on a PostgreSQL server that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostgresError {
    /// No usable server programs were found.
    #[error(
        "no PostgreSQL 15 to 18 server programs found (looked at: {looked_at}); install postgresql or give the \
         directory of `postgres` and `initdb` with --pg-bindir"
    )]
    BinariesNotFound {
        /// The places that were tried, each with what was wrong there.
        looked_at: String,
    },
    /// A program is there, but not of a version that is supported.
    #[error("{program} is PostgreSQL {found:?}, supported are 15 to 18; give another directory with --pg-bindir")]
    UnsupportedVersion {
        /// The program that was asked.
        program: PathBuf,
        /// What it answered.
        found: String,
    },
    /// The account that the server should run as does not exist.
    #[error(
        "no account {name:?} on this machine ({reason}); PostgreSQL refuses to run as root: \
         create it or name another account"
    )]
    UnknownServiceUser {
        /// The account's name.
        name: String,
        /// What `id` said.
        reason: String,
    },
    /// The service user cannot pass a directory on the way to its own.
    #[error(
        "{path} is not reachable for the account {user:?}: {blocked_by} is not searchable for it; choose another \
         directory or run: chmod o+x {blocked_by}"
    )]
    NotReachable {
        /// The directory that is wanted.
        path: PathBuf,
        /// The directory on the way that stops it.
        blocked_by: PathBuf,
        /// The account.
        user: String,
    },
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
    /// A program could not be started.
    #[error("cannot run {program}: {source}")]
    Spawn {
        /// The program.
        program: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A program ended with a failure.
    #[error("{program} failed ({status}): {output}")]
    Program {
        /// The program's name.
        program: String,
        /// Its exit status in words.
        status: String,
        /// The end of what it printed.
        output: String,
    },
    /// A new data directory is wanted where something lies already.
    #[error("{path} exists and is not empty; open the server that it holds, or choose another directory")]
    DataDirectoryNotEmpty {
        /// The data directory.
        path: PathBuf,
    },
    /// A directory does not hold a PostgreSQL data directory.
    #[error("{path} is not a PostgreSQL data directory (no readable PG_VERSION)")]
    NotADataDirectory {
        /// The data directory.
        path: PathBuf,
    },
    /// The data directory belongs to another major version than the programs.
    #[error(
        "{path} was made by PostgreSQL {data}, the programs are PostgreSQL {programs}; \
         give the programs of version {data} with --pg-bindir"
    )]
    VersionMismatch {
        /// The data directory.
        path: PathBuf,
        /// Major version of the data.
        data: u32,
        /// Major version of the programs.
        programs: u32,
    },
    /// A Unix socket would have a path that the kernel refuses.
    #[error("the socket path {path} has {length} bytes, the kernel allows {length_max}; choose a shorter directory")]
    SocketPathTooLong {
        /// The socket's path.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
        /// The longest that works.
        length_max: usize,
    },
    /// A setting or rule cannot be written into a configuration file.
    #[error("the setting {name:?} cannot be written to a configuration file: {reason}")]
    InvalidSetting {
        /// The setting.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The server ended instead of starting.
    #[error("the server in {path} did not start ({status}); its log says:\n{log}")]
    StartFailed {
        /// The data directory.
        path: PathBuf,
        /// How the postmaster ended.
        status: String,
        /// The server's own last complaints.
        log: String,
    },
    /// The server did not accept connections in time.
    #[error("the server in {path} was not ready within {} s (last: {last}); its log says:\n{log}", waited.as_secs())]
    NotReady {
        /// The data directory.
        path: PathBuf,
        /// How long it was waited for.
        waited: Duration,
        /// The last thing that stood in the way.
        last: String,
        /// The server's own last complaints.
        log: String,
    },
    /// The server did not stop in time.
    #[error(
        "the server in {path} (process {process_id}) did not stop within {} s; stop it with a harder mode; \
         its log says:\n{log}",
        waited.as_secs()
    )]
    NotStopped {
        /// The data directory.
        path: PathBuf,
        /// The postmaster.
        process_id: u32,
        /// How long it was waited for.
        waited: Duration,
        /// The server's own last complaints.
        log: String,
    },
    /// The server must run for this.
    #[error("the server in {path} is not running; start it first")]
    NotRunning {
        /// The data directory.
        path: PathBuf,
    },
    /// A running server that was found listens elsewhere than it is configured to.
    #[error(
        "the server in {path} runs already (process {process_id}) on port {found}, not on {wanted}; \
         stop it first or give that port"
    )]
    RunningOnOtherPort {
        /// The data directory.
        path: PathBuf,
        /// The postmaster.
        process_id: u32,
        /// Its port.
        found: u16,
        /// The configured port.
        wanted: u16,
    },
    /// A connection to a server failed.
    #[error("cannot connect to {target}: {}", describe(source))]
    Connect {
        /// Host, port, user and database.
        target: String,
        /// What the driver or the server said.
        source: tokio_postgres::Error,
    },
    /// A connection to a server took too long.
    #[error("{target} did not answer within {} s", waited.as_secs())]
    ConnectTimeout {
        /// Host, port, user and database.
        target: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A connection string could not be understood.
    #[error(
        "cannot understand the connection string: {0}; give host=.. port=.. user=.. or \
         postgresql://user@host:port/database"
    )]
    InvalidConnectionString(String),
    /// A statement failed.
    #[error("cannot {action}: {}", describe(source))]
    Sql {
        /// What the statement was for.
        action: &'static str,
        /// What the server said.
        source: tokio_postgres::Error,
    },
    /// The server answered something that makes no sense here.
    #[error("cannot {action}: unexpected answer {answer:?}")]
    UnexpectedAnswer {
        /// What the statement was for.
        action: &'static str,
        /// The answer.
        answer: String,
    },
    /// The control file cannot be used.
    #[error("control file {path}: {source}")]
    ControlFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: ControlFileError,
    },
    /// The machine that a server runs in failed.
    #[error("{reason}")]
    Machine {
        /// What failed, in its own words.
        reason: String,
    },
    /// A supervised server is down and is being tried again.
    #[error("the server is down and will be tried again: {reason}")]
    Down {
        /// Why it is down.
        reason: String,
    },
    /// The supervisor's task is gone.
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
