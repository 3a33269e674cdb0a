//! One connection and the requests that are under way on it.

use std::collections::HashMap;
use std::io::{self, BufReader, Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::negotiation::Agreed;
use crate::nbd::protocol::reply::{DONE, EXTENTS_MAX, Payload, ReplyHeader, chunk};
use crate::nbd::protocol::request::{RequestHeader, command};
use crate::nbd::protocol::{TEXT_BYTES_MAX, Violation};
use crate::nbd::socket::Socket;
use crate::nbd::stream::{Incoming, Outgoing};

/// A read's answer comes in at most so many pieces that do not touch.
const PIECES_MAX: usize = 1024;

/// The longest payload of a chunk that is no data.
const PAYLOAD_BYTES_MAX: u32 = (TEXT_BYTES_MAX + 64 + 8 * EXTENTS_MAX * 16) as u32;

/// What is asked of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Its bytes.
    Read(Range<u64>),
    /// Which of it are zeros.
    Status(Range<u64>),
}

impl Request {
    fn range(&self) -> &Range<u64> {
        match self {
            Request::Read(range) | Request::Status(range) => range,
        }
    }
}

/// What came of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The bytes.
    Data(Vec<u8>),
    /// Lengths and states from the beginning of the range on, not necessarily all of it.
    States(Vec<(u32, u32)>),
    /// The server answered with an error.
    Failed { errno: u32, message: String },
    /// The connection ended before the answer came.
    Broken,
}

/// Where a caller waits.
#[derive(Default)]
struct Slot {
    outcome: Mutex<Option<Outcome>>,
    filled: Condvar,
}

impl Slot {
    /// The first outcome counts.
    fn fill(&self, outcome: Outcome) {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(outcome);
        self.filled.notify_all();
    }

