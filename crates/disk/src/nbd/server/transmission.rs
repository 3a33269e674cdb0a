//! Requests for data, one after another as they come; their replies as they are ready.

use std::io::{self, BufRead, BufReader, IoSliceMut, Read};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::budget::STEP_BYTES;
use super::exports::Content;
use super::negotiation::{ALLOCATION_CONTEXT, Agreement};
use super::replies::{Replies, Ticket};
use super::workers::Workers;
use super::{Place, Shared};
use crate::nbd::protocol::reply::EXTENTS_MAX;
use crate::nbd::protocol::request::{RequestHeader, command, command_flag};
use crate::nbd::protocol::{PAYLOAD_BYTES_MAX, Violation, allocation};
use crate::nbd::stream::Incoming;
use crate::{At, Attempt, Completion, Disk, DiskError, Extent, Request, Requester, SECTOR_BYTES, Source};

/// Requests up to this length are tried by the reading thread itself; longer ones would hold up those behind them.
const INLINE_BYTES_MAX: u32 = 64 << 10;

/// Data flows.
pub(super) struct Transmission {
    shared: Arc<Shared>,
    agreement: Agreement,
    replies: Arc<Replies>,
    workers: Arc<Workers>,
    requester: Requester,
}

impl Transmission {
    pub(super) fn new(place: Arc<Place>, agreement: Agreement, replies: Arc<Replies>) -> Transmission {
        let (shared, workers) = (Arc::clone(&place.shared), Arc::new(Workers::new(place)));
        Transmission { shared, agreement, replies, workers, requester: Requester::default() }
    }

    /// What has no answer yet changes nothing any more, and what was not begun is not done.
    pub(super) fn withdraw(&self) {
        self.workers.end();
        if let Content::Disk(disk) = &self.agreement.export.content {
            disk.withdraw(&self.requester);
        }
    }

    /// Takes requests until the client leaves or the server closes. A client that goes without taking its leave is
    /// lost.
    pub(super) fn run(&mut self, incoming: &mut BufReader<Incoming>) -> io::Result<()> {
        loop {
            if incoming.buffer().len() < RequestHeader::BYTES {
                // Before waiting for more, the client gets what is ready.
                self.replies.send_waiting();
                if self.shared.is_stopping() {
                    return Ok(());
                }
                incoming.fill_buf()?;
            }
            let mut head = [0; RequestHeader::BYTES];
            incoming.read_exact(&mut head)?;
            let header = RequestHeader::parse(&head)?;
            if header.command == command::DISCONNECT {
                return Ok(());
            }
            self.shared.counters.requests.fetch_add(1, Ordering::Relaxed);
            // Before there is memory for its data.
            let ticket = self.replies.admit(header.cookie, data_bytes(header)?)?;
            let data = match self.data(header, incoming) {
                Ok(data) => data,
                Err(error) => {
                    ticket.forget();
                    return Err(error);
                }
            };
            match self.refusal(header) {
                Some((errno, reason)) => self.refuse(ticket, errno, reason),
                None => self.execute(header, data, ticket),
            }
        }
    }

    /// A write's data.
    fn data(&self, header: RequestHeader, incoming: &mut BufReader<Incoming>) -> io::Result<Vec<u8>> {
        if header.command != command::WRITE {
            return Ok(Vec::new());
        }
        if incoming.buffer().len() < header.length as usize {
            self.replies.send_waiting();
        }
        let mut data = vec![0; header.length as usize];
        let stall = self.replies.receive();
        for step in data.chunks_mut(STEP_BYTES) {
            incoming.read_exact(step)?;
            stall.goes_on();
        }
        drop(stall);
        Ok(data)
    }

    /// Why a request cannot be done, whatever the disk holds.
    fn refusal(&self, header: RequestHeader) -> Option<(i32, &'static str)> {
        use command::{BLOCK_STATUS, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES};
        // Some clients set FUA on everything; where nothing is written it means nothing.
        let allowed = command_flag::FUA
            | match header.command {
                READ => command_flag::DF,
                WRITE_ZEROES => command_flag::NO_HOLE | command_flag::FAST_ZERO,
                BLOCK_STATUS => command_flag::REQ_ONE,
                _ => 0,
            };
        let is_change = matches!(header.command, WRITE | TRIM | WRITE_ZEROES);
        let end = header.offset.checked_add(u64::from(header.length));
        let is_inside = end.is_some_and(|end| end <= self.agreement.size_bytes);
        let is_aligned =
            header.offset.is_multiple_of(SECTOR_BYTES) && u64::from(header.length).is_multiple_of(SECTOR_BYTES);
        let is_read_only = matches!(self.agreement.export.content, Content::Source(_));
        match header.command {
            READ | WRITE | TRIM | WRITE_ZEROES | BLOCK_STATUS | FLUSH if header.flags & !allowed != 0 => {
                Some((libc::EINVAL, "a flag that this command does not have"))
            }
            FLUSH => None,
            READ | WRITE | TRIM | WRITE_ZEROES | BLOCK_STATUS => {
                if is_change && is_read_only {
                    Some((libc::EPERM, "the export is read only"))
                } else if !is_inside {
                    let is_write = matches!(header.command, WRITE | WRITE_ZEROES);
                    Some((if is_write { libc::ENOSPC } else { libc::EINVAL }, "beyond the end of the export"))
                } else if !is_aligned {
                    Some((libc::EINVAL, "not whole sectors of 512 bytes"))
                } else if header.command == READ && header.length > PAYLOAD_BYTES_MAX {
                    Some((libc::EINVAL, "more than 32 MiB at a time"))
                } else if header.command == BLOCK_STATUS && (!self.agreement.has_allocation || header.length == 0) {
                    Some((libc::EINVAL, "block states were not agreed on, or of nothing"))
                } else {
                    None
                }
            }
            _ => Some((libc::EINVAL, "an unknown command")),
        }
    }

