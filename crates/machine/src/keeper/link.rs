//! The connection between the keepers of one machine on two hosts: its epochs, and what both have to say beside.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onecopy_checkpoint::LinkError;
use onecopy_checkpoint::link::{FailureSender, Receiving, Sending};
use onecopy_checkpoint::take::Cause;
use onecopy_clone::network::client::Stream;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use super::disk_comparison::Peer;
use super::protection::DETECTION_S_DEFAULT;
use crate::hardware::Hardware;
use crate::{Forward, carry};

/// How long the other side may take for what is its turn: QEMU is started within it.
pub(super) const TURN_TIMEOUT: Duration = Duration::from_secs(90);

/// How long the other side may give no sign of life. Longer than the link's own measure: nothing is lost while a
/// migration waits, and hosts that swap or compile are slow.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// How long after the loss of its source a copy goes on by itself, where the source's host was fenced; a person decides
/// after that.
pub(super) const FENCE_WITHIN: Duration = Duration::from_secs(40);

/// How long after the loss of a copy whose host fences a source holds what it sends, where that host does not say that
/// the copy is void: longer, also where either side hears of the loss later than the other one.
pub(super) const ALONE_AFTER: Duration = Duration::from_secs(60);
const _: () = assert!(ALONE_AFTER.as_secs() > FENCE_WITHIN.as_secs());

/// How long a side that gives up reads on.
const LINGER: Duration = Duration::from_secs(10);

/// How often it is looked whether a connection is wanted.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The source's end.
pub(super) type SourceLink = Sending<UnixStream, UnixStream>;

/// The destination's end.
pub(super) type DestinationLink = Receiving<UnixStream, UnixStream>;

/// What the source says between epochs.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Said {
    /// This is the machine; what QEMU tells of itself follows.
    Hello { token: String, hardware: Hardware },
    /// All of its memory was sent once: a QEMU shall wait for the rest, of which the last epoch has its devices.
    Wait {},
    /// It goes on with you.
    Go {},
    /// Of a protected machine: the next epoch is its last one here.
    Last {},
    /// It is protected no more, and goes on here.
    End {},
}

/// What the destination answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Answered {
    /// It can run here.
    Accepted {
        /// Blocks of the disk can be referred to: its snapshot is read here.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        reads_disk: bool,
        /// It tells next what its copy of the disk begins with: [`disk_comparison`](super::disk_comparison).
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        tells_disk: bool,
        /// It lets a machine that is protected go on, once it has fenced the source's host: [`FENCE_WITHIN`].
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        fences: bool,
    },
    /// A QEMU waits.
    Waiting {},
    /// It stands here.
    Loaded {},
    /// It runs here; by these ports.
    Running { forwards: Vec<Forward> },
}

impl Answered {
    /// Where another answer was due.
    pub(super) fn instead_of(&self, due: &str) -> String {
        let answer = match self {
            Answered::Accepted { .. } => "accepted",
            Answered::Waiting {} => "waiting",
            Answered::Loaded {} => "loaded",
            Answered::Running { .. } => "running",
        };
        format!("the other host answered `{answer}` where `{due}` was due; run the same version of onecopy on both")
    }
}

impl Peer for DestinationLink {
    fn say(&mut self, message: &[u8]) -> Result<(), Cause> {
        Ok(Receiving::say(self, message)?)
    }

    fn hear(&mut self) -> Result<Vec<u8>, Cause> {
        Ok(Receiving::hear(self)?)
    }
}

/// As it travels.
pub(super) fn message(of: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(of).expect("texts and numbers")
}

/// Of what has come; anything else is an error.
pub(super) fn understand<T: DeserializeOwned>(message: &[u8]) -> Result<T, LinkError> {
    serde_json::from_slice(message).map_err(|error| LinkError::Connection(error.into()))
}

