//! Memory as a file, with the real kernel between those who map it and those who serve it.
//!
//! ```text
//!  the test: keeper, holds the descriptors, touches the file never ──socket── a server, ──socket── a mapper
//! ```
//! Server and mapper are this program again. Who holds the kernel's end and waits for the file would wait for ever; so
//! when the test ends, however it ends, the file goes and the others are freed.

#![allow(clippy::unwrap_used, reason = "a test's own functions may unwrap as the tests do")]

mod deaths;
mod machine;
mod mapper;
mod model;
mod processes;
mod requests;
mod server;
