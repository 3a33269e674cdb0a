//! Memory of a host's database servers: given back when the host wants it, taken again when it is there.
//!
//! ```text
//!  [pressure] ── what the host has ──┐                                        ┌──> [engine] PostgreSQL with the extension ── [published]
//!                                    ├──> [arbiter] ── decisions ── [agent] ──┼──> [engine] PostgreSQL without it ───────── [own]
//!  [engine] ── what each pool needs ─┘     (pure)       (acts, keeps a log)   └──> [engine] MariaDB, MySQL
//! ```
//!
//! Three levels of working together, [`Level`]: a server shrinks its pool on *request*, it *publishes* memory that may
//! be taken without asking, or its memory is *owned* by the host, which reads the server's own buffer table: that one
//! is built with the feature `own` alone. [`cgroup`] gives an instance its own limits. The sum of all targets never
//! exceeds the budget, and nothing is grown before the memory for it has come back.

pub mod agent;
pub mod arbiter;
pub mod cgroup;
pub mod engine;
mod error;
mod instance;
mod observation;
#[cfg(feature = "own")]
pub mod own;
pub mod pressure;
pub mod published;
mod segment;
pub mod size;
pub mod untrusted_file;

pub use error::MemoryError;
pub use instance::{InstanceName, InvalidInstance, Kind, Level};
pub use observation::{BindingLimit, GhostStep, HostPressure, Observation};
pub use size::{Bytes, InvalidSize, Size};
