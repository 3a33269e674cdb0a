//! What this host does for others: it lets them read the images of its sources, and makes clones of theirs.
//!
//! ```text
//!   other host ══ TLS, both known ══> [listener] ── ping
//!                                       ├────── image of an allowed source ──> the source's clone service, byte by byte
//!                                       ├────── a machine, or the disk of one that has gone ──> its keeper, or its snapshot
//!                                       └────── clone into an allowed directory ──> [ordered], whose image comes from the other host
//! ```
//!
//! Nothing is allowed unless it was named when the daemon was started, and nothing is believed that [`accepted`] has
//! not looked at: this side decides the account, addresses, commands and files; of settings and access rules the other
//! one has those that [`carried`] names.

mod accepted;
mod allowed;
mod carried;
mod host;
mod listener;
mod machines;
mod order;
mod ordered;

pub use allowed::Allowed;
pub use carried::{carried_rules, carried_settings};
pub use listener::Listener;
pub use order::{CloneOrder, OrderEvent, order_clone, ping};
