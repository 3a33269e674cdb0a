//! One connection's requests, kept over its breaks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::image::FileNumber;
use crate::network::protocol::{Lane as Kind, Payload, ReadFailure, ReadRequest};

/// An answer, or why there is none.
pub(super) type Answer = Result<Payload, (ReadFailure, String)>;

/// What is asked for over one connection. As many requests wait as threads ask, a few for each: whoever asks waits for
/// the answers.
#[derive(Debug)]
pub(super) struct Lane {
    pub kind: Kind,
    /// Told when something is to be sent.
    pub work: Notify,
    requests: Mutex<Requests>,
}

#[derive(Debug, Default)]
struct Requests {
    pending: BTreeMap<u64, Pending>,
    unsent: VecDeque<u64>,
    next_id: u64,
    /// No more answers will come, for this reason.
    closed: Option<String>,
}

#[derive(Debug)]
struct Pending {
    request: ReadRequest,
    asked_at: Instant,
    answer: Sender<Answer>,
}

impl Lane {
    pub fn new(kind: Kind) -> Lane {
        Lane { kind, work: Notify::new(), requests: Mutex::default() }
    }

    /// Asks; the answer comes whatever happens to connections in between, or the lane is closed.
    pub fn ask(&self, file: FileNumber, offset_bytes: u64, length_bytes: u32) -> Receiver<Answer> {
        let (answer, receiver) = channel();
        let mut requests = self.lock();
        if let Some(reason) = &requests.closed {
            // The receiver is there.
            let _ = answer.send(Err((ReadFailure::Lost, reason.clone())));
            return receiver;
        }
        let id = requests.next_id;
        requests.next_id += 1;
        let request = ReadRequest { id, file, offset_bytes, length_bytes };
        requests.pending.insert(id, Pending { request, asked_at: Instant::now(), answer });
        requests.unsent.push_back(id);
        drop(requests);
        self.work.notify_one();
        receiver
    }

    /// A new connection: everything unanswered is to be sent, in its order.
    pub fn begin_again(&self) {
        let mut requests = self.lock();
        requests.unsent = requests.pending.keys().copied().collect();
    }

    /// What is to be sent.
    pub fn take_unsent(&self) -> Vec<ReadRequest> {
        let mut requests = self.lock();
        let ids = std::mem::take(&mut requests.unsent);
        ids.iter().filter_map(|id| requests.pending.get(id).map(|pending| pending.request)).collect()
    }

    /// Hands an answer to who waits for it. One that nobody waits for came twice, or too late.
    pub fn answer(&self, id: u64, answer: Answer) {
        if let Some(pending) = self.lock().pending.remove(&id) {
            let _ = pending.answer.send(answer);
        }
    }

    /// For how long the oldest request has waited.
    pub fn unanswered_for(&self) -> Duration {
        self.lock().pending.first_key_value().map_or(Duration::ZERO, |(_, pending)| pending.asked_at.elapsed())
    }

    /// No more answers will come.
    pub fn close(&self, reason: &str) {
        let mut requests = self.lock();
        requests.closed.get_or_insert_with(|| reason.to_owned());
        for pending in std::mem::take(&mut requests.pending).into_values() {
            let _ = pending.answer.send(Err((ReadFailure::Lost, reason.to_owned())));
        }
        drop(requests);
        self.work.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unanswered_is_sent_again_and_answered_once() {
        let lane = Lane::new(Kind::Demand);
        let answers: Vec<_> = (0..3).map(|file| lane.ask(FileNumber(file), 0, 8192)).collect();
        let ids = |requests: Vec<ReadRequest>| requests.iter().map(|request| request.id).collect::<Vec<_>>();
        assert_eq!(ids(lane.take_unsent()), [0, 1, 2]);
        assert!(lane.take_unsent().is_empty());
        let payload = Payload::pack(&[0; 8192]);
        lane.answer(1, Ok(payload.clone()));
        lane.answer(1, Err((ReadFailure::Io, "late".to_owned())));
        assert_eq!(answers[1].try_recv().unwrap(), Ok(payload));
        let fourth = lane.ask(FileNumber(3), 0, 8192);
        lane.begin_again();
        assert_eq!(ids(lane.take_unsent()), [0, 2, 3]);
        lane.close("the lease is over");
        for answer in [&answers[0], &answers[2], &fourth, &lane.ask(FileNumber(0), 0, 1)] {
            assert_eq!(answer.try_recv().unwrap(), Err((ReadFailure::Lost, "the lease is over".to_owned())));
        }
        assert!(lane.take_unsent().is_empty());
    }
}
