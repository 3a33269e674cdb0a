//! The virtio-serial port to the host. It reads as ended while no host listens, and comes back by itself.

use crate::protocol::PORT;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How soon a host that begins to listen is noticed: the kernel tells nobody who waits for it.
const ABSENT_HOST_PAUSE: Duration = Duration::from_millis(50);
/// How long a full port is waited for before it is asked again whether the host is still there.
const FULL_WAIT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Where the kernel tells the ports' names.
const PORTS: &str = "/sys/class/virtio-ports";

/// The port; any non-blocking descriptor that tells by POLLHUP that the other end is not there.
pub(crate) struct Port(OwnedFd);

/// Opens the guest's port.
pub(crate) fn open() -> io::Result<Port> {
    let path = find(Path::new(PORTS))?;
    let descriptor = rustix::fs::open(&path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| io::Error::other(format!("opening {}: {error}", path.display())))?;
    Ok(Port(descriptor))
}

fn find(ports: &Path) -> io::Result<PathBuf> {
    for entry in std::fs::read_dir(ports)? {
        let entry = entry?;
        if std::fs::read_to_string(entry.path().join("name")).is_ok_and(|name| name.trim_end() == PORT) {
            return Ok(Path::new("/dev").join(entry.file_name()));
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("the machine has no port {PORT}")))
}

impl Port {
    #[cfg(test)]
    pub(crate) fn of(descriptor: OwnedFd) -> Port {
        Port(descriptor)
    }

    /// Waits for bytes; 0: the host has gone, or is not there yet.
    pub(crate) fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(&self.0, &mut *buffer) {
                Ok(0) => {
                    std::thread::sleep(ABSENT_HOST_PAUSE);
                    return Ok(0);
                }
                Ok(length) => return Ok(length),
                Err(Errno::AGAIN) => {
                    self.wait(PollFlags::IN, None)?;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Writes all of it, however long a host that is there takes. False: no host is there, and nobody has read the
    /// rest.
    pub(crate) fn write(&self, mut bytes: &[u8]) -> io::Result<bool> {
        while !bytes.is_empty() {
            match rustix::io::write(&self.0, bytes) {
                Ok(length) => bytes = &bytes[length..],
                Err(Errno::AGAIN) => {
                    if self.wait(PollFlags::OUT, Some(&FULL_WAIT))?.contains(PollFlags::HUP) {
                        return Ok(false);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::PIPE) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    fn wait(&self, events: PollFlags, timeout: Option<&Timespec>) -> io::Result<PollFlags> {
        let mut descriptors = [PollFd::new(&self.0, events)];
        match poll(&mut descriptors, timeout) {
            Ok(_) | Err(Errno::INTR) => Ok(descriptors[0].revents()),
            Err(error) => Err(error.into()),
        }
    }
}
