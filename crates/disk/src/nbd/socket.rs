//! A connected socket that several threads use: one reads, one writes, any may end it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A peer whose machine has gone is found out after so long without an answer of its kernel.
const SILENCE_MAX: Duration = Duration::from_secs(20);

/// An idle connection is asked this often whether the peer's machine is there.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);

enum Kind {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// The socket. Reads and writes go through `&Socket`.
pub(crate) struct Socket {
    kind: Kind,
    /// Until when a read or write must be done, while the two sides still negotiate.
    deadline: Mutex<Option<Instant>>,
}

impl Socket {
    pub(crate) fn tcp(stream: TcpStream) -> io::Result<Socket> {
        stream.set_nodelay(true)?;
        rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
        rustix::net::sockopt::set_tcp_keepidle(&stream, KEEP_ALIVE_INTERVAL)?;
        rustix::net::sockopt::set_tcp_keepintvl(&stream, KEEP_ALIVE_INTERVAL)?;
        // For what was sent and never acknowledged; Linux lets it rule keep-alive probes, too (tcp(7),
        // TCP_USER_TIMEOUT).
        let silence_ms = u32::try_from(SILENCE_MAX.as_millis()).unwrap_or(u32::MAX);
        rustix::net::sockopt::set_tcp_user_timeout(&stream, silence_ms)?;
        Ok(Socket { kind: Kind::Tcp(stream), deadline: Mutex::new(None) })
    }

    pub(crate) fn unix(stream: UnixStream) -> Socket {
        Socket { kind: Kind::Unix(stream), deadline: Mutex::new(None) }
    }

    /// The account of the process behind a Unix socket; none of another kind.
    pub(crate) fn peer_account(&self) -> io::Result<Option<u32>> {
        match &self.kind {
            Kind::Tcp(_) => Ok(None),
            Kind::Unix(stream) => Ok(Some(rustix::net::sockopt::socket_peercred(stream)?.uid.as_raw())),
        }
    }

    /// From now on reads and writes together end at this time; with none they take as long as they take.
    pub(crate) fn set_deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) = deadline;
        if deadline.is_none() { self.set_timeouts(None) } else { Ok(()) }
    }

    fn set_timeouts(&self, timeout: Option<Duration>) -> io::Result<()> {
        match &self.kind {
            Kind::Tcp(stream) => stream.set_read_timeout(timeout).and_then(|()| stream.set_write_timeout(timeout)),
            Kind::Unix(stream) => stream.set_read_timeout(timeout).and_then(|()| stream.set_write_timeout(timeout)),
        }
    }

    /// From now on a write that can send nothing for so long fails: the other side takes nothing more.
    pub(crate) fn set_send_timeout(&self, timeout: Duration) -> io::Result<()> {
        match &self.kind {
            Kind::Tcp(stream) => stream.set_write_timeout(Some(timeout)),
            Kind::Unix(stream) => stream.set_write_timeout(Some(timeout)),
        }
    }

    /// Whether the other side has closed its end, or this one was shut down.
    pub(crate) fn is_left(&self) -> bool {
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let mut descriptors = match &self.kind {
            Kind::Tcp(stream) => [PollFd::new(stream, PollFlags::RDHUP)],
            Kind::Unix(stream) => [PollFd::new(stream, PollFlags::RDHUP)],
        };
        poll(&mut descriptors, Some(&Timespec::default())).is_ok() && descriptors[0].revents().intersects(gone)
    }

    fn respect_deadline(&self) -> io::Result<()> {
        let Some(deadline) = *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) else { return Ok(()) };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the other side took too long to negotiate"));
        }
        self.set_timeouts(Some(left))
    }

    /// Ends it in one or both directions; whoever waits in it wakes up.
    pub(crate) fn shutdown(&self, how: Shutdown) {
        // A connection that is gone already needs no shutdown.
        let _ = match &self.kind {
            Kind::Tcp(stream) => stream.shutdown(how),
            Kind::Unix(stream) => stream.shutdown(how),
        };
    }
}

impl Read for &Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.respect_deadline()?;
        match &self.kind {
            Kind::Tcp(stream) => (&mut &*stream).read(into),
            Kind::Unix(stream) => (&mut &*stream).read(into),
        }
    }
}

impl Write for &Socket {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.respect_deadline()?;
        match &self.kind {
            Kind::Tcp(stream) => (&mut &*stream).write(from),
            Kind::Unix(stream) => (&mut &*stream).write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
