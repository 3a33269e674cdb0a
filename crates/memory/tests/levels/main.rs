//! Levels `publish` and `own` against real servers: memory really comes back, and nothing that a client sees changes.

mod load;
mod own;
mod published;
mod segment;
mod server;
