//! What can go wrong in the router outside a client's session.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::backend::BackendError;

/// Why a router does not start, reload, or take a server.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// The address for clients cannot be had.
    #[error("cannot listen on {address}: {source}; choose another port")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// The kernel's reason.
        source: io::Error,
    },
    /// A password file cannot be read.
    #[error("cannot read the password file {path}: {source}")]
    PasswordFile {
        /// Its path.
        path: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
    /// Two servers have one name.
    #[error("two servers are called {0:?}; give each server its own name")]
    DuplicateServer(String),
    /// No follower has this name.
    #[error("no follower is called {0:?}; SHOW SERVERS on the console lists the servers")]
    UnknownFollower(String),
    /// A share of reads that is no share.
    #[error("{share} is no share of reads for {server:?}; give a number from 0 to 1")]
    ReadShare {
        /// The follower.
        server: String,
        /// The share asked for.
        share: f64,
    },
    /// The leader could not be asked.
    #[error("the leader cannot be used: {0}")]
    Leader(#[from] BackendError),
    /// The server named as leader is a standby.
    #[error("{0:?} is named as the leader but is in recovery; name the primary as the leader")]
    LeaderInRecovery(String),
    /// The router's role may not do what the router must do.
    #[error(
        "the router's role {role:?} on {server:?} is not a superuser; \
         it must read SCRAM verifiers and make the tripwire"
    )]
    NotSuperuser {
        /// The role.
        role: String,
        /// The server.
        server: String,
    },
    /// Transactions of an earlier router do not end.
    #[error(
        "transactions of an earlier router still run on {server:?} (server processes {processes}); stop that router, \
         or end them with pg_terminate_backend()"
    )]
    OrphanedTransactions {
        /// The server.
        server: String,
        /// Their process ids.
        processes: String,
    },
}
