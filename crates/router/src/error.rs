//! What can go wrong in the router outside a client's session.

use std::io;
use std::net::SocketAddr;

use crate::backend::BackendError;
use crate::servers::UnreadablePassword;

/// Why a router does not start, reload, or take a server.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum RouterError {
    #[error("cannot listen on {address}: {source}; choose another port")]
    Listen { address: SocketAddr, source: io::Error },
    #[error(transparent)]
    PasswordFile(#[from] UnreadablePassword),
    #[error("two servers are called {0:?}; give each server its own name")]
    DuplicateServer(String),
    #[error("no follower is called {0:?}; SHOW SERVERS on the console lists the servers")]
    UnknownFollower(String),
    #[error("{share} is no share of reads for {server:?}; give a number from 0 to 1")]
    ReadShare { server: String, share: f64 },
    #[error("the leader cannot be used: {0}")]
    Leader(#[from] BackendError),
    #[error("{0:?} is named as the leader but is in recovery; name the primary as the leader")]
    LeaderInRecovery(String),
    #[error(
        "the router's role {role:?} on {server:?} is not a superuser; \
         it must read SCRAM verifiers and make the tripwire"
    )]
    NotSuperuser { role: String, server: String },
    #[error(
        "transactions of an earlier router still run on {server:?} (server processes {processes}); stop that router, \
         or end them with pg_terminate_backend()"
    )]
    OrphanedTransactions { server: String, processes: String },
}
