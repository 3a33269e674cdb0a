//! What an agent replies.

use super::Bytes;
use serde::{Deserialize, Serialize};

/// One line from the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// The request's; null when the line was no request.
    pub id: Option<u64>,
    /// `ok`, `error` or `progress`.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What a reply says. After `progress` more replies with the same id follow; the other two are the last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is done.
    Ok(Answer),
    /// It is not.
    Error(Failure),
    /// It is under way.
    Progress(Progress),
}

/// What was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// To `hello`.
    Hello(Greeting),
    /// To `health`.
    Health(Health),
    /// To `free_pages`.
    FreePages(FreePages),
    /// To `execute`.
    Executed(Executed),
    /// To `postgres` with `status`.
    Postgres(PostgresStatus),
    /// To all the others.
    Done {},
}

/// Who replies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// The version that both speak from now on: the newest that both know.
    pub version: u32,
    /// The agent's program version.
    pub program: String,
    /// `/proc/sys/kernel/random/boot_id`: another one is another boot.
    pub boot_id: String,
    /// The kernel's release.
    pub kernel: String,
}

/// Pages of the guest's memory that its kernel has free: it writes one before it reads it again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreePages {
    /// Runs of them: the number of the first, by its address in the guest, and how many. Rising, at least
    /// [`super::FREE_RUN_PAGES_MIN`] pages each, at most [`super::FREE_RUNS_MAX`] of them.
    pub runs: Vec<(u64, u64)>,
    /// The number of a page that begins with `witness`.
    pub witness_page: u64,
    /// Random bytes.
    pub witness: Bytes,
}

/// How the guest is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// Milliseconds since the kernel started.
    pub uptime_ms: u64,
    /// Its clock: nanoseconds since 1970 in UTC.
    pub unix_ns: u64,
    /// Memory of the guest.
    pub memory_total_bytes: u64,
    /// What programs could still have of it.
    pub memory_available_bytes: u64,
    /// Size of the root file system.
    pub root_total_bytes: u64,
    /// What is free of it.
    pub root_available_bytes: u64,
    /// The server.
    pub postgres: PostgresStatus,
    /// What went wrong while the guest came up, a line each; empty when all is well.
    pub complaints: Vec<String>,
}

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Executed {
    /// Its exit status; null when a signal ended it.
    pub status: Option<i32>,
    /// The signal that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// What it wrote, up to [`super::OUTPUT_BYTES_MAX`].
    pub stdout: Bytes,
    /// What it complained, up to [`super::OUTPUT_BYTES_MAX`].
    pub stderr: Bytes,
    /// It wrote more than was kept.
    #[serde(default)]
    pub truncated: bool,
}

/// The guest's server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostgresStatus {
    /// What it does.
    pub state: PostgresState,
    /// The major version of the programs in the image; null when it has none.
    pub major: Option<u32>,
    /// The postmaster's process id in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The data directory.
    pub data_directory: String,
    /// The log file.
    pub log: String,
}

/// What a server does: the last line of `postmaster.pid` tells, and whether its process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PostgresState {
    /// There is no data directory.
    Absent,
    /// No server runs.
    Stopped,
    /// It recovers, or is otherwise not ready yet.
    Starting,
    /// It accepts connections, of a primary.
    Primary,
    /// It accepts connections, of a standby.
    Standby,
    /// It stops.
    Stopping,
}

impl PostgresState {
    /// Does the server accept connections?
    pub fn is_ready(self) -> bool {
        matches!(self, PostgresState::Primary | PostgresState::Standby)
    }
}

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What a program decides by.
    pub kind: FailureKind,
    /// What a person reads.
    pub message: String,
}

/// Why something was not done, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The line was no request, or its values make no sense.
    Malformed,
    /// No version is known to both.
    Version,
    /// [`super::COMMANDS_MAX`] commands are under way, or as many urgent ones as there may be: ask again.
    Busy,
    /// It took longer than was allowed.
    Timeout,
    /// It was tried and failed.
    Failed,
}

/// What is being done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// A line for a person.
    pub message: String,
    /// Bytes copied so far, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done_bytes: Option<u64>,
    /// Bytes to copy, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
}
