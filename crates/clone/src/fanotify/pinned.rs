//! A group that is kept open by processes that must not be able to do anything with it.
//!
//! The server of a clone that is filled must hold the clone's group: the kernel lets every access through, to content
//! that is not there, when the last holder is gone. But whoever has the group's descriptor can mark any file of the
//! machine, gets it opened with every event, and stops whoever touches it. So the server holds an io_uring instance of
//! which the group is the only registered file: a reference to the group, by which nothing can be done.
//!
//! Why not, each held by a test here (io_uring_register(2), io_uring_enter(2); Linux, `io_uring/register.c`,
//! `io_uring/msg_ring.c`):
//! - The instance belongs to one thread (IORING_SETUP_SINGLE_ISSUER), which has ended: whoever else submits or
//!   registers something gets EEXIST.
//! - It is restricted (IORING_REGISTER_RESTRICTIONS): also its thread could submit only what does nothing, and register
//!   nothing.
//! - Another instance cannot put a file in the group's place by a message (IORING_OP_MSG_RING): since completions
//!   belong to the thread, too (IORING_SETUP_DEFER_TASKRUN), the message finds its receiver dead.
//! - The kernel sends no such descriptor over a socket, and opens none by its name in `/proc`. A copy of it (dup(2),
//!   pidfd_getfd(2)) is no more than it is itself.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::Group;
use crate::CloneError;

// Source of all that follows: Linux, `include/uapi/linux/io_uring.h`.
const SETUP_R_DISABLED: u32 = 1 << 6;
const SETUP_SINGLE_ISSUER: u32 = 1 << 12;
const SETUP_DEFER_TASKRUN: u32 = 1 << 13;
/// The least that there may be.
const ENTRIES: u32 = 1;
const REGISTER_FILES: u32 = 2;
const REGISTER_RESTRICTIONS: u32 = 11;
const REGISTER_ENABLE_RINGS: u32 = 12;
const RESTRICTION_REGISTER_OP: u16 = 0;
const RESTRICTION_SQE_OP: u16 = 1;
const OP_NOP: u8 = 0;

/// `struct io_uring_params`, of which only the flags are set here; the kernel fills in the rest.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Parameters {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    rest: [u32; 27],
}

/// `struct io_uring_restriction`: this operation is allowed, and all that is not named is not.
#[repr(C)]
#[derive(Default)]
struct Restriction {
    kind: u16,
    operation: u8,
    rest: [u8; 13],
}

/// Keeps a [`Group`] open, and can do nothing else.
#[derive(Debug)]
pub struct PinnedGroup {
    ring: OwnedFd,
}

impl PinnedGroup {
    /// Keeps `group` open from now on.
    ///
    /// # Errors
    /// [`CloneError::Pin`]: there is no io_uring here.
    pub fn new(group: &Group) -> Result<PinnedGroup, CloneError> {
        let make = || {
            std::thread::scope(|scope| {
                let owner = std::thread::Builder::new().name("clone-pin".to_owned());
                let made = owner.spawn_scoped(scope, || pin(group))?.join();
                made.unwrap_or_else(|_| Err(io::Error::other("its thread has panicked")))
            })
        };
        make().map(|ring| PinnedGroup { ring }).map_err(|source| CloneError::Pin { source })
    }
}

impl From<PinnedGroup> for OwnedFd {
    fn from(pinned: PinnedGroup) -> OwnedFd {
        pinned.ring
    }
}

/// An instance of the calling thread.
fn pin(group: &Group) -> io::Result<OwnedFd> {
    let (ring, _) = setup(SETUP_R_DISABLED | SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN)?;
    register(ring.as_fd(), REGISTER_FILES, &[group.as_fd().as_raw_fd()])?;
    // One of each kind: newer kernels restrict only what is spoken of. Restrictions cannot be registered twice.
    let allowed = [(RESTRICTION_REGISTER_OP, REGISTER_RESTRICTIONS as u8), (RESTRICTION_SQE_OP, OP_NOP)];
    let allowed = allowed.map(|(kind, operation)| Restriction { kind, operation, ..Restriction::default() });
    register(ring.as_fd(), REGISTER_RESTRICTIONS, &allowed)?;
    register::<u8>(ring.as_fd(), REGISTER_ENABLE_RINGS, &[])?;
    Ok(ring)
}

fn setup(flags: u32) -> io::Result<(OwnedFd, Parameters)> {
    let mut parameters = Parameters { flags, ..Parameters::default() };
    // SAFETY: the kernel reads and writes one `struct io_uring_params`, which outlives the call.
    let number = unsafe { libc::syscall(libc::SYS_io_uring_setup, ENTRIES, &raw mut parameters) };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; it is closed at exec.
    Ok((unsafe { OwnedFd::from_raw_fd(number as i32) }, parameters))
}

fn register<T>(ring: BorrowedFd<'_>, operation: u32, what: &[T]) -> io::Result<()> {
    let start = if what.is_empty() { std::ptr::null() } else { what.as_ptr() };
    // SAFETY: the kernel reads `what.len()` elements of the kind that the operation takes, as each caller has it; they
    // outlive the call.
    let result =
        unsafe { libc::syscall(libc::SYS_io_uring_register, ring.as_raw_fd(), operation, start, what.len() as u32) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
