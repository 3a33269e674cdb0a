//! Replies of one connection: in whatever order they are ready, and never more in flight than is allowed.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::budget::{Budget, LOOK_INTERVAL, OWN_BYTES, STEP_BYTES, Share, Side, Stall};
use crate::nbd::protocol::reply;
use crate::nbd::socket::Socket;
use crate::nbd::stream::Outgoing;

/// Requests of one connection in flight: the next one waits. QEMU has 16, Linux 128.
pub(super) const REQUESTS_MAX: usize = 128;

/// Bytes of data that requests of one connection in flight may hold: the next one waits, but one is always let in.
const BYTES_MAX: u64 = 64 << 20;

/// Replies are gathered up to this before they are sent.
const GATHER_BYTES: usize = 128 << 10;

/// Data of this length is sent from where it is.
const GATHER_DATA_BYTES_MAX: usize = 32 << 10;

/// A reply that waits to be sent.
struct Reply {
    head: Vec<u8>,
    data: Vec<u8>,
    weight: Weight,
}

/// Bytes that a request holds from when it is let in until its reply is sent.
#[derive(Clone, Copy, Default)]
struct Weight {
    /// Of its connection's.
    bytes: u64,
    /// Of them, of what all connections of the server share.
    common_bytes: u64,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Reply>,
    requests: usize,
    weight: Weight,
    /// The client is not there any more: replies are dropped.
    is_lost: bool,
    /// No more requests come.
    is_over: bool,
}

/// The replies of a connection.
pub(super) struct Replies {
    state: Mutex<State>,
    /// Told when a reply waits that the reading thread does not send itself.
    waiting: Condvar,
    /// Told when replies have gone.
    gone: Condvar,
    outgoing: Mutex<Sending>,
    socket: Arc<Socket>,
    is_structured: bool,
    share: Arc<Share>,
}

struct Sending {
    outgoing: Outgoing,
    share: Arc<Share>,
    gathered: Vec<u8>,
}

impl Replies {
    pub(super) fn new(outgoing: Outgoing, socket: Arc<Socket>, is_structured: bool, budget: &Arc<Budget>) -> Replies {
        let share = budget.share(Arc::clone(&socket));
        let gathered = Vec::with_capacity(GATHER_BYTES);
        Replies {
            state: Mutex::default(),
            waiting: Condvar::new(),
            gone: Condvar::new(),
            outgoing: Mutex::new(Sending { outgoing, share: Arc::clone(&share), gathered }),
            socket,
            is_structured,
            share,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a request in whose data is so long, when there is room here and among all connections. A client that goes
    /// while it waits for that is lost.
    pub(super) fn admit(self: &Arc<Self>, cookie: u64, data_bytes: u64) -> io::Result<Ticket> {
        let is_full = |state: &mut State| {
            state.requests >= REQUESTS_MAX
                || (state.requests > 0 && state.weight.bytes.saturating_add(data_bytes) > BYTES_MAX)
        };
        let mut state = self.state();
        while is_full(&mut state) {
            drop(state);
            // What waits to be sent by this thread takes up the room.
            self.send_waiting();
            let waited = self.gone.wait_timeout_while(self.state(), LOOK_INTERVAL, is_full);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if is_full(&mut state) && self.socket.is_left() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
        }
        state.requests += 1;
        let own_bytes = state.weight.bytes - state.weight.common_bytes;
        let mut weight = Weight { bytes: data_bytes, common_bytes: 0 };
        if own_bytes + data_bytes > OWN_BYTES {
            weight.common_bytes = data_bytes;
        }
        state.weight.bytes += weight.bytes;
        state.weight.common_bytes += weight.common_bytes;
        drop(state);
        if weight.common_bytes > 0 {
            // What others wait for may be what waits to be sent by this thread.
            self.send_waiting();
            if let Err(error) = self.share.take(weight.common_bytes) {
                self.forget(weight);
                return Err(error);
            }
        }
        Ok(Ticket { replies: Arc::clone(self), cookie, weight, is_answered: false })
    }

    /// A request that was let in here and found no room among all connections.
    fn forget(&self, weight: Weight) {
        let mut state = self.state();
        state.requests -= 1;
        state.weight.bytes -= weight.bytes;
        state.weight.common_bytes -= weight.common_bytes;
    }

    /// The client is waited for while it sends data.
    pub(super) fn receive(&self) -> Stall<'_> {
        self.share.wait_for(Side::Receiving)
    }

    /// Sends all that waits.
    pub(super) fn send_waiting(&self) {
        let mut sending = self.outgoing.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let batch = {
                let mut state = self.state();
                if state.queue.is_empty() {
                    return;
                }
                std::mem::take(&mut state.queue)
            };
            let outcome = if self.state().is_lost { Ok(()) } else { sending.send(&batch) };
            if outcome.is_err() {
                self.lose();
            }
            self.settle(batch);
        }
    }

    /// The client is not there any more: what is answered from now on is dropped.
    pub(super) fn lose(&self) {
        self.socket.shutdown(Shutdown::Both);
        let mut state = self.state();
        state.is_lost = true;
        let dropped = std::mem::take(&mut state.queue);
        drop(state);
        self.settle(dropped);
    }