/// From now on what a machine says waits for this connection, in both directions: the other side is lost when it is
/// silent for so many seconds.
pub(super) fn set_protected(stream: &UnixStream, detection_s: Option<u64>) -> io::Result<()> {
    let silence_max = Duration::from_secs(detection_s.unwrap_or(DETECTION_S_DEFAULT));
    stream.set_read_timeout(Some(silence_max))?;
    stream.set_write_timeout(Some(silence_max))
}

/// Both directions of a connection, for a thread that blocks.
pub(super) fn directions(stream: UnixStream) -> io::Result<(UnixStream, UnixStream)> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    Ok((stream.try_clone()?, stream))
}

/// Says why this side gives up, and reads on for a while: of who closes with bytes unread the last words may get lost.
pub(super) fn refuse(failures: &FailureSender<UnixStream>, mut stream: &UnixStream, reason: &str) {
    let until = Instant::now() + LINGER;
    let said = failures.fail(reason).and_then(|()| Ok(stream.shutdown(std::net::Shutdown::Write)?));
    if said.is_err() || stream.set_read_timeout(Some(LINGER)).is_err() {
        return;
    }
    let mut unread = vec![0; 64 << 10];
    while Instant::now() < until && stream.read(&mut unread).is_ok_and(|count| count > 0) {}
}

/// Carries a connection to the other host as long as both are there.
pub(super) fn carried(handle: &Handle, far: Box<dyn Stream>) -> io::Result<UnixStream> {
    let (near, carried) = UnixStream::pair()?;
    carried.set_nonblocking(true)?;
    let _runtime = handle.enter();
    let carried = tokio::net::UnixStream::from_std(carried)?;
    handle.spawn(carry(far, carried));
    Ok(near)
}

/// Ends a connection once nobody wants it any more, or it takes too long: who reads or writes there hears of it.
pub(super) struct Watch {
    has_ended: Arc<AtomicBool>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Until it is dropped.
    ///
    /// # Errors
    /// There are too many descriptors or threads.
    pub(super) fn begin(
        stream: &UnixStream,
        is_cancelled: &Arc<AtomicBool>,
        longest: Option<Duration>,
    ) -> io::Result<Watch> {
        let (stream, is_cancelled) = (stream.try_clone()?, Arc::clone(is_cancelled));
        let deadline = longest.map(|longest| Instant::now() + longest);
        let (stop, stopped) = channel::<()>();
        let has_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&has_ended);
        let watch = move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(LOOK_INTERVAL) {
                if is_cancelled.load(Ordering::Acquire) || deadline.is_some_and(|end| end <= Instant::now()) {
                    ended.store(true, Ordering::Release);
                    // It may be gone already.
                    let _ = stream.shutdown(std::net::Shutdown::Both);
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("migration-watch".to_owned()).spawn(watch)?;
        Ok(Watch { has_ended, stop: Some(stop), thread: Some(thread) })
    }

    /// Whether it has ended the connection.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It has nothing to say of how it ended.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// Spec: D6
    #[test]
    fn t30_who_waits_at_a_connection_that_nobody_wants_or_for_too_long_is_let_go() {
        for (cancels, longest) in [(true, None), (false, Some(Duration::from_millis(1)))] {
            let (near, _far) = UnixStream::pair().unwrap();
            let is_cancelled = Arc::new(AtomicBool::new(false));
            let watch = Watch::begin(&near, &is_cancelled, longest).unwrap();
            is_cancelled.store(cancels, Ordering::Release);
            assert_eq!((&near).read(&mut [0; 1]).unwrap(), 0);
            assert!(watch.has_ended());
        }
        // One that is not watched any more stays.
        let (near, mut far) = UnixStream::pair().unwrap();
        let watch = Watch::begin(&near, &Arc::default(), Some(Duration::from_secs(60))).unwrap();
        assert!(!watch.has_ended());
        drop(watch);
        std::io::Write::write_all(&mut far, b"x").unwrap();
        assert_eq!((&near).read(&mut [0; 1]).unwrap(), 1);
    }
}
