//! How the processes of Onecopy are asked, told and looked at: private sockets, lines of JSON, HTTP, Prometheus' text.
//!
//! ```text
//!  onecopy .. ── socket::connect ── Client::ask ──> {"command":"info"}  ──> server::serve ──> the process's answer
//!                                               <── {"ok":{..}}         <──
//!  onecopy .. ── http::request ───────────────────> GET /status         ──> the daemon's pages
//! ```
//!
//! Nobody who is asked is trusted to be short, quick or right: lines, answers and waits have bounds.

mod client;
pub mod http;
mod lines;
pub mod metrics;
pub mod server;
pub mod socket;
mod unauthenticated;

pub use client::{Answer, AskError, Client};
pub use lines::{JsonLines, LineReader};
pub use unauthenticated::{Unauthenticated, UnauthenticatedConnection};
