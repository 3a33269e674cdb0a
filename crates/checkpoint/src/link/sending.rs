//! The side whose machine travels.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use super::frame::{self, Kind, MESSAGE_BYTES_MAX};
use super::incoming::Incoming;
use super::outgoing::{Data, Outgoing};
use super::{Beating, HEARTBEAT, LinkError, Pace, Session};
use crate::delta::{Counts, Different, Encoder, Epoch, HeldEpoch, Known, Sizes};

/// Fewer bytes say nothing of a link's rate: sockets take them as they are.
const RATED_BYTES_MIN: u64 = 8 << 20;

/// How an epoch went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// What the other side holds now.
    pub held: HeldEpoch,
    /// Pieces and bytes of the epoch.
    pub counts: Counts,
    /// Pieces that differed there and were sent again, with their bytes.
    pub repaired: Counts,
    /// Bytes a second that the connection took, as far as it was what held the encoder up; none: it was not, or there
    /// were too few.
    pub link_bytes_per_second: Option<u64>,
}

/// A connection to the side that receives.
pub struct Sending<R, W> {
    sizes: Sizes,
    incoming: Incoming<R>,
    outgoing: Outgoing<W>,
    _beating: Beating,
    /// What the other side said while something else was awaited.
    message: Option<Vec<u8>>,
}

impl<R: Read, W: Write + Send + 'static> Sending<R, W> {
    /// Begins a session, or goes on with it over a new connection. What the other side holds is for
    /// [`Encoder::resume`]. It has `answer_timeout` for each answer, also when it shows that it lives.
    ///
    /// # Errors
    /// [`LinkError::Refused`]: the other side does not want it; [`LinkError::Unanswered`].
    pub fn begin(
        session: Session,
        sizes: Sizes,
        from: R,
        to: W,
        pace: Arc<Pace>,
        answer_timeout: Duration,
    ) -> Result<(Sending<R, W>, HeldEpoch), LinkError> {
        let outgoing = Outgoing::new(to, session, pace);
        let mut incoming = Incoming::new(from, session, Some(answer_timeout));
        outgoing.frame(Kind::Hello, 0, &frame::hello(&sizes))?;
        let beating = Beating::begin(outgoing.clone(), HEARTBEAT)?;
        let welcome = incoming.next()?;
        if welcome.kind != Kind::Welcome {
            return Err(LinkError::malformed(format!("a frame {:?} in the place of a welcome", welcome.kind)));
        }
        let held = frame::parse_held(&welcome.payload)?;
        Ok((Sending { sizes, incoming, outgoing, _beating: beating, message: None }, held))
    }

    /// Sends an epoch, and again what of it differs there, and waits until it is acknowledged.
    ///
    /// # Errors
    /// After any the connection is of no use any more. What the other side holds is told at the beginning of the next
    /// one.
    pub fn epoch(
        &mut self,
        encoder: &mut Encoder,
        epoch: &Epoch<'_>,
        known: &mut dyn Known,
    ) -> Result<Sent, LinkError> {
        let mut data = self.outgoing.data(epoch.number);
        let encoded = encoder.encode(epoch, known, &mut data).map_err(LinkError::from);
        let link_bytes_per_second = rate(&data);
        let counts = encoded.map_err(|error| self.why(error))?;
        let mut repaired = Counts::default();
        loop {
            let answer = self.incoming.next()?;
            match answer.kind {
                Kind::Acknowledged if answer.epoch == epoch.number => {
                    let held = frame::parse_held(&answer.payload)?;
                    encoder.acknowledge(held)?;
                    return Ok(Sent { held, counts, repaired, link_bytes_per_second });
                }
                Kind::Different if answer.epoch == epoch.number && repaired.bytes == 0 => {
                    let different = self.different(answer)?;
                    let mut data = self.outgoing.data(epoch.number);
                    repaired = encoder.repair(epoch, &different, &mut data)?;
                }
                Kind::Message if self.message.is_none() => self.message = Some(answer.payload),
                kind => {
                    let what = format!("a frame {kind:?} of epoch {} in the place of an answer", answer.epoch);
                    return Err(LinkError::malformed(what));
                }
            }
        }
    }

    /// Of a connection that broke while an epoch was written: the other side may have said why.
    fn why(&mut self, error: LinkError) -> LinkError {
        match error {
            LinkError::Connection(_) => match self.incoming.next() {
                Err(refused @ LinkError::Refused { .. }) => refused,
                _ => error,
            },
            _ => error,
        }
    }

    fn different(&mut self, first: frame::Frame) -> Result<Different, LinkError> {
        let mut different = Different::default();
        let mut is_last = frame::parse_different(&first.payload, &self.sizes, &mut different)?;
        while !is_last {
            let next = self.incoming.next()?;
            if next.kind != Kind::Different || next.epoch != first.epoch {
                return Err(LinkError::malformed(format!("a frame {:?} amid what differs", next.kind)));
            }
            is_last = frame::parse_different(&next.payload, &self.sizes, &mut different)?;
        }
        Ok(different)
    }

    /// Says something to the other side, at most [`MESSAGE_BYTES_MAX`].
    ///
    /// # Errors
    /// It is too long, or the connection broke.
    pub fn say(&mut self, message: &[u8]) -> Result<(), LinkError> {
        say(&self.outgoing, message)
    }

    /// Waits for what the other side says.
    ///
    /// # Errors
    /// It says something else, or nothing for too long, or the connection broke.
    pub fn hear(&mut self) -> Result<Vec<u8>, LinkError> {
        if let Some(message) = self.message.take() {
            return Ok(message);
        }
        let frame = self.incoming.next()?;
        match frame.kind {
            Kind::Message => Ok(frame.payload),
            kind => Err(LinkError::malformed(format!("a frame {kind:?} in the place of a message"))),
        }
    }

    /// Tells the other side why this one gives up.
    ///
    /// # Errors
    /// The connection broke.
    pub fn fail(self, reason: &str) -> Result<(), LinkError> {
        self.outgoing.frame(Kind::Failed, 0, frame::reason(reason))
    }
}

/// How fast the connection took what it was given.
fn rate<W>(data: &Data<'_, W>) -> Option<u64> {
    let is_known = data.bytes >= RATED_BYTES_MIN && data.waited > Duration::ZERO;
    is_known.then(|| (data.bytes as f64 / data.waited.as_secs_f64()) as u64)
}

pub(super) fn say<W: Write>(outgoing: &Outgoing<W>, message: &[u8]) -> Result<(), LinkError> {
    if message.len() > MESSAGE_BYTES_MAX {
        let what = format!("a message of {} bytes is too long", message.len());
        return Err(LinkError::Connection(std::io::Error::new(std::io::ErrorKind::InvalidInput, what)));
    }
    outgoing.frame(Kind::Message, 0, message)
}
