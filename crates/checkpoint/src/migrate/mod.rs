//! A machine goes to another host while it runs: checkpoints of its memory are sent until little is left, and the last
//! one goes on there.
//!
//! ```text
//!  source   rounds: cut, send what changed ──>   policy: expected pause <= wanted?
//!           stop, last cut                 ──>   last pages, devices, the disk's snapshot
//!                                          <──   loaded: it stands there, and could run
//!           written down: migrated         ──>   go
//!                                          <──   it runs
//! ```
//!
//! [`wire`] is what is said, [`policy`] when the last round begins. Who may run is decided by what the source has
//! written down, and by nothing else: before *migrated* is durable nobody says *go*, and whoever asks later is told
//! what the record says.

pub mod policy;
pub mod wire;
