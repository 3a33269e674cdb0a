//! The loop that passes frames: one thread, which alone has the state, the interface and QEMU's connection.
//!
//! Nothing in it waits but its one poll. What it cannot pass on it leaves where it is: in QEMU's socket, so that the
//! machine waits, or in the interface's queue, where the kernel drops what is too much, as an Ethernet does.

mod buffer;
mod remote;
mod statistics;

use std::io::{self, ErrorKind, Read, Write};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::{ClockId, clock_gettime};

use buffer::Buffer;
pub use remote::Remote;
use remote::{REQUESTS_MAX, Request};
pub use statistics::Statistics;

use crate::announce::announcements;
use crate::frame::{FRAME_BYTES_MAX, FRAME_BYTES_MIN, LENGTH_BYTES, Record, record};
use crate::state::{Counter, DRAIN_BYTES_MAX};
use crate::{Filter, NetworkError, Refusal, State, Tap};

/// Room for one more frame for the machine.
const ROOM_BYTES: usize = LENGTH_BYTES + FRAME_BYTES_MAX;

/// Passes the frames of one machine.
pub struct Passer {
    tap: Tap,
    state: State,
    filter: Filter,
    listener: UnixListener,
    /// Who may connect: QEMU's account.
    user: u32,
    qemu: Option<UnixStream>,
    from_qemu: Buffer,
    to_qemu: Buffer,
    /// A frame has no room until something is released.
    is_blocked: bool,
    /// The interface takes nothing for the moment.
    is_tap_full: bool,
    has_ended: bool,
    requests: Receiver<Request>,
    wake: Arc<OwnedFd>,
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

impl Passer {
    /// One that goes on where another may have died, at whatever step. `listener` is where QEMU connects.
    ///
    /// # Errors
    /// [`NetworkError::Io`].
    pub fn new(
        tap: Tap,
        mut state: State,
        (listener, user): (UnixListener, u32),
    ) -> Result<(Passer, Remote), NetworkError> {
        listener.set_nonblocking(true).map_err(NetworkError::io("make ready", "QEMU's socket"))?;
        state.adopt(tap.written()?, now_ns());
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(|error| NetworkError::io("make", "an event")(error.into()))?);
        let (sender, requests) = sync_channel(REQUESTS_MAX);
        let remote = Remote { requests: sender, wake: Arc::clone(&wake) };
        let filter = state.filter();
        let (from_qemu, to_qemu) = (Buffer::new(), Buffer::new());
        let (is_blocked, is_tap_full, qemu) = (false, false, None);
        let passer = Passer {
            tap,
            state,
            filter,
            listener,
            user,
            qemu,
            from_qemu,
            to_qemu,
            is_blocked,
            is_tap_full,
            has_ended: false,
            requests,
            wake,
        };
        Ok((passer, remote))
    }

    /// Passes frames until the interface is gone.
    ///
    /// # Errors
    /// [`NetworkError::Io`].
    pub fn run(mut self) -> Result<(), NetworkError> {
        while !self.has_ended {
            self.turn()?;
        }
        Ok(())
    }

    /// Ends the loop after this turn.
    #[cfg(test)]
    fn end(&mut self) {
        self.has_ended = true;
    }