    fn refuse(&self, ticket: Ticket, errno: i32, reason: &str) {
        self.shared.counters.errors.fetch_add(1, Ordering::Relaxed);
        ticket.fail(errno.unsigned_abs(), reason);
    }

    fn execute(&self, header: RequestHeader, data: Vec<u8>, ticket: Ticket) {
        let range = header.offset..header.offset + u64::from(header.length);
        let is_status = header.command == command::BLOCK_STATUS;
        match &self.agreement.export.content {
            Content::Disk(disk) if is_status => {
                let disk = disk.clone();
                let ask = move |range| {
                    let view = disk.view(&At::Current)?;
                    view.extents(range).map_err(DiskError::from)
                };
                self.status(header, range, ask, ticket);
            }
            Content::Source(source) if is_status => {
                let source = Arc::clone(source);
                self.status(header, range, move |range| Ok(source.extents(range)?), ticket);
            }
            Content::Disk(disk) => self.on_disk(disk, header, data, ticket),
            Content::Source(source) => self.on_source(source, header, ticket),
        }
    }

    fn on_disk(&self, disk: &Disk, header: RequestHeader, data: Vec<u8>, ticket: Ticket) {
        let (offset, length) = (header.offset, u64::from(header.length));
        match header.command {
            command::READ => self.read(disk, header, ticket),
            command::WRITE => self.write(disk, header, data, ticket),
            command::FLUSH => {
                let flushed = self.completion(ticket, |ticket, _| ticket.done());
                disk.submit_for(&self.requester, Request::Flush, flushed);
            }
            command::TRIM => self.change(disk, header, Request::Discard { offset, length }, ticket),
            // WRITE_ZEROES: all other commands were refused before.
            _ => {
                let may_unmap = header.flags & command_flag::NO_HOLE == 0;
                if header.flags & command_flag::FAST_ZERO != 0 && !may_unmap {
                    return self.refuse(ticket, libc::ENOTSUP, "reserved zeros are written one by one");
                }
                self.change(disk, header, Request::WriteZeroes { offset, length, may_unmap }, ticket);
            }
        }
    }

    fn read(&self, disk: &Disk, header: RequestHeader, ticket: Ticket) {
        let (offset, length) = (header.offset, header.length);
        self.shared.counters.read_bytes.fetch_add(u64::from(length), Ordering::Relaxed);
        if length <= INLINE_BYTES_MAX {
            let mut bytes = vec![0; length as usize];
            match disk.try_read(offset, &mut [IoSliceMut::new(&mut bytes)], &[]) {
                Ok(Attempt::Done) => return ticket.data(offset, bytes),
                Ok(Attempt::WouldWait) => {}
                Err(error) => return self.fail(ticket, &error),
            }
        }
        let request = Request::Read { offset, length: u64::from(length), segments: Vec::new() };
        let read = self.completion(ticket, move |ticket, bytes| ticket.data(offset, bytes));
        disk.submit_for(&self.requester, request, read);
    }

    fn write(&self, disk: &Disk, header: RequestHeader, data: Vec<u8>, ticket: Ticket) {
        let offset = header.offset;
        self.shared.counters.written_bytes.fetch_add(u64::from(header.length), Ordering::Relaxed);
        if header.length <= INLINE_BYTES_MAX {
            match disk.try_write(offset, &data, &[]) {
                Ok(Attempt::Done) if header.flags & command_flag::FUA == 0 => return ticket.done(),
                Ok(Attempt::Done) => {
                    let flushed = self.completion(ticket, |ticket, _| ticket.done());
                    return disk.submit_for(&self.requester, Request::Flush, flushed);
                }
                Ok(Attempt::WouldWait) => {}
                Err(error) => return self.fail(ticket, &error),
            }
        }
        self.change(disk, header, Request::Write { offset, data, segments: Vec::new() }, ticket);
    }

