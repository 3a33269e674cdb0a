//! What can go wrong with a connection.

use std::io;
use std::time::Duration;

use crate::DeltaError;

/// Why a connection ended. What was acknowledged is held; a new connection goes on from there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The other side said nothing for too long.
    #[error("the other host has been silent for too long: look whether it runs and can be reached")]
    Silent,
    /// The other side shows that it lives, and nothing else.
    #[error("the other host lives, and has not answered for {} s: look at its log", .0.as_secs())]
    Unanswered(Duration),
    /// The bytes are no frames, or not those that come next.
    #[error("the other host does not speak as it should: {what}")]
    Malformed {
        /// What is wrong.
        what: String,
    },
    /// The other side has given up, or refuses the session.
    #[error("the other host gives up: {reason}")]
    Refused {
        /// What it says.
        reason: String,
    },
    /// An epoch was not encoded or decoded.
    #[error(transparent)]
    Delta(DeltaError),
    /// The connection broke.
    #[error("the connection to the other host broke: {0}")]
    Connection(io::Error),
}

impl LinkError {
    pub(super) fn malformed(what: impl Into<String>) -> LinkError {
        LinkError::Malformed { what: what.into() }
    }
}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> LinkError {
        match error.kind() {
            // By a time-out of the stream.
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => LinkError::Silent,
            // By ourselves: what was read or written in the midst of an epoch.
            _ => match error.downcast::<LinkError>() {
                Ok(own) => own,
                Err(error) => LinkError::Connection(error),
            },
        }
    }
}

impl From<LinkError> for io::Error {
    fn from(error: LinkError) -> io::Error {
        io::Error::other(error)
    }
}

impl From<DeltaError> for LinkError {
    fn from(error: DeltaError) -> LinkError {
        match error {
            DeltaError::Connection(error) => error.into(),
            error => LinkError::Delta(error),
        }
    }
}
