//! Servers whose pool can be watched and resized.

#[cfg(feature = "own")]
mod checkpoints;
mod extension;
mod mariadb;
#[cfg(feature = "own")]
mod own;
mod plain;
mod processes;
mod rates;
mod session;

use std::future::Future;
use std::pin::Pin;

use serde::{Deserialize, Serialize};

pub use extension::ExtensionEngine;
pub use mariadb::{MariaDbAccess, MariaDbEngine};
#[cfg(feature = "own")]
pub use own::OwnEngine;
pub use plain::PlainEngine;
pub use session::Reach;

use crate::{BindingLimit, Bytes, InstanceName, Kind, Level, MemoryError, Observation, size};

/// What the methods of [`Engine`] return. Dropping it stops waiting; what the server was told holds.
pub type EngineFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, MemoryError>> + Send + 'a>>;

/// Told how far a change is.
pub type Report<'a> = &'a (dyn Fn(&Progress) + Send + Sync);

/// How far a change of a pool is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The pool when the change began.
    pub from_bytes: Bytes,
    /// Where it shall end.
    pub target_bytes: Bytes,
    /// The pool now.
    pub pool_bytes: Bytes,
    /// What it waits for, in the server's words.
    pub blocked_by: Option<String>,
}

/// What a server was told and where it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The pool before.
    pub from_bytes: Bytes,
    /// The target as the server holds it: rounded to what it can do.
    pub target_bytes: Bytes,
    /// The pool when this was made.
    pub pool_bytes: Bytes,
}

impl Change {
    /// Whether the pool has arrived.
    pub fn reached(&self) -> bool {
        self.pool_bytes == self.target_bytes
    }
}

/// Memory that was taken without asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Taken {
    /// How much really went back to the host; less than wanted when no more could be had.
    pub bytes: Bytes,
    /// How much smaller the pool is: more than that where nobody had touched it.
    #[serde(default)]
    pub size_bytes: Bytes,
    /// How long it took.
    pub microseconds: u64,
}

/// What is seen of a server from outside.
#[derive(Debug, Clone, PartialEq)]
pub enum Presence {
    /// It runs on this host, below these limits of cgroups.
    Running(Vec<BindingLimit>),
    /// It does not run on this host.
    Absent,
    /// Nobody can tell, or not yet.
    Unclear,
}

/// A server whose pool can be watched and resized. All methods may be called at any time and by several tasks.
pub trait Engine: Send + Sync {
    /// Its name.
    fn instance(&self) -> &InstanceName;

    /// What it is.
    fn kind(&self) -> Kind;

    /// How it is driven.
    fn level(&self) -> Level;

    /// What it has and needs now.
    fn observe(&self) -> EngineFuture<'_, Observation>;

    /// Tells it a new target and does not wait until it is reached.
    ///
    /// # Errors
    /// [`MemoryError::BelowFloor`], [`MemoryError::AboveCeiling`], [`MemoryError::Unable`] with the remedy; nothing has
    /// changed then.
    fn set_target(&self, target_bytes: Bytes) -> EngineFuture<'_, Change>;

    /// Waits until the pool has the size `target_bytes` (as [`Change::target_bytes`] gave it), and reports on the way.
    ///
    /// # Errors
    /// [`MemoryError::Unable`] when somebody else gave it another target meanwhile.
    fn reach<'a>(&'a self, target_bytes: Bytes, report: Report<'a>) -> EngineFuture<'a, Change>;

    /// Whether it is seen on this host, with the limits of cgroups above it, whether it answers or not.
    fn presence(&self) -> EngineFuture<'_, Presence> {
        Box::pin(std::future::ready(Ok(Presence::Unclear)))
    }

    /// Takes up to `bytes` without asking, at levels `publish` and `own`.
    ///
    /// # Errors
    /// [`MemoryError::WrongLevel`] at level `request`.
    fn take(&self, bytes: Bytes) -> EngineFuture<'_, Taken>;
}

/// The answer to somebody who waits for a size while the server works towards another one.
fn overtaken(instance: &InstanceName, target_bytes: Bytes) -> MemoryError {
    MemoryError::Unable {
        instance: instance.clone(),
        action: "reach this size",
        reason: format!("somebody has given it the target {} meanwhile", size::text(target_bytes)),
        remedy: "ask for the status",
    }
}
