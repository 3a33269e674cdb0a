//! Bringing a clone's files to the content that the source's files had at the freeze: on demand, and in the background.
//!
//! ```text
//!   clone's access ──> [DemandListener] ──┐
//!   source's write ──> (source)         ──┼──> [Filling::ensure] ── missing? claim ── Origin::read ── write ── bit ── release
//!   [Background], through a [Limiter]   ──┘                            └ claimed by another: wait for it
//! ```
//!
//! A chunk is *missing*, then *in flight* (claimed by one thread), then *filled*; or it goes from missing to filled at
//! once because nobody needs its content any more (*waived*). Its bit says filled, and never goes back. No access of a
//! missing chunk is allowed on either side, so what is in flight cannot change under the reader.

mod background;
mod bitmap;
mod counters;
mod demand;
mod filling;
mod in_flight;
mod layout;
mod limiter;
mod pool;
mod priority;

pub use background::Background;
pub use bitmap::SharedBitmap;
pub use counters::FillProgress;
pub use demand::{DemandGroup, DemandListener};
pub use filling::{FillError, Filling};
pub(crate) use in_flight::{Claim, InFlight};
pub(crate) use layout::Layout;
pub use limiter::Limiter;

#[cfg(test)]
mod tests;
