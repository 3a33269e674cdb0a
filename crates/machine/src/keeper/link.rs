//! The connection between the keepers of one machine on two hosts.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use onecopy_checkpoint::migrate::wire::{self, Kind};
use onecopy_clone::network::client::Stream;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::copy_bidirectional_with_sizes;
use tokio::runtime::Handle;

use crate::Forward;
use crate::hardware::Hardware;

/// How long the other side may take for what is its turn: QEMU is started within it.
pub(super) const TURN_TIMEOUT: Duration = Duration::from_secs(90);

/// Bytes on their way between the keeper and the encrypted connection.
const PUMP_BYTES: usize = 256 << 10;

/// What the source says between frames of pages.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Said {
    /// This is the machine; what QEMU tells of itself follows.
    Hello { token: String, memory_bytes: u64, hardware: Hardware },
    /// All of its memory was sent once: a QEMU shall wait for the rest.
    Wait {},
    /// It stands. The last pages follow, and then the state of its devices.
    Last {},
    /// It goes on with you.
    Go {},
}

/// What the destination answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Answered {
    /// It can run here.
    Accepted {},
    /// A QEMU waits.
    Waiting {},
    /// It stands here.
    Loaded {},
    /// It runs here; by these ports.
    Running { forwards: Vec<Forward> },
    /// It does not come here.
    Refused { reason: String },
}

/// The connection, for a thread that blocks.
pub(super) struct Link(UnixStream);

impl Link {
    /// One that somebody else carries to the other host.
    pub(super) fn carried(stream: UnixStream) -> io::Result<Link> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(TURN_TIMEOUT))?;
        stream.set_write_timeout(Some(TURN_TIMEOUT))?;
        Ok(Link(stream))
    }

    /// Carries one to the other host as long as both are there.
    pub(super) fn over(handle: &Handle, mut far: Box<dyn Stream>) -> io::Result<Link> {
        let (near, carried) = UnixStream::pair()?;
        carried.set_nonblocking(true)?;
        let _runtime = handle.enter();
        let mut carried = tokio::net::UnixStream::from_std(carried)?;
        handle.spawn(async move {
            let ended = copy_bidirectional_with_sizes(&mut far, &mut carried, PUMP_BYTES, PUMP_BYTES).await;
            if let Err(error) = ended {
                tracing::debug!(%error, "the connection to the other host is lost");
            }
        });
        Link::carried(near)
    }

    /// What ends it for who waits in another thread.
    pub(super) fn ender(&self) -> io::Result<UnixStream> {
        self.0.try_clone()
    }

    /// Says something.
    pub(super) fn say(&mut self, what: &impl Serialize) -> io::Result<()> {
        let text = serde_json::to_vec(what).map_err(io::Error::from)?;
        wire::write(&mut self.0, Kind::Text, &text).map(|_| ())
    }

    /// Sends bytes.
    pub(super) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        wire::write(&mut self.0, Kind::Blob, bytes).map(|_| ())
    }

    /// What comes next.
    pub(super) fn next(&mut self) -> io::Result<(Kind, Vec<u8>)> {
        wire::read(&mut self.0)
    }

    /// What is said next; anything else is an error.
    pub(super) fn hear<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        match self.next()? {
            (Kind::Text, text) => Link::understand(&text),
            (kind, _) => Err(io::Error::new(ErrorKind::InvalidData, format!("{kind:?} came instead of a word"))),
        }
    }

    pub(super) fn understand<T: DeserializeOwned>(text: &[u8]) -> io::Result<T> {
        serde_json::from_slice(text).map_err(io::Error::from)
    }

    /// What comes next, which is bytes.
    pub(super) fn receive(&mut self) -> io::Result<Vec<u8>> {
        match self.next()? {
            (Kind::Blob, bytes) => Ok(bytes),
            (kind, _) => Err(io::Error::new(ErrorKind::InvalidData, format!("{kind:?} came instead of bytes"))),
        }
    }

    /// Where pages go.
    pub(super) fn stream(&mut self) -> &mut UnixStream {
        &mut self.0
    }
}
