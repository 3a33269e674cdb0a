//! Making PostgreSQL take an image for a standby's directory.
//!
//! ```text
//!            begin                       freeze          end                    write
//!  crash:  slot, checkpoint if far  ──────────────>  M = flushed so far   ──>  patched pg_control
//!  backup: slot, pg_backup_start    ──────────────>  pg_backup_stop       ──>  pg_control, backup_label
//! ```
//!
//! Crash mode: log is written before data, so every page of the image is as old as M or older; full-page images since
//! the redo point repair pages that were torn or caught at slightly different instants; PostgreSQL lets nobody in
//! before M. Backup mode is the same by PostgreSQL's own means.

mod begin;
mod checks;
mod end;
mod point;
pub mod slot;

pub use begin::{Begun, begin, begin_around};
pub use point::{Mode, RecoveryPoint};
