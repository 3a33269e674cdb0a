//! What can fail around the memory of a server, on what, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{InstanceName, Level, size};

/// An operation on memory that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A size cannot be understood.
    #[error("{text:?} is not a size: {reason}; write a number and a unit of B, kB, MB, GB, TB, PB, as in 512MB")]
    InvalidSize {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A name cannot be an instance's.
    #[error(
        "{name:?} cannot name an instance; use 1 to {length_max} letters, digits, and . _ - of ASCII, \
         a letter or digit first"
    )]
    InvalidInstanceName {
        /// What was given.
        name: String,
        /// The longest allowed.
        length_max: usize,
    },
    /// No instance of this name is known.
    #[error("no instance {name:?} here; there are: {known}")]
    UnknownInstance {
        /// What was asked for.
        name: String,
        /// The names that would be right.
        known: String,
    },
    /// A level or kind that does not exist.
    #[error("{text:?} is none of: {known}")]
    UnknownWord {
        /// What was given.
        text: String,
        /// The words that would be right.
        known: &'static str,
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
    /// A file of the kernel or of a server does not hold what it should.
    #[error("{path} cannot be understood: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The server cannot be reached.
    #[error("{instance} cannot be reached: {reason}")]
    Unreachable {
        /// The instance.
        instance: InstanceName,
        /// Why.
        reason: String,
    },
    /// The server refused a statement or the connection broke.
    #[error("{instance} cannot {action}: {reason}")]
    Statement {
        /// The instance.
        instance: InstanceName,
        /// What was wanted, as a verb.
        action: &'static str,
        /// The server's message with its detail and hint.
        reason: String,
    },
    /// The server did not answer in time.
    #[error("{instance} did not {action} within {} ms", waited.as_millis())]
    NoAnswer {
        /// The instance.
        instance: InstanceName,
        /// What was wanted, as a verb.
        action: &'static str,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A size below the least that is safe.
    #[error(
        "{instance} cannot have {}: its floor is {}; ask for more, or lower the floor where that is safe",
        size::text(*target_bytes), size::text(*floor_bytes)
    )]
    BelowFloor {
        /// The instance.
        instance: InstanceName,
        /// What was asked for.
        target_bytes: u64,
        /// The least allowed.
        floor_bytes: u64,
    },
    /// A size above the most that the server can ever have.
    #[error(
        "{instance} cannot have {}: its ceiling is {}; ask for less, or restart it with a higher ceiling",
        size::text(*target_bytes), size::text(*ceiling_bytes)
    )]
    AboveCeiling {
        /// The instance.
        instance: InstanceName,
        /// What was asked for.
        target_bytes: u64,
        /// The most possible.
        ceiling_bytes: u64,
    },
    /// A size that does not fit under the limit of a cgroup; the limit is not raised for it.
    #[error(
        "{instance} cannot have {}: cgroup {cgroup} is limited to {} and a pool may have {} of that; \
         ask for less, or raise the limit",
        size::text(*target_bytes), size::text(*limit_bytes), size::text(*most_bytes)
    )]
    AboveLimit {
        /// The instance.
        instance: InstanceName,
        /// What was asked for.
        target_bytes: u64,
        /// The cgroup above it that has the limit.
        cgroup: String,
        /// Where the kernel takes pages away, swaps or kills.
        limit_bytes: u64,
        /// What of it a pool may have.
        most_bytes: u64,
    },
    /// A size for which the others cannot make room.
    #[error(
        "{instance} cannot have {}: the others keep {} and all together may have {}; ask for less, set others smaller \
         first, or raise the budget",
        size::text(*target_bytes), size::text(*others_bytes), size::text(*budget_bytes)
    )]
    OverBudget {
        /// The instance.
        instance: InstanceName,
        /// What was asked for.
        target_bytes: u64,
        /// What the others keep in any case.
        others_bytes: u64,
        /// The most for all together.
        budget_bytes: u64,
    },
    /// The instance cannot do what is wanted; nothing was changed.
    #[error("{instance} cannot {action}: {reason}; {remedy}")]
    Unable {
        /// The instance.
        instance: InstanceName,
        /// What was wanted, as a verb.
        action: &'static str,
        /// Why not.
        reason: String,
        /// What would help.
        remedy: &'static str,
    },
    /// The instance is not driven at this level.
    #[error("{instance} works by the level {level}, which cannot {action}; choose another level for it")]
    WrongLevel {
        /// The instance.
        instance: InstanceName,
        /// Its level.
        level: Level,
        /// What was wanted, as a verb.
        action: &'static str,
    },
    /// A client program could not be started or failed.
    #[error("{program} for {instance} failed ({status}): {output}")]
    Program {
        /// The program.
        program: PathBuf,
        /// The instance.
        instance: InstanceName,
        /// Its exit status, or why it could not be started, in words.
        status: String,
        /// The end of what it complained.
        output: String,
    },
    /// No server runs in this directory, or none that can be seen from here.
    #[error("no server of {data_directory} is seen here: {reason}")]
    NoServer {
        /// The server's data directory.
        data_directory: PathBuf,
        /// What was looked for and not found.
        reason: String,
    },
    /// A limit that a cgroup already exceeds.
    #[error(
        "cgroup {cgroup} cannot be limited to {}: {} of it cannot be had back without swapping or killing; \
         shrink its pools first",
        size::text(*limit_bytes), size::text(*usage_bytes)
    )]
    LimitBelowUsage {
        /// Which cgroup, as a path below the file system of cgroups.
        cgroup: String,
        /// The limit that was wanted.
        limit_bytes: u64,
        /// What it uses without clean page cache, and what must be free beside that.
        usage_bytes: u64,
    },
    /// The host does not allow it.
    #[error("{what} is not possible on this host: {reason}")]
    NotAllowed {
        /// What was wanted.
        what: &'static str,
        /// Why not.
        reason: String,
    },
}

impl MemoryError {
    /// For `map_err` after a file operation on `path`.
    pub(crate) fn file(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> MemoryError {
        let path = path.as_ref().to_owned();
        move |source| MemoryError::File { action, path, source }
    }
}