    /// None when the deadline passed.
    fn wait(&self, deadline: Option<Instant>) -> Option<Outcome> {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = outcome.take() {
                return Some(outcome);
            }
            outcome = match deadline {
                None => self.filled.wait(outcome).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    self.filled.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

/// A request on its way. However it ends, whoever waits for it is told: dropped without an outcome it was broken off.
struct InFlight {
    slot: Arc<Slot>,
    request: Request,
    since: Instant,
    data: Vec<u8>,
    /// What of `data` came; pieces do not overlap.
    pieces: Vec<Range<u64>>,
    states: Option<Vec<(u32, u32)>>,
    failure: Option<(u32, String)>,
}

impl InFlight {
    fn new(request: Request) -> InFlight {
        InFlight {
            slot: Arc::default(),
            request,
            since: Instant::now(),
            data: Vec::new(),
            pieces: Vec::new(),
            states: None,
            failure: None,
        }
    }

    /// Where bytes of a chunk go; none of them may have come before.
    fn place(&mut self, offset: u64, length: u64) -> Result<&mut [u8], Violation> {
        let Request::Read(wanted) = &self.request else { return Err(Violation::new("data that nobody asked for")) };
        let end = offset.checked_add(length).filter(|end| *end <= wanted.end && offset >= wanted.start);
        let end = end.ok_or_else(|| Violation::new("data outside of what was asked for"))?;
        if length == 0 || self.pieces.iter().any(|piece| offset < piece.end && piece.start < end) {
            return Err(Violation::new("data that came before"));
        }
        let is_full = self.pieces.len() == PIECES_MAX;
        match self.pieces.iter_mut().find(|piece| piece.end == offset || piece.start == end) {
            Some(piece) => *piece = piece.start.min(offset)..piece.end.max(end),
            None if is_full => return Err(Violation::new("an answer in too many pieces")),
            None => self.pieces.push(offset..end),
        }
        if self.data.is_empty() {
            self.data = vec![0; (wanted.end - wanted.start) as usize];
        }
        let from = (offset - wanted.start) as usize;
        Ok(&mut self.data[from..from + length as usize])
    }

    fn outcome(&mut self) -> Result<Outcome, Violation> {
        if let Some((errno, message)) = self.failure.take() {
            return Ok(Outcome::Failed { errno, message });
        }
        match &self.request {
            Request::Read(wanted) => {
                let came: u64 = self.pieces.iter().map(|piece| piece.end - piece.start).sum();
                if came != wanted.end - wanted.start {
                    return Err(Violation::new("an answer without all of its data"));
                }
                Ok(Outcome::Data(std::mem::take(&mut self.data)))
            }
            Request::Status(_) => {
                let states = self.states.take();
                states.map(Outcome::States).ok_or_else(|| Violation::new("an answer without states"))
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.slot.fill(Outcome::Broken);
    }
}

#[derive(Default)]
struct Pending {
    in_flight: HashMap<u64, InFlight>,
    is_broken: bool,
}

/// A connection that takes requests.
pub(super) struct Link {
    outgoing: Mutex<Outgoing>,
    pending: Mutex<Pending>,
    socket: Arc<Socket>,
    cookie: AtomicU64,
    pub(super) agreed: Agreed,
}

impl Link {
    pub(super) fn new(outgoing: Outgoing, socket: Arc<Socket>, agreed: Agreed) -> Link {
        let (outgoing, pending) = (Mutex::new(outgoing), Mutex::default());
        Link { outgoing, pending, socket, cookie: AtomicU64::new(1), agreed }
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests under way.
    pub(super) fn load(&self) -> usize {
        self.pending().in_flight.len()
    }

    /// Since when the oldest of them waits.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.pending().in_flight.values().map(|in_flight| in_flight.since).min()
    }

    /// Asks and waits. When the deadline passes the connection is given up: it has become useless.
    pub(super) fn ask(&self, request: Request, deadline: Option<Instant>) -> Option<Outcome> {
        let cookie = self.cookie.fetch_add(1, Ordering::Relaxed);
        let range = request.range();
        let (command, length) = match &request {
            Request::Read(range) => (command::READ, range.end - range.start),
            Request::Status(range) => (command::BLOCK_STATUS, range.end - range.start),
        };
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        let header = RequestHeader { flags: 0, command, cookie, offset: range.start, length };
        let in_flight = InFlight::new(request);
        let slot = Arc::clone(&in_flight.slot);
        {
            let mut pending = self.pending();
            if pending.is_broken {
                return Some(Outcome::Broken);
            }
            pending.in_flight.insert(cookie, in_flight);
        }
        let sent = self.outgoing.lock().unwrap_or_else(PoisonError::into_inner).write_all(&header.encode());
        if sent.is_err() {
            // The receiving thread then ends, too, and tells all who wait.
            self.cut();
        }
        let outcome = slot.wait(deadline);
        if outcome.is_none() {
            self.cut();
        }
        outcome
    }

    /// Ends the connection.
    pub(super) fn cut(&self) {
        self.socket.shutdown(Shutdown::Both);
    }

    /// Tells all who wait that nothing comes any more.
    pub(super) fn give_up(&self) {
        let in_flight = {
            let mut pending = self.pending();
            pending.is_broken = true;
            std::mem::take(&mut pending.in_flight)
        };
        drop(in_flight);
    }

    /// Takes answers until the connection ends; says why it did.
    pub(super) fn receive(&self, incoming: &mut BufReader<Incoming>) -> io::Error {
        loop {
            if let Err(error) = self.receive_one(incoming) {
                return error;
            }
        }
    }

    fn receive_one(&self, incoming: &mut BufReader<Incoming>) -> io::Result<()> {
        let mut head = [0; ReplyHeader::CHUNK_BYTES];
        incoming.read_exact(&mut head[..4])?;
        let magic = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
        let length = ReplyHeader::bytes(magic)?;
        incoming.read_exact(&mut head[4..length])?;
        match ReplyHeader::parse(&head[..length])? {
            ReplyHeader::Simple { error, cookie } => {
                let mut in_flight = self.take(cookie)?;
                if error != 0 {
                    in_flight.failure = Some((error, String::new()));
                } else if let Request::Read(range) = in_flight.request.clone() {
                    if self.agreed.is_structured {
                        return Err(Violation::new("a simple reply where structured ones were agreed on").into());
                    }
                    incoming.read_exact(in_flight.place(range.start, range.end - range.start)?)?;
                }
                self.settle(in_flight)
            }
            ReplyHeader::Chunk { flags, kind, cookie, length } => {
                if !self.agreed.is_structured {
                    return Err(Violation::new("a structured reply that was not agreed on").into());
                }
                let mut in_flight = self.take(cookie)?;
                self.receive_chunk(incoming, kind, length, &mut in_flight)?;
                if flags & DONE != 0 {
                    return self.settle(in_flight);
                }
                self.pending().in_flight.insert(cookie, in_flight);
                Ok(())
            }
        }
    }

    fn receive_chunk(
        &self,
        incoming: &mut BufReader<Incoming>,
        kind: u16,
        length: u32,
        in_flight: &mut InFlight,
    ) -> io::Result<()> {
        if kind == chunk::OFFSET_DATA {
            let length = length.checked_sub(8).ok_or_else(|| Violation::new("a data chunk without an offset"))?;
            let mut offset = [0; 8];
            incoming.read_exact(&mut offset)?;
            return incoming.read_exact(in_flight.place(u64::from_be_bytes(offset), u64::from(length))?);
        }
        if length > PAYLOAD_BYTES_MAX {
            return Err(Violation::new(format!("a chunk of {length} bytes")).into());
        }
        let mut payload = vec![0; length as usize];
        incoming.read_exact(&mut payload)?;
        match Payload::parse(kind, &payload)? {
            Payload::None => {}
            // What is new is zero already.
            Payload::Hole { offset, length } => in_flight.place(offset, u64::from(length))?.fill(0),
            Payload::Failure { error, message } => in_flight.failure = Some((error, message)),
            Payload::Status { context, extents } => {
                if Some(context) != self.agreed.allocation_context || in_flight.states.is_some() {
                    return Err(Violation::new("states that nobody asked for").into());
                }
                in_flight.states = Some(extents);
            }
        }
        Ok(())
    }

    fn take(&self, cookie: u64) -> io::Result<InFlight> {
        let in_flight = self.pending().in_flight.remove(&cookie);
        in_flight.ok_or_else(|| Violation::new("an answer that nobody waits for").into())
    }

    fn settle(&self, mut in_flight: InFlight) -> io::Result<()> {
        let outcome = in_flight.outcome()?;
        in_flight.slot.fill(outcome);
        Ok(())
    }
}
