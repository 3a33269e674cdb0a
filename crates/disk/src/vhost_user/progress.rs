//! How far a running ring has come: what it took from the driver, what is under way, what the driver was told.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vm_memory::GuestMemoryError;

use super::QUEUES_MAX;
use super::inflight::InflightQueue;
use super::memory::Memory;
use super::pending::PendingCompletions;
use super::split::Split;
use crate::Epoch;
use crate::engine::workers::QUEUE_MAX;

/// Bytes of data that a ring's waiting requests may hold: more is not taken from the driver until some are done.
pub(super) const WAITING_BYTES_MAX: u64 = 64 << 20;

/// Requests of a ring that may wait: those of all rings together find room in the disk's queues, so that no ring's
/// thread ever waits for that.
pub(super) const WAITING_MAX: usize = QUEUE_MAX / QUEUES_MAX as usize;

/// Why a ring cannot go on: the driver broke it, and only its reset helps.
#[derive(Debug, thiserror::Error)]
pub(super) enum RingError {
    #[error("the ring lies outside guest memory: {0}")]
    Memory(#[from] GuestMemoryError),
    #[error("the ring's parts are not within guest memory, or not aligned")]
    Layout,
    #[error("the driver made {ahead} requests available on a ring of {size}")]
    Ahead { ahead: u16, size: u16 },
    #[error("the driver names descriptor {head} of {size}")]
    Head { head: u16, size: u16 },
    #[error("the area of requests in flight has no room for this ring")]
    Inflight,
    #[error("the driver made descriptor {head} available while it was under way")]
    Twice { head: u16 },
}

/// A request that the disk does in its own time.
struct Waiting {
    status_address: u64,
    bytes: u64,
}

/// A running ring's counters and what it needs to move them.
pub(super) struct Progress {
    split: Split,
    memory: Arc<Memory>,
    inflight: Option<InflightQueue>,
    next_available: u16,
    next_used: u16,
    /// The used index when the driver was last asked whether it wants a call; none before the first time.
    asked_at: Option<u16>,
    counter: u64,
    /// Heads that an earlier process had begun.
    resubmit: VecDeque<u16>,
    given_up: Vec<u16>,
    gives_up: bool,
    under_way: Vec<bool>,
    outstanding: usize,
    /// How many of the last requests taken came from the available ring: the last ones.
    taken_available: u16,
    waiting: HashMap<u16, Waiting>,
    waiting_bytes: u64,
    held: PendingCompletions,
}

impl Progress {
    /// Goes on where the ring stood: at `base`, or where requests in flight tell.
    pub(super) fn begin(
        split: Split,
        memory: Arc<Memory>,
        base: u16,
        inflight: Option<InflightQueue>,
    ) -> Result<Progress, RingError> {
        if !split.is_within(&memory) {
            return Err(RingError::Layout);
        }
        let next_used = split.used_index(&memory)?;
        let mut progress = Progress {
            split,
            memory,
            inflight,
            next_available: base,
            next_used,
            asked_at: None,
            counter: 0,
            resubmit: VecDeque::new(),
            given_up: Vec::new(),
            gives_up: false,
            under_way: vec![false; usize::from(split.size)],
            outstanding: 0,
            taken_available: 0,
            waiting: HashMap::new(),
            waiting_bytes: 0,
            held: PendingCompletions::default(),
        };
        let recovered = progress.inflight.as_ref().and_then(|inflight| inflight.recover(next_used));
        if let Some(recovered) = recovered {
            // Whoever died had taken all that it told of and all that is in flight.
            progress.next_available = next_used.wrapping_add(recovered.heads.len() as u16);
            progress.counter = recovered.counter;
            progress.resubmit = recovered.heads.into();
        }
        Ok(progress)
    }

    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub(super) fn split(&self) -> &Split {
        &self.split
    }

    /// Takes other memory, or other addresses in it, without a stop.
    pub(super) fn move_to(&mut self, split: Split, memory: Arc<Memory>) -> Result<(), RingError> {
        if !split.is_within(&memory) {
            return Err(RingError::Layout);
        }
        (self.split, self.memory) = (split, memory);
        Ok(())
    }

    /// Whether waiting requests hold so much that none is taken.
    pub(super) fn is_full(&self) -> bool {
        self.waiting_bytes >= WAITING_BYTES_MAX || self.waiting.len() >= WAITING_MAX
    }

    /// Whether a record of what is in flight outlives this process.
    pub(super) fn is_tracked(&self) -> bool {
        self.inflight.is_some()
    }

    /// Requests that the disk does in its own time.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests that the driver was not told of.
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// The available index at which another process would go on.
    pub(super) fn base(&self) -> u16 {
        self.next_available
    }

    /// Requests that were taken before this life, and are not begun in it.
    pub(super) fn taken_before(&self) -> usize {
        self.resubmit.len()
    }

    /// Takes up to `limit` of them, marked as in flight.
    pub(super) fn take_again(&mut self, heads: &mut Vec<u16>, limit: usize) -> Result<(), RingError> {
        heads.clear();
        self.taken_available = 0;
        while heads.len() < limit {
            let Some(head) = self.resubmit.pop_front() else { break };
            self.mark(head)?;
            heads.push(head);
        }
        Ok(())
    }

    /// Whether they are given up, and what is postponed from now on as well.
    pub(super) fn gives_up(&self) -> bool {
        self.gives_up
    }

