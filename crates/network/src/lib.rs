//! A machine's network card, passed by a process of ours: frames between QEMU's stream and a tap interface, held where
//! what the machine sends shall wait.
//!
//! ```text
//!  guest ── QEMU ──(length, frame)──> filter ──┬── passed at once ───────> tap ── bridge
//!                                              └── held: state, epochs ──> tap, once its epoch is released
//!  guest <── QEMU <──(length, frame)── frames of the tap, always at once
//! ```
//!
//! - [`Tap`]: the interface, which lives as long as somebody has its descriptor.
//! - [`State`]: what must outlive the process, in a memory file: held frames, their epochs, counters.
//! - [`Passer`]: the loop between the two, asked by [`Remote`].
//! - [`announcements`]: frames that tell a network where an address is.

mod announce;
mod error;
mod frame;
mod passer;
mod state;
mod tap;

pub use announce::announcements;
pub use error::NetworkError;
pub use frame::{FRAME_BYTES_MAX, FRAME_BYTES_MIN, Filter, HardwareAddress, Refusal};
pub use passer::{Passer, Remote, Statistics};
pub use state::{HELD_BYTES_MAX, HELD_FRAMES_MAX, State};
pub use tap::{Tap, check_bridge, check_name};
