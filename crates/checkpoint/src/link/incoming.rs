//! The direction from which bytes come.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use super::frame::{self, Frame, Kind};
use super::{LinkError, Session};

/// Who reads frames of one session.
pub(super) struct Incoming<R> {
    from: R,
    session: Session,
    /// How long signs of life are taken for an answer.
    answer_timeout: Option<Duration>,
}

impl<R: Read> Incoming<R> {
    pub(super) fn new(from: R, session: Session, answer_timeout: Option<Duration>) -> Incoming<R> {
        Incoming { from, session, answer_timeout }
    }

    /// The next frame that says something.
    pub(super) fn next(&mut self) -> Result<Frame, LinkError> {
        let begun = Instant::now();
        loop {
            let frame = frame::read(&mut self.from)?;
            if frame.session != self.session {
                return Err(LinkError::malformed("a frame of another session"));
            }
            match frame.kind {
                Kind::Heartbeat => match self.answer_timeout {
                    Some(answer_timeout) if begun.elapsed() > answer_timeout => {
                        return Err(LinkError::Unanswered(answer_timeout));
                    }
                    _ => {}
                },
                Kind::Failed => {
                    return Err(LinkError::Refused { reason: String::from_utf8_lossy(&frame.payload).into_owned() });
                }
                _ => return Ok(frame),
            }
        }
    }

    /// The bytes of an epoch, of which this frame is the first.
    pub(super) fn data(&mut self, first: Frame) -> Data<'_, R> {
        Data { epoch: first.epoch, incoming: self, payload: first.payload, at: 0 }
    }
}

/// An epoch being read.
pub(super) struct Data<'a, R> {
    incoming: &'a mut Incoming<R>,
    pub(super) epoch: u64,
    payload: Vec<u8>,
    at: usize,
}

impl<R> Data<'_, R> {
    /// An epoch ends where a frame does.
    pub(super) fn end(self) -> Result<(), LinkError> {
        match self.at == self.payload.len() {
            true => Ok(()),
            false => Err(LinkError::malformed("bytes behind an epoch's end")),
        }
    }
}

impl<R: Read> Read for Data<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.at == self.payload.len() && !into.is_empty() {
            let frame = self.incoming.next()?;
            if frame.kind != Kind::Data || frame.epoch != self.epoch {
                let what = format!("a frame {:?} of epoch {} in the midst of {}", frame.kind, frame.epoch, self.epoch);
                return Err(LinkError::malformed(what).into());
            }
            (self.payload, self.at) = (frame.payload, 0);
        }
        let count = into.len().min(self.payload.len() - self.at);
        into[..count].copy_from_slice(&self.payload[self.at..][..count]);
        self.at += count;
        Ok(count)
    }
}
