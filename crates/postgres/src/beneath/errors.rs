//! Errors in words.

use std::io::{self, ErrorKind};

use rustix::io::Errno;

/// A link where there must be none, in words.
#[derive(Debug, thiserror::Error)]
#[error("it is a symbolic link, or one is on the way to it")]
pub(super) struct LinkFound;

pub(super) fn explained(error: Errno) -> io::Error {
    if error == Errno::LOOP { io::Error::other(LinkFound) } else { error.into() }
}

pub(super) fn is_link(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<LinkFound>())
}

pub(super) fn refused(reason: &str) -> io::Error {
    io::Error::other(reason)
}

pub(super) fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