    /// Waits for something, and does all that can be done then.
    fn turn(&mut self) -> Result<(), NetworkError> {
        let failed = NetworkError::io("wait for frames of", self.tap.name());
        let has_room = self.to_qemu.room(ROOM_BYTES).is_some();
        let mut of_qemu = PollFlags::empty();
        of_qemu.set(PollFlags::IN, !self.is_blocked && !self.is_tap_full);
        of_qemu.set(PollFlags::OUT, !self.to_qemu.filled().is_empty());
        let mut of_tap = PollFlags::empty();
        of_tap.set(PollFlags::IN, has_room && self.qemu.is_some());
        of_tap.set(PollFlags::OUT, self.is_tap_full);
        let mut events = vec![
            PollFd::new(&self.wake, PollFlags::IN),
            PollFd::new(&self.listener, PollFlags::IN),
            PollFd::new(&self.tap, of_tap),
        ];
        events.extend(self.qemu.as_ref().map(|qemu| PollFd::new(qemu, of_qemu)));
        match poll(&mut events, None) {
            Err(rustix::io::Errno::INTR) => return Ok(()),
            polled => polled.map_err(|error| failed(error.into()))?,
        };
        let found: Vec<PollFlags> = events.iter().map(PollFd::revents).collect();
        drop(events);
        if found[2].intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
            return Err(NetworkError::io("pass frames of", self.tap.name())(ErrorKind::NotFound.into()));
        }
        if found[2].contains(PollFlags::OUT) {
            self.is_tap_full = false;
            self.pass_held();
        }
        let of_qemu = found.get(3).copied().unwrap_or(PollFlags::empty());
        if of_qemu.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            self.read_qemu();
        }
        if found[2].contains(PollFlags::IN) {
            self.read_tap();
        }
        self.write_qemu();
        if found[1].contains(PollFlags::IN) {
            self.accept();
        }
        if found[0].contains(PollFlags::IN) {
            self.answer();
        }
        Ok(())
    }

    /// The newest connection counts: a QEMU that connects again has given up the one before.
    fn accept(&mut self) {
        let Ok((stream, _)) = self.listener.accept() else { return };
        let peer = rustix::net::sockopt::socket_peercred(&stream);
        if !peer.is_ok_and(|peer| peer.uid.is_root() || peer.uid.as_raw() == self.user) {
            tracing::warn!("another account than QEMU's has connected in its place");
            return;
        }
        if stream.set_nonblocking(true).is_ok() {
            self.disconnect();
            self.state.count(Counter::Connections, 1);
            self.qemu = Some(stream);
        }
    }

    fn disconnect(&mut self) {
        if self.qemu.take().is_some() {
            tracing::info!("QEMU is not connected any more");
        }
        // What QEMU had not yet, as on a wire that is pulled out. Part of the first frame may have been written.
        let mut rest = self.to_qemu.filled();
        while let Record::Frame(_, bytes) = record(rest) {
            self.state.count(Counter::Lost, 1);
            rest = &rest[bytes..];
        }
        self.to_qemu.clear();
        self.from_qemu.clear();
        self.is_blocked = false;
    }

    fn read_qemu(&mut self) {
        if self.is_blocked || self.is_tap_full {
            // It is woken up for that alone: QEMU has gone.
            return self.disconnect();
        }
        match self.fill(false) {
            Ok(0) => self.disconnect(),
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => {
                tracing::warn!(%error, "QEMU's stream of frames ends");
                self.disconnect();
            }
        }
    }

    /// Reads once, and passes or holds what is there; how many bytes were read.
    fn fill(&mut self, is_drain: bool) -> io::Result<usize> {
        let Some(qemu) = &mut self.qemu else { return Err(ErrorKind::WouldBlock.into()) };
        let Some(room) = self.from_qemu.room(1) else { return Err(ErrorKind::WouldBlock.into()) };
        let bytes = qemu.read(room)?;
        self.from_qemu.end += bytes;
        self.take_frames(is_drain)?;
        Ok(bytes)
    }

    /// Takes whole frames of the machine, as long as there is room for them.
    fn take_frames(&mut self, is_drain: bool) -> io::Result<()> {
        self.pass_held();
        let is_direct = !self.state.is_holding() && self.state.held_frames() == 0;
        if is_direct {
            self.state.begin_writing();
        }
        let (now, mut written, mut broken) = (now_ns(), 0, None);
        self.is_blocked = false;
        loop {
            match record(self.from_qemu.filled()) {
                Record::Incomplete => break,
                Record::Broken(length) => {
                    self.state.count(Counter::Broken, 1);
                    broken = Some(io::Error::new(ErrorKind::InvalidData, format!("a frame of {length} bytes")));
                    break;
                }
                Record::Frame(frame, bytes) => {
                    match self.filter.look(frame) {
                        Err(refusal) => {
                            self.state.count(counter_of(refusal), 1);
                            tracing::debug!(?refusal, head = ?frame.get(..FRAME_BYTES_MIN), "a frame goes nowhere");
                        }
                        Ok(()) if is_direct => {
                            written += u64::from(write_directly(&self.tap, &self.state, frame));
                        }
                        Ok(()) if self.state.push(frame, now, is_drain).is_err() => {
                            self.is_blocked = true;
                            self.state.count(Counter::Waits, 1);
                            break;
                        }
                        Ok(()) => {}
                    }
                    self.from_qemu.consume(bytes);
                }
            }
        }
        if is_direct {
            self.state.end_writing(written);
        }
        self.pass_held();
        broken.map_or(Ok(()), Err)
    }

    /// Passes held frames on that may go.
    fn pass_held(&mut self) {
        let tap = &self.tap;
        while !self.is_tap_full && self.state.may_go() {
            self.is_tap_full = self.state.pass_first(now_ns(), |frame| tap.write(frame)).is_err();
            self.is_blocked = false;
        }
    }

    fn read_tap(&mut self) {
        while let Some(room) = self.to_qemu.room(ROOM_BYTES) {
            let Ok(bytes @ 1..) = self.tap.read(&mut room[LENGTH_BYTES..ROOM_BYTES]) else { return };
            let length = u32::try_from(bytes).expect("no frame is as long");
            room[..LENGTH_BYTES].copy_from_slice(&length.to_be_bytes());
            self.to_qemu.end += LENGTH_BYTES + bytes;
            self.state.count(Counter::ReceivedFrames, 1);
            self.state.count(Counter::ReceivedBytes, bytes as u64);
        }
    }

    fn write_qemu(&mut self) {
        while !self.to_qemu.filled().is_empty() {
            let Some(qemu) = &mut self.qemu else { return };
            match qemu.write(self.to_qemu.filled()) {
                Ok(bytes) => self.to_qemu.consume(bytes),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.disconnect(),
            }
        }
    }

    fn answer(&mut self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
        while let Ok(request) = self.requests.try_recv() {
            request(self);
        }
    }

    /// Takes all that the machine has sent, up to the end of a frame. It stands.
    fn drain(&mut self) -> Result<(), NetworkError> {
        let failed = |error| NetworkError::io("drain", "the machine's stream of frames")(error);
        self.take_frames(true).map_err(failed)?;
        let mut drained = 0;
        loop {
            match self.fill(true) {
                // Gone: what comes from a QEMU that connects anew begins with a frame.
                Ok(0) => {
                    self.disconnect();
                    return Ok(());
                }
                Ok(bytes) => drained += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => {
                    self.disconnect();
                    return Err(failed(error));
                }
            }
            if drained > DRAIN_BYTES_MAX || self.is_blocked {
                return Err(NetworkError::DrainTooLong { bytes_max: DRAIN_BYTES_MAX });
            }
        }
        match self.from_qemu.filled().len() {
            0 => Ok(()),
            bytes => Err(NetworkError::NoFrameBorder { bytes }),
        }
    }

    fn release(&mut self, epoch: u64) -> Result<(), NetworkError> {
        self.state.release(epoch)?;
        self.go_on();
        Ok(())
    }

    /// After frames have gone: those that had no room come next.
    fn go_on(&mut self) {
        self.pass_held();
        if let Err(error) = self.take_frames(false) {
            tracing::warn!(%error, "QEMU's stream of frames ends");
            self.disconnect();
        }
    }

    fn set_holding(&mut self, is_wanted: bool) -> Result<(), NetworkError> {
        if is_wanted {
            return self.state.hold();
        }
        self.state.hold_no_more();
        self.go_on();
        if self.state.held_frames() == 0 {
            self.state.give_back();
        }
        Ok(())
    }

    /// Says where addresses are, before all that waits.
    fn announce(&mut self, addresses: &[IpAddr]) {
        self.state.begin_writing();
        let mut written = 0;
        for frame in announcements(self.state.card(), addresses) {
            written += u64::from(write_directly(&self.tap, &self.state, &frame));
        }
        self.state.end_writing(written);
    }
}

/// Whether the interface has taken it.
fn write_directly(tap: &Tap, state: &State, frame: &[u8]) -> bool {
    match tap.write(frame) {
        Ok(()) => {
            state.count(Counter::SentFrames, 1);
            state.count(Counter::SentBytes, frame.len() as u64);
            true
        }
        Err(_) => {
            state.count(Counter::NotTaken, 1);
            false
        }
    }
}

fn counter_of(refusal: Refusal) -> Counter {
    match refusal {
        Refusal::Short => Counter::Short,
        Refusal::Long => Counter::Long,
        Refusal::ForeignSource => Counter::ForeignSource,
        Refusal::ForBridge => Counter::ForBridge,
    }
}

#[cfg(test)]
mod tests;
