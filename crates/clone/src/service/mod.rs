//! How others talk to the process in which clones are made: where it is met, what is said, both sides' connection.
//!
//! ```text
//!   /run/onecopy/clone-<key of the source>/
//!     lock      held by keeper and hydrator: one service a source
//!     socket    only for root; kept over restarts of the hydrator
//!     log       what both say
//!     targets   clones that are not whole, for whoever comes after both were killed
//! ```
//!
//! Nobody starts a service by hand: whoever wants a clone and finds none takes the lock, binds the socket and hands
//! both to a new keeper. The service goes when it has nothing left to do, and the directory with it.

mod client;
mod connection;
mod following;
mod maker;
mod protocol;
mod rendezvous;

pub use client::{CloneDescriptors, HYDRATOR_COMMAND, KEEPER_COMMAND, MakingEvent, ReadyClone, Service};
pub use connection::Connection;
pub use following::{Making, Watching, state_without_service};
pub use maker::ServiceMaker;
pub use protocol::{CloneState, Event, LINE_BYTES_MAX, Progress, Request, SpareWanted, WATCH_INTERVAL};
pub use rendezvous::{Beginning, RUN_DIRECTORY, Rendezvous};

/// The name under which a keeper holds the listening socket.
pub const KEPT_LISTENER: &str = "listener";
/// The name under which a keeper holds the lock.
pub const KEPT_LOCK: &str = "lock";