    /// Gives back what requests held whose replies have gone.
    fn settle(&self, replies: VecDeque<Reply>) {
        let mut state = self.state();
        state.requests -= replies.len();
        let common_bytes = replies.iter().map(|reply| reply.weight.common_bytes).sum();
        state.weight.bytes -= replies.iter().map(|reply| reply.weight.bytes).sum::<u64>();
        state.weight.common_bytes -= common_bytes;
        drop(state);
        drop(replies);
        self.share.give(common_bytes);
        self.gone.notify_all();
    }

    /// Sends what other threads have finished, until the connection is over: the work of its second thread.
    pub(super) fn send_until_over(&self) {
        loop {
            let idle = |state: &mut State| state.queue.is_empty() && !state.is_over;
            let state = self.waiting.wait_while(self.state(), idle).unwrap_or_else(PoisonError::into_inner);
            let is_over = state.is_over && state.queue.is_empty();
            drop(state);
            if is_over {
                return;
            }
            self.send_waiting();
        }
    }

    /// Waits until all that was let in is answered, the client is lost or is cut off, and ends the connection.
    pub(super) fn end(&self, is_cut: impl Fn() -> bool) {
        self.send_waiting();
        let is_waited_for = |state: &mut State| state.requests > 0 && !state.is_lost;
        while is_waited_for(&mut self.state()) {
            if is_cut() {
                self.lose();
            }
            let waited = self.gone.wait_timeout_while(self.state(), LOOK_INTERVAL, is_waited_for);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
        self.state().is_over = true;
        self.waiting.notify_all();
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner).outgoing.finish();
    }

    fn push(&self, reply: Reply) {
        let mut state = self.state();
        if state.is_lost {
            drop(state);
            return self.settle(VecDeque::from([reply]));
        }
        state.queue.push_back(reply);
    }
}

impl Sending {
    fn send(&mut self, batch: &VecDeque<Reply>) -> io::Result<()> {
        for reply in batch {
            self.gathered.extend(&reply.head);
            if reply.data.len() > GATHER_DATA_BYTES_MAX {
                self.send_gathered()?;
                let stall = self.share.wait_for(Side::Sending);
                for step in reply.data.chunks(STEP_BYTES) {
                    self.outgoing.write_all(step)?;
                    stall.goes_on();
                }
            } else {
                self.gathered.extend(&reply.data);
            }
            if self.gathered.len() > GATHER_BYTES - GATHER_DATA_BYTES_MAX {
                self.send_gathered()?;
            }
        }
        self.send_gathered()
    }

    fn send_gathered(&mut self) -> io::Result<()> {
        let _stall = self.share.wait_for(Side::Sending);
        let outcome = self.outgoing.write_all(&self.gathered);
        self.gathered.clear();
        outcome
    }
}

/// A request that was let in. It is answered once; dropped without an answer it fails.
pub(super) struct Ticket {
    replies: Arc<Replies>,
    cookie: u64,
    weight: Weight,
    is_answered: bool,
}

impl Ticket {
    fn answer(&mut self, head: Vec<u8>, data: Vec<u8>) {
        self.is_answered = true;
        self.replies.push(Reply { head, data, weight: self.weight });
    }

    /// It never came whole: nobody waits for an answer, least of all for an error where the client will ask anew.
    pub(super) fn forget(mut self) {
        self.is_answered = true;
        self.replies.settle(VecDeque::from([Reply { head: Vec::new(), data: Vec::new(), weight: self.weight }]));
    }

    /// It is done.
    pub(super) fn done(mut self) {
        self.answer(reply::simple(0, self.cookie), Vec::new());
    }

    /// It failed.
    pub(super) fn fail(mut self, errno: u32, reason: &str) {
        self.answer_failure(errno, reason);
    }

    fn answer_failure(&mut self, errno: u32, reason: &str) {
        let head = if self.replies.is_structured {
            reply::failure(self.cookie, errno, reason)
        } else {
            reply::simple(errno, self.cookie)
        };
        self.answer(head, Vec::new());
    }

    /// It read this from `offset` on.
    pub(super) fn data(mut self, offset: u64, data: Vec<u8>) {
        let (cookie, length) = (self.cookie, data.len());
        if !self.replies.is_structured {
            self.answer(reply::simple(0, cookie), data);
        } else if length == 0 {
            self.answer(reply::nothing(cookie), data);
        } else if is_zero(&data) {
            self.answer(reply::hole(cookie, offset, length as u32), Vec::new());
        } else {
            self.answer(reply::data_head(cookie, offset, length), data);
        }
    }

    /// It found these extents: lengths and states.
    pub(super) fn states(mut self, context: u32, extents: &[(u32, u32)]) {
        self.answer(reply::status(self.cookie, context, extents), Vec::new());
    }

    /// Wakes the sending thread once this is answered: for answers from threads other than the reading one.
    pub(super) fn elsewhere(self, answer: impl FnOnce(Ticket)) {
        let replies = Arc::clone(&self.replies);
        answer(self);
        replies.waiting.notify_one();
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.is_answered {
            self.answer_failure(libc::EIO as u32, "the request was given up");
            self.replies.waiting.notify_one();
        }
    }
}

/// Whether there is nothing but zeros: compared as memory, page by page.
fn is_zero(data: &[u8]) -> bool {
    static ZEROS: [u8; 4096] = [0; 4096];
    data.chunks(ZEROS.len()).all(|part| part == &ZEROS[..part.len()])
}
