//! Kills at every step of what changes a cluster's directory, and what the next start makes of what is left.
//!
//! ```text
//!   a change, really made ──(noted at each step)──> states ──┐
//!        ┌──────────────────────────────────────────────────┘
//!        └──> the next start, from each of them ──(noted at each step)──> more states, until there are no new ones
//! ```
//!
//! The directory, the lock, passwords, `cluster.toml`, the orders of `steps`, the removal of servers and the making of
//! the leader are the product's. What PostgreSQL and the process that fills clones do is not: here `initdb` is a
//! script, a copy is made file by file as `pg_basebackup` would, and a leader's slots are directories in it.

mod checks;
mod harness;
mod recording;
mod tests;
mod tree;

pub(crate) use recording::note;
