//! SCRAM-SHA-256 on both sides of the router, as logic over messages; whoever owns the sockets carries them.
//!
//! The router stands between a client who knows a password and servers that hold its verifier. It never learns the
//! password and does not need to: the proof of a successful login reveals the client key, and with that
//! ([`ScramKeys`]) the router logs in, as that client, to every server that holds the *same* verifier. Followers in
//! wal mode are physical copies of their leader, so they do.
//!
//! ```text
//! client                     router                                     server
//!   | client-first  ->  ScramServer::start                                |
//!   | <- server-first        |                                            |
//!   | client-final  ->  ScramServer::finish -> ScramKeys                  |
//!   | <- server-final        |                                            |
//!                       ScramClient::new(ScramKeys) -- client-first  ->   |
//!                       ScramClient::client_final     <- server-first     |
//!                       ScramClientFinal::verify      -- client-final ->  |
//!                            |                        <- server-final     |
//! ```
//!
//! Each state is a type of its own and consumed by the step that leaves it, so no message can be taken twice or out
//! of order. Source: RFC 5802, RFC 7677, and PostgreSQL's `src/backend/libpq/auth-scram.c` and
//! `src/interfaces/libpq/fe-auth-scram.c`, whose limits and answers are kept. Channel binding is not offered.

mod client;
mod error;
mod keys;
mod message;
mod server;
mod verifier;

#[cfg(test)]
mod exchange_tests;

pub use client::{ScramClient, ScramClientFinal, ScramCredential};
pub use error::{AuthenticationError, ITERATIONS_MAX, MESSAGE_BYTES_MAX};
pub use keys::ScramKeys;
pub use server::ScramServer;
pub use verifier::{MockSecret, ScramVerifier, VERIFIER_BYTES_MAX};

/// The only mechanism that the router offers and uses.
pub const MECHANISM: &str = "SCRAM-SHA-256";
