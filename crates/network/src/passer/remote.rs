//! What others ask of the loop, in its thread.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use super::{Passer, Statistics};
use crate::NetworkError;

/// Requests that may wait; each is answered within one turn of the loop.
pub(super) const REQUESTS_MAX: usize = 16;

/// What is asked of the loop.
pub(super) type Request = Box<dyn FnOnce(&mut Passer) + Send>;

/// Asks a [`Passer`] in its thread.
#[derive(Clone)]
pub struct Remote {
    pub(super) requests: SyncSender<Request>,
    pub(super) wake: Arc<OwnedFd>,
}

impl Remote {
    /// Lets the loop do something between two frames, and waits for what it says.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        what: impl FnOnce(&mut Passer) -> T + Send + 'static,
    ) -> Result<T, NetworkError> {
        let (sender, answer) = sync_channel(1);
        let request: Request = Box::new(move |passer| {
            let _ = sender.try_send(what(passer));
        });
        match self.requests.try_send(request) {
            Ok(()) => {}
            Err(TrySendError::Full(request)) => self.requests.send(request).map_err(|_| NetworkError::Ended)?,
            Err(TrySendError::Disconnected(_)) => return Err(NetworkError::Ended),
        }
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        answer.recv().map_err(|_| NetworkError::Ended)
    }

    /// Holds what the machine sends from now on, or holds nothing any more: then all that is held goes.
    ///
    /// # Errors
    /// [`NetworkError::Io`]: there is no memory; [`NetworkError::Ended`].
    pub fn set_holding(&self, is_wanted: bool) -> Result<(), NetworkError> {
        self.ask(move |passer| passer.set_holding(is_wanted))?
    }

    /// Takes all that a machine has sent that stands, up to the end of a frame.
    ///
    /// # Errors
    /// [`NetworkError::NoFrameBorder`], [`NetworkError::DrainTooLong`], [`NetworkError::Ended`].
    pub fn drain(&self) -> Result<(), NetworkError> {
        self.ask(Passer::drain)?
    }

    /// Ends the open epoch: what came before is of it, what comes now of the next one. Its number.
    ///
    /// # Errors
    /// [`NetworkError::Ended`].
    pub fn cut(&self) -> Result<u64, NetworkError> {
        self.ask(|passer| passer.state.cut())
    }

    /// Lets the frames of all epochs up to this one go, in their order.
    ///
    /// # Errors
    /// [`NetworkError::OpenEpoch`], [`NetworkError::Ended`].
    pub fn release(&self, epoch: u64) -> Result<(), NetworkError> {
        self.ask(move |passer| passer.release(epoch))?
    }

    /// Tells the network that these addresses are at the machine's card, past all that is held.
    ///
    /// # Errors
    /// [`NetworkError::Ended`].
    pub fn announce(&self, addresses: Vec<IpAddr>) -> Result<(), NetworkError> {
        self.ask(move |passer| passer.announce(&addresses))
    }

    /// What has passed so far.
    ///
    /// # Errors
    /// [`NetworkError::Ended`].
    pub fn statistics(&self) -> Result<Statistics, NetworkError> {
        self.ask(|passer| passer.statistics())
    }
}
