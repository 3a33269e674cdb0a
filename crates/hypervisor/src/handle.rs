//! Waiting on the kernel's handle of a process (pidfd_open(2)), which becomes readable at its end.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Makes a handle one that a task can wait on.
///
/// # Errors
/// The runtime cannot watch it.
pub(crate) fn watched(handle: &OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    let own = handle.try_clone()?;
    // SAFETY: the descriptor is owned by the value that is registered: it stays open, and the same, until that is
    // dropped.
    let registered = unsafe { AsyncFd::register_with_interest(own, Interest::READABLE) };
    registered.map_err(io::Error::from)
}
