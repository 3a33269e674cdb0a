//! What this host does for others: it lets them read the images of its sources, and makes clones of theirs.
//!
//! ```text
//!   other host ══ TLS, both known ══> [door] ── ping
//!                                       ├────── image of an allowed source ──> the source's clone service, byte by byte
//!                                       └────── clone into an allowed directory ──> [ordered], whose image comes from the other host
//! ```
//!
//! Nothing is allowed unless it was named when the daemon was started.

mod allowed;
mod door;
mod order;
mod ordered;

pub use allowed::Allowed;
pub use door::Door;
pub use order::{CloneOrder, OrderEvent, order_clone, ping};
