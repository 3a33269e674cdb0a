//! A ring's thread: takes requests, does at once what does not wait, and hands the rest to the disk.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::super::chain::Chain;
use super::super::counters::Counters;
use super::super::memory::Memory;
use super::super::pending::Kind;
use super::super::request::{Call, Operation, SERIAL_BYTES, status};
use super::super::split::Split;
use super::{Done, Life, Next, Ring};
use crate::{Attempt, Disk, DiskError, GuestSegment, Request};

/// Requests taken and told of at once: more would let the first wait for the last.
const BATCH_MAX: usize = 16;
/// The bounce buffer's size that is kept from request to request.
const KEPT_BUFFER_BYTES: usize = 1 << 20;

/// What a thread reuses from request to request.
#[derive(Default)]
struct Scratch {
    chain: Chain,
    /// The bounce buffer: a guest may change its page while a request is done, so what is hashed and written is a copy.
    buffer: Vec<u8>,
    segments: Vec<GuestSegment>,
    done: Vec<Done>,
}

/// Serves until the ring stops.
pub(super) fn run(ring: &Arc<Ring>, life: &Life, kick: &File) {
    let mut scratch = Scratch::default();
    let mut heads = Vec::with_capacity(BATCH_MAX);
    loop {
        match ring.next(&mut heads, BATCH_MAX) {
            Next::Stop => return,
            Next::Sleep => {
                scratch.buffer.truncate(KEPT_BUFFER_BYTES);
                scratch.buffer.shrink_to(KEPT_BUFFER_BYTES);
                if !sleep(ring, kick) {
                    return;
                }
            }
            Next::Work { memory, split } => {
                for (place, head) in heads.iter().enumerate() {
                    if serve(ring, life, (&memory, &split), *head, &mut scratch) {
                        ring.postpone(&heads[place + 1..]);
                        break;
                    }
                }
                ring.tell(&scratch.done);
                scratch.done.clear();
            }
        }
    }
}

/// Waits for a kick or a wake. False when there can be none any more.
fn sleep(ring: &Ring, kick: &File) -> bool {
    let mut descriptors = [PollFd::new(kick, PollFlags::IN), PollFd::new(&ring.wake, PollFlags::IN)];
    match poll(&mut descriptors, None) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => {
            tracing::error!(ring = ring.index, %error, "a ring cannot wait for its driver");
            return false;
        }
    }
    let [kicked, woken] = descriptors.map(|descriptor| descriptor.revents());
    if woken.contains(PollFlags::IN) {
        drain(&ring.wake);
    }
    if kicked.contains(PollFlags::IN) {
        ring.counters.kicks.add(1);
        drain(kick);
    } else if !kicked.is_empty() {
        tracing::error!(ring = ring.index, "a ring's kick descriptor is no event descriptor");
        return false;
    }
    true
}

/// Takes the count out of an event descriptor that has one.
fn drain(descriptor: impl AsFd) {
    let _ = rustix::io::read(descriptor, &mut [0_u8; 8]);
}

/// Does one request, or sees to it that it is done. Whether so much waits now that none may follow.
fn serve(ring: &Arc<Ring>, life: &Life, (memory, split): (&Memory, &Split), head: u16, scratch: &mut Scratch) -> bool {
    let walked = scratch.chain.walk(memory, split.descriptors, split.size, head);
    let request = match walked.and_then(|()| Call::decode(memory, head, &mut scratch.chain)) {
        Ok(request) => {
            let is_durable = life.is_write_through && request.operation.is_change();
            Call { is_durable, ..request }
        }
        Err(error) => {
            tracing::debug!(ring = ring.index, head, %error, "a chain is no request");
            ring.counters.malformed.add(1);
            scratch.done.push(Done { head, length: 0, kind: Kind::Other });
            return false;
        }
    };
    match at_once(ring, &life.disk, memory, &request, scratch) {
        Outcome::Done(done) => {
            scratch.done.push(done);
            false
        }
        Outcome::Waits(order) => {
            ring.counters.waited.add(1);
            let is_full = ring.wait_for(&request);
            let is_durable = request.is_durable;
            let (ring, number) = (ring.clone(), life.number);
            let answer = move |outcome| ring.answer(number, &request, outcome);
            match is_durable {
                true => life.disk.submit_durable(&life.requester, order, Box::new(answer)),
                false => life.disk.submit_for(&life.requester, order, Box::new(answer)),
            }
            is_full
        }
    }
}

enum Outcome {
    Done(Done),
    Waits(Request),
}

