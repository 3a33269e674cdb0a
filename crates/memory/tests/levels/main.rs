//! Levels `publish` and `own` against real servers: memory really comes back, and nothing that a client can see changes.

mod laboratory;
mod load;
mod own;
mod published;
mod segment;
