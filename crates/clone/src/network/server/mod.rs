//! The source's side: images that are read from other hosts.
//!
//! ```text
//!            Open               freeze                      first connection
//!   (none) ────────> freezing ──────────> manifest sent ─────────────────────> read ── End ───────────────> ended
//!                       │                                                       │ └── all delivered, End ──┘
//!                       └── refused                                             ├── nobody for the lease ──> ended: deserted
//!                                                                               └── cannot be kept ────────> ended: failed
//! ```

mod conversation;
mod sessions;

pub use conversation::serve;
pub use sessions::{Checking, Ended, Finding, Frozen, ImageMaker, Making, SESSIONS_MAX, Sessions};

#[cfg(test)]
pub(crate) mod tests;
