//! What can fail around the memory of a server, on what, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::instance::InvalidInstance;
use crate::size::InvalidSize;
use crate::{InstanceName, Level, size};

/// An operation on memory that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum MemoryError {
    #[error(transparent)]
    InvalidSize(#[from] InvalidSize),
    #[error(transparent)]
    InvalidInstance(#[from] InvalidInstance),
    #[error("no instance {name:?} here; there are: {known}")]
    UnknownInstance { name: String, known: String },
    #[error("cannot {action} {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} cannot be understood: {reason}")]
    Malformed { path: PathBuf, reason: String },
    #[error("{instance} cannot be reached: {reason}")]
    Unreachable { instance: InstanceName, reason: String },
    #[error("{instance} cannot {action}: {reason}")]
    Statement { instance: InstanceName, action: &'static str, reason: String },
    #[error("{instance} did not {action} within {} ms", waited.as_millis())]
    NoAnswer { instance: InstanceName, action: &'static str, waited: Duration },
    #[error(
        "{instance} cannot have {}: its floor is {}; ask for more, or lower the floor where that is safe",
        size::text(*target_bytes), size::text(*floor_bytes)
    )]
    BelowFloor { instance: InstanceName, target_bytes: u64, floor_bytes: u64 },
    #[error(
        "{instance} cannot have {}: its ceiling is {}; ask for less, or restart it with a higher ceiling",
        size::text(*target_bytes), size::text(*ceiling_bytes)
    )]
    AboveCeiling { instance: InstanceName, target_bytes: u64, ceiling_bytes: u64 },
    #[error(
        "{instance} cannot have {}: cgroup {cgroup} is limited to {} and a pool may have {} of that; \
         ask for less, or raise the limit",
        size::text(*target_bytes), size::text(*limit_bytes), size::text(*most_bytes)
    )]
    AboveLimit { instance: InstanceName, target_bytes: u64, cgroup: String, limit_bytes: u64, most_bytes: u64 },
    #[error(
        "{instance} cannot have {}: the others keep {} and all together may have {}; ask for less, set others smaller \
         first, or raise the budget",
        size::text(*target_bytes), size::text(*others_bytes), size::text(*budget_bytes)
    )]
    OverBudget { instance: InstanceName, target_bytes: u64, others_bytes: u64, budget_bytes: u64 },
    #[error("{instance} cannot {action}: {reason}; {remedy}")]
    Unable { instance: InstanceName, action: &'static str, reason: String, remedy: &'static str },
    #[error("{instance} works by the level {level}, which cannot {action}; choose another level for it")]
    WrongLevel { instance: InstanceName, level: Level, action: &'static str },
    #[error("{program} for {instance} failed ({status}): {output}")]
    Program { program: PathBuf, instance: InstanceName, status: String, output: String },
    #[error("no server of {data_directory} is seen here: {reason}")]
    NoServer { data_directory: PathBuf, reason: String },
    #[error(
        "cgroup {cgroup} cannot be limited to {}: {} of it cannot be had back without swapping or killing; \
         shrink its pools first",
        size::text(*limit_bytes), size::text(*usage_bytes)
    )]
    LimitBelowUsage { cgroup: String, limit_bytes: u64, usage_bytes: u64 },
    #[error("{what} is not possible on this host: {reason}")]
    NotAllowed { what: &'static str, reason: String },
}

impl MemoryError {
    /// For `map_err` after a file operation on `path`.
    pub(crate) fn file(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> MemoryError {
        let path = path.as_ref().to_owned();
        move |source| MemoryError::File { action, path, source }
    }
}
