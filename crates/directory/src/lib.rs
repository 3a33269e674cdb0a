//! What all processes of a cluster's or a machine's directory share: one holder at a time, files that are there whole
//! or not at all, and a directory for Unix sockets whose path the kernel takes.

pub mod atomic_file;
mod error;
mod lock;
mod sockets;
mod steps;

pub use error::DirectoryError;
pub use lock::{DirectoryLock, LockState, is_same_file};
pub use sockets::{make_run, remove_unowned, set_mode, short_directory};
pub use steps::observe_steps;
