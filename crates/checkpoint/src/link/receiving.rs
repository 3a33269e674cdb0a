//! The side that a machine travels to.

use std::io::{Read, Write};
use std::sync::Arc;

use super::frame::{self, Kind};
use super::incoming::Incoming;
use super::outgoing::Outgoing;
use super::sending::say;
use super::{Beating, HEARTBEAT, LinkError, Pace, Session};
use crate::delta::{Blocks, Decoded, Decoder, Destination, HeldEpoch, Sizes};

/// What has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// An epoch, whole. It counts for the sender once [`Receiving::acknowledge`] has said so: the caller makes it last
    /// before.
    Epoch(HeldEpoch),
    /// Something of the caller's on the other side.
    Message(Vec<u8>),
}

/// Tells the other side why this one gives up, whatever has become of [`Receiving`].
pub struct FailureSender<W>(Outgoing<W>);

impl<W: Write> FailureSender<W> {
    /// Tells it.
    ///
    /// # Errors
    /// The connection broke.
    pub fn fail(&self, reason: &str) -> Result<(), LinkError> {
        self.0.frame(Kind::Failed, 0, frame::reason(reason))
    }
}

/// A connection from the side that sends.
pub struct Receiving<R, W> {
    session: Session,
    sizes: Sizes,
    incoming: Incoming<R>,
    outgoing: Outgoing<W>,
    _beating: Beating,
    /// The epoch that is whole and not acknowledged.
    unacknowledged: Option<HeldEpoch>,
}

impl<R: Read, W: Write + Send + 'static> Receiving<R, W> {
    /// Reads who begins. [`Receiving::welcome`] or [`FailureSender::fail`] follows.
    ///
    /// # Errors
    /// The bytes are no beginning.
    pub fn accept(mut from: R, to: W) -> Result<Receiving<R, W>, LinkError> {
        let hello = frame::read(&mut from)?;
        if hello.kind != Kind::Hello {
            return Err(LinkError::malformed(format!("a frame {:?} in the place of a hello", hello.kind)));
        }
        let sizes = frame::parse_hello(&hello.payload)?;
        let outgoing = Outgoing::new(to, hello.session, Arc::new(Pace::new(None)));
        let beating = Beating::begin(outgoing.clone(), HEARTBEAT)?;
        let incoming = Incoming::new(from, hello.session, None);
        Ok(Receiving { session: hello.session, sizes, incoming, outgoing, _beating: beating, unacknowledged: None })
    }

    /// The session that the other side begins, or goes on with.
    pub fn session(&self) -> Session {
        self.session
    }

    /// The machine that it sends.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Goes on from what is held here: [`Decoder::held`] of the session's decoder.
    ///
    /// # Errors
    /// The connection broke.
    pub fn welcome(&mut self, held: HeldEpoch) -> Result<(), LinkError> {
        self.outgoing.frame(Kind::Welcome, held.epoch, &held.to_bytes())
    }

    /// Who tells the other side why this one does not go on.
    pub fn failure_sender(&self) -> FailureSender<W> {
        FailureSender(self.outgoing.clone())
    }

    /// Waits for an epoch, asking again for what differs of it, or for a message.
    ///
    /// # Errors
    /// After any the connection is of no use any more; the decoder holds what it held.
    pub fn receive(
        &mut self,
        decoder: &mut Decoder,
        to: &dyn Destination,
        blocks: &dyn Blocks,
    ) -> Result<Received, LinkError> {
        let mut different = None;
        loop {
            let frame = self.incoming.next()?;
            let epoch = frame.epoch;
            match frame.kind {
                Kind::Message if different.is_none() => return Ok(Received::Message(frame.payload)),
                Kind::Data if self.unacknowledged.is_none() && different.is_none_or(|number| number == epoch) => {}
                kind => return Err(LinkError::malformed(format!("a frame {kind:?} of epoch {epoch} out of order"))),
            }
            self.outgoing.limit_heartbeats();
            let mut data = self.incoming.data(frame);
            let decoded = decoder.decode(&mut data, to, blocks)?;
            data.end()?;
            self.outgoing.unlimit_heartbeats();
            match decoded {
                Decoded::Whole(held) if held.epoch == epoch => {
                    self.unacknowledged = Some(held);
                    return Ok(Received::Epoch(held));
                }
                Decoded::Whole(held) => {
                    return Err(LinkError::malformed(format!("{held:?} in frames of epoch {epoch}")));
                }
                Decoded::Different(what) => {
                    different = Some(epoch);
                    for payload in frame::different(&what) {
                        self.outgoing.frame(Kind::Different, epoch, &payload)?;
                    }
                }
            }
        }
    }

    /// Tells the other side that an epoch lasts here.
    ///
    /// # Errors
    /// It is not the one that came last; the connection broke.
    pub fn acknowledge(&mut self, held: HeldEpoch) -> Result<(), LinkError> {
        if self.unacknowledged.take_if(|own| *own == held).is_none() {
            return Err(LinkError::malformed(format!("{held:?} did not come last")));
        }
        self.outgoing.frame(Kind::Acknowledged, held.epoch, &held.to_bytes())
    }

    /// Says something to the other side.
    ///
    /// # Errors
    /// It is too long, or the connection broke.
    pub fn say(&mut self, message: &[u8]) -> Result<(), LinkError> {
        say(&self.outgoing, message)
    }

    /// Waits for what the other side says.
    ///
    /// # Errors
    /// It sends something else, or nothing for too long, or the connection broke.
    pub fn hear(&mut self) -> Result<Vec<u8>, LinkError> {
        let frame = self.incoming.next()?;
        match frame.kind {
            Kind::Message => Ok(frame.payload),
            kind => Err(LinkError::malformed(format!("a frame {kind:?} in the place of a message"))),
        }
    }
}
