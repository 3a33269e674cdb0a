//! The running server whose content is frozen: what it is about to change is saved first.
//!
//! ```text
//!   arm ──> adopt ──> get_ready ──> close_gate ──> Freezing: image, files, follow ──> open_gate ──> ... ──> unfollow
//!    │        │           │             │                                                 │                    │
//!  ignored  every       listed     accesses wait                             accesses go on as soon     ignored again
//!  marks   descriptor  and opened  at the gate                               as all followers have
//!          is armed                                                          what they touch
//! ```
//!
//! An access of a watched file is, in this order: *allowed* when it is this process's own; *held* while the gate is
//! closed; *resolved* otherwise: every follower that has not got the range takes it, at once when its content is in
//! memory, else in a worker; then it is allowed. Answers are given while the gate cannot be closed, so that nothing
//! that was asked before a freeze is answered after it unseen by the new followers.
//!
//! The source fails open: a follower that fails is left out, a gate that stays closed for too long opens by itself, and
//! when the last process that holds the group is gone the kernel allows all that waits.

mod access_dispatcher;
mod adopt;
mod directories;
mod files;
mod follower;
mod freezing;
mod listener;
mod pending_save;
mod probe;
mod truncations;
mod watched;
mod workers;

pub use access_dispatcher::SourceMetrics;
pub use adopt::Adoption;
pub use files::SourceFiles;
pub use follower::{Follower, FollowerFailed};
pub use freezing::{Freezing, Ready};
pub use listener::{GATE_CLOSED_MAX, SOURCE_GROUP};
pub use probe::UnarmedDescriptor;
pub use watched::{Resumed, Source};