    /// Gives up all of them: nobody takes them any more, and they want an answer.
    pub(super) fn give_up_taken_before(&mut self) {
        self.gives_up = true;
        while let Some(head) = self.resubmit.pop_front() {
            // What cannot be marked is no request of this ring.
            if self.mark(head).is_ok() {
                self.given_up.push(head);
            }
        }
    }

    /// Those that were given up.
    pub(super) fn given_up(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.given_up)
    }

    /// Takes up to `limit` requests, marked as in flight. When there is none, the driver's kick is asked for.
    pub(super) fn take(&mut self, heads: &mut Vec<u16>, limit: usize) -> Result<(), RingError> {
        self.take_again(heads, limit)?;
        if self.take_available(heads, limit)? == 0 && heads.is_empty() {
            self.split.want_kick(&self.memory, self.next_available)?;
            // The wish must be seen before the index is read again: a request in between is found here, or kicks.
            fence(Ordering::SeqCst);
            self.take_available(heads, limit)?;
        }
        if !heads.is_empty() {
            self.split.want_no_kick(&self.memory)?;
        }
        Ok(())
    }

    fn take_available(&mut self, heads: &mut Vec<u16>, limit: usize) -> Result<u16, RingError> {
        let ahead = self.split.available_index(&self.memory)?.wrapping_sub(self.next_available);
        if ahead > self.split.size {
            return Err(RingError::Ahead { ahead, size: self.split.size });
        }
        let count = ahead.min(limit.saturating_sub(heads.len()) as u16);
        for _ in 0..count {
            let head = self.split.available_head(&self.memory, self.next_available)?;
            self.mark(head)?;
            self.next_available = self.next_available.wrapping_add(1);
            heads.push(head);
            self.taken_available += 1;
        }
        Ok(count)
    }

    fn mark(&mut self, head: u16) -> Result<(), RingError> {
        let size = self.split.size;
        match self.under_way.get_mut(usize::from(head)) {
            None => return Err(RingError::Head { head, size }),
            Some(true) => return Err(RingError::Twice { head }),
            Some(mark) => *mark = true,
        }
        self.outstanding += 1;
        if let Some(inflight) = &self.inflight {
            inflight.begin(head, self.counter);
        }
        self.counter = self.counter.wrapping_add(1);
        Ok(())
    }

    /// Gives back the last requests taken, of which none was begun: they are taken again later.
    pub(super) fn postpone(&mut self, heads: &[u16]) {
        for head in heads.iter().rev() {
            self.under_way[usize::from(*head)] = false;
            self.outstanding -= 1;
            if self.taken_available > 0 {
                self.taken_available -= 1;
                self.next_available = self.next_available.wrapping_sub(1);
                if let Some(inflight) = &self.inflight {
                    inflight.forget(*head);
                }
            } else {
                self.resubmit.push_front(*head);
            }
        }
    }

    /// A request goes to the disk's own workers.
    pub(super) fn wait_for(&mut self, head: u16, status_address: u64, bytes: u64) {
        self.waiting.insert(head, Waiting { status_address, bytes });
        self.waiting_bytes += bytes;
    }

    /// A waiting request is done.
    pub(super) fn waited_for(&mut self, head: u16) {
        if let Some(waiting) = self.waiting.remove(&head) {
            self.waiting_bytes -= waiting.bytes;
        }
    }

    /// Requests that wait still, with the places of their answers: they are given up.
    pub(super) fn give_up(&mut self) -> Vec<(u16, u64)> {
        self.waiting_bytes = 0;
        self.waiting.drain().map(|(head, waiting)| (head, waiting.status_address)).collect()
    }

    /// Keeps an answer back until an epoch is released.
    pub(super) fn hold(&mut self, epoch: Epoch, head: u16, length: u32) {
        self.held.keep(epoch, head, length);
    }

    /// Answers that were kept back for epochs up to this one, or all.
    pub(super) fn let_go(&mut self, upto: Option<Epoch>) -> Vec<(u16, u32)> {
        self.held.let_go(upto)
    }

    /// Answers kept back.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// Tells the driver of finished requests, all at once; says whether it wants a call for them.
    pub(super) fn tell(&mut self, batch: &[(u16, u32)]) -> Result<bool, RingError> {
        if batch.is_empty() {
            return Ok(false);
        }
        for (place, entry) in batch.iter().enumerate() {
            self.split.put_used(&self.memory, self.next_used.wrapping_add(place as u16), *entry)?;
            if let Some(inflight) = &self.inflight {
                inflight.link(entry.0);
            }
        }
        self.next_used = self.next_used.wrapping_add(batch.len() as u16);
        self.split.set_used_index(&self.memory, self.next_used)?;
        if let Some(inflight) = &self.inflight {
            inflight.told(batch.iter().map(|(head, _)| *head), self.next_used);
        }
        for (head, _) in batch {
            self.under_way[usize::from(*head)] = false;
        }
        self.outstanding -= batch.len();
        // The used index must be seen before the driver's wish is read, as the driver does it the other way round.
        fence(Ordering::SeqCst);
        let asked_at = self.asked_at.replace(self.next_used);
        match asked_at {
            Some(old) => Ok(self.split.driver_wants_call(&self.memory, old, self.next_used)?),
            None => Ok(true),
        }
    }
}

/// Calls the driver.
pub(super) fn call(descriptor: Option<&Arc<File>>) {
    if let Some(file) = descriptor {
        // A full counter means that the driver has a call before it already.
        let _ = rustix::io::write(file, &1_u64.to_ne_bytes());
    }
}