/// Does a request if that needs no waiting, else says what to order.
fn at_once(ring: &Ring, disk: &Disk, memory: &Memory, request: &Call, scratch: &mut Scratch) -> Outcome {
    let counters = &ring.counters;
    let answer = |outcome: Result<&[u8], &DiskError>| Outcome::Done(put_answer(memory, request, outcome, counters));
    match request.operation {
        Operation::Read { offset, length } => {
            prepare(request, scratch, length);
            let Scratch { buffer, segments, .. } = scratch;
            match disk.try_read(offset, &mut [IoSliceMut::new(&mut buffer[..length as usize])], segments) {
                Ok(Attempt::Done) => answer(Ok(&buffer[..length as usize])),
                Ok(Attempt::WouldWait) => Outcome::Waits(Request::Read { offset, length, segments: segments.clone() }),
                Err(error) => answer(Err(&error)),
            }
        }
        Operation::Write { offset, length } => {
            prepare(request, scratch, length);
            let Scratch { buffer, segments, .. } = scratch;
            let data = &mut buffer[..length as usize];
            if memory.gather(&request.data, data).is_err() {
                return Outcome::Done(put_status(memory, request, status::IO_ERROR, 0, counters));
            }
            let tried =
                if request.is_durable { Ok(Attempt::WouldWait) } else { disk.try_write(offset, data, segments) };
            match tried {
                Ok(Attempt::Done) => answer(Ok(&[])),
                Ok(Attempt::WouldWait) => {
                    Outcome::Waits(Request::Write { offset, data: data.to_vec(), segments: segments.clone() })
                }
                Err(error) => answer(Err(&error)),
            }
        }
        Operation::Flush => Outcome::Waits(Request::Flush),
        Operation::Discard { offset, length } => Outcome::Waits(Request::Discard { offset, length }),
        Operation::WriteZeroes { offset, length, may_unmap } => {
            Outcome::Waits(Request::WriteZeroes { offset, length, may_unmap })
        }
        Operation::Identify => {
            let mut serial = [0; SERIAL_BYTES];
            let length = ring.serial.len().min(SERIAL_BYTES);
            serial[..length].copy_from_slice(&ring.serial.as_bytes()[..length]);
            answer(Ok(&serial))
        }
        Operation::Refuse { status } => Outcome::Done(put_status(memory, request, status, 0, counters)),
    }
}

/// Makes the bounce buffer long enough for a request, and puts its segments beside it.
fn prepare(request: &Call, scratch: &mut Scratch, length: u64) {
    scratch.segments.clear();
    scratch.segments.extend(request.segments());
    let length = length as usize;
    if scratch.buffer.len() < length {
        scratch.buffer.resize(length, 0);
    }
}

/// Puts a request's answer into guest memory: a read's bytes, then the status.
pub(in super::super) fn put_answer(
    memory: &Memory,
    request: &Call,
    outcome: Result<&[u8], &DiskError>,
    counters: &Counters,
) -> Done {
    let answer = match outcome {
        Ok(bytes) => match memory.scatter(&request.data, bytes_to_guest(request, bytes)) {
            Ok(()) => (status::OK, bytes_to_guest(request, bytes).len()),
            Err(_) => (status::IO_ERROR, 0),
        },
        Err(error) => {
            tracing::debug!(%error, operation = ?request.operation, "a request failed");
            (status::IO_ERROR, 0)
        }
    };
    put_status(memory, request, answer.0, answer.1, counters)
}

/// What of an outcome goes to the guest: nothing unless it asked for bytes.
fn bytes_to_guest<'a>(request: &Call, bytes: &'a [u8]) -> &'a [u8] {
    match request.operation {
        Operation::Read { .. } | Operation::Identify => bytes,
        _ => &[],
    }
}

fn put_status(memory: &Memory, request: &Call, status: u8, data_bytes: usize, counters: &Counters) -> Done {
    count(request, status, counters);
    // Memory that the guest took away meanwhile: there is nobody to tell.
    let _ = memory.write(request.status_address, &[status]);
    let kind = match request.operation {
        Operation::Flush => Kind::Flush,
        _ if request.is_durable => Kind::Flush,
        operation if operation.is_change() => Kind::Change,
        _ => Kind::Other,
    };
    Done { head: request.head, length: data_bytes as u32 + 1, kind }
}

fn count(request: &Call, status: u8, counters: &Counters) {
    if status != status::OK {
        counters.failed.add(1);
        return;
    }
    match request.operation {
        Operation::Read { length, .. } => {
            counters.reads.add(1);
            counters.read_bytes.add(length);
        }
        Operation::Write { length, .. } => {
            counters.writes.add(1);
            counters.written_bytes.add(length);
        }
        Operation::Flush => counters.flushes.add(1),
        Operation::Discard { .. } | Operation::WriteZeroes { .. } => counters.discards.add(1),
        Operation::Identify | Operation::Refuse { .. } => {}
    }
}
