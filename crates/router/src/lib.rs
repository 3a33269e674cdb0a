//! One-copy serializability over a PostgreSQL leader and its followers.
//!
//! Updates run on the leader, SERIALIZABLE. Reads run anywhere, each at one *epoch*: a prefix of the leader's commit
//! order that is open on every replica at once. The way of a statement through this crate:
//!
//! ```text
//! client -> session (log-in, messages) -> sql (what is it?) -+-> pool::LeaderPool -> epoch::CommitBarrier -> leader
//!                                                            +-> epoch::Epochs -> pool::ReaderPool -> any server
//! ```

pub mod authentication;
pub mod backend;
pub mod config;
mod console;
mod database;
mod drain;
pub mod epoch;
mod error;
mod health;
mod live_credentials;
mod malloc_trim;
mod membership;
mod metrics;
mod orphaned_transactions;
mod pool;
mod prepared_text;
mod read_share;
mod router;
mod serializable;
mod servers;
mod session;
mod settings;
pub mod sql;
mod state;
mod status;
mod timeline;
mod topology;
pub mod wire;

pub use epoch::GateSummary;
pub use error::RouterError;
pub use router::{Router, RouterObserver};
pub use servers::Health;
pub use session::GONE_CLIENT_BOUND;
pub use status::{DatabaseStatus, RouterStatus, ServerStatus};
pub use topology::{Role, Topology};