    /// Hands a change to the disk's workers; with FUA it is flushed before it is answered.
    fn change(&self, disk: &Disk, header: RequestHeader, request: Request, ticket: Ticket) {
        let changed = self.completion(ticket, |ticket, _| ticket.done());
        match header.flags & command_flag::FUA {
            0 => disk.submit_for(&self.requester, request, changed),
            _ => disk.submit_durable(&self.requester, request, changed),
        }
    }

    fn on_source(&self, source: &Arc<dyn Source>, header: RequestHeader, ticket: Ticket) {
        if header.command != command::READ {
            // A flush: there is nothing to flush.
            return ticket.done();
        }
        let (offset, length) = (header.offset, header.length);
        self.shared.counters.read_bytes.fetch_add(u64::from(length), Ordering::Relaxed);
        let (source, shared) = (Arc::clone(source), Arc::clone(&self.shared));
        self.workers.run(move || {
            let mut bytes = vec![0; length as usize];
            let outcome = source.read(offset, &mut bytes).map(|()| bytes);
            ticket.elsewhere(|ticket| match outcome {
                Ok(bytes) => ticket.data(offset, bytes),
                Err(error) => fail(&shared, ticket, &error.into()),
            });
        });
    }

    fn status(
        &self,
        header: RequestHeader,
        range: Range<u64>,
        ask: impl FnOnce(Range<u64>) -> Result<Vec<Extent>, DiskError> + Send + 'static,
        ticket: Ticket,
    ) {
        let extents_max = if header.flags & command_flag::REQ_ONE == 0 { EXTENTS_MAX } else { 1 };
        let shared = Arc::clone(&self.shared);
        self.workers.run(move || {
            let states = ask(range.clone()).map(|extents| states(&extents, range, extents_max));
            ticket.elsewhere(|ticket| match states {
                Ok(states) => ticket.states(ALLOCATION_CONTEXT, &states),
                Err(error) => fail(&shared, ticket, &error),
            });
        });
    }

    fn completion(&self, ticket: Ticket, answer: impl FnOnce(Ticket, Vec<u8>) + Send + 'static) -> Completion {
        completion(Arc::clone(&self.shared), ticket, answer)
    }

    fn fail(&self, ticket: Ticket, error: &DiskError) {
        fail(&self.shared, ticket, error);
    }
}

/// Bytes of data that a request has or asks for.
fn data_bytes(header: RequestHeader) -> Result<u64, Violation> {
    let is_too_long = header.length > PAYLOAD_BYTES_MAX;
    match header.command {
        // What follows cannot be told from data without reading it all.
        command::WRITE if is_too_long => Err(Violation::new(format!("a write of {} bytes", header.length))),
        // A read that is too long is refused.
        command::READ if is_too_long => Ok(0),
        command::READ | command::WRITE => Ok(u64::from(header.length)),
        _ => Ok(0),
    }
}

fn completion(
    shared: Arc<Shared>,
    ticket: Ticket,
    answer: impl FnOnce(Ticket, Vec<u8>) + Send + 'static,
) -> Completion {
    Box::new(move |outcome| {
        ticket.elsewhere(|ticket| match outcome {
            Ok(bytes) => answer(ticket, bytes),
            Err(error) => fail(&shared, ticket, &error),
        });
    })
}

fn fail(shared: &Shared, ticket: Ticket, error: &DiskError) {
    shared.counters.errors.fetch_add(1, Ordering::Relaxed);
    // NBD's errors are a few of Linux's, by the same numbers; "read only" is EPERM there.
    let errno = match error.errno() {
        libc::EROFS => libc::EPERM,
        errno => errno,
    };
    ticket.fail(errno.unsigned_abs(), &error.to_string());
}

/// Extents as lengths and states, neighbours of one state together; never more than was asked for.
fn states(extents: &[Extent], range: Range<u64>, extents_max: usize) -> Vec<(u32, u32)> {
    let mut states: Vec<(u32, u32)> = Vec::new();
    let mut at = range.start;
    for extent in extents {
        let end = extent.range.end.min(range.end);
        if end <= at || extent.range.start > at {
            continue;
        }
        let length = u32::try_from(end - at).unwrap_or(u32::MAX);
        let state = if extent.is_zero { allocation::HOLE | allocation::ZERO } else { 0 };
        let is_full = states.len() == extents_max;
        match states.last_mut() {
            Some(last) if last.1 == state => last.0 += length,
            _ if is_full => break,
            _ => states.push((length, state)),
        }
        at = end;
    }
    if states.is_empty() {
        // Nothing is known: then it is data.
        states.push((u32::try_from(range.end - range.start).unwrap_or(u32::MAX), 0));
    }
    states
}
