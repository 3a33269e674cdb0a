//! Messages that pass in parts, in either direction: nobody has them whole.
//!
//! They can be passed once. What ends in the middle of one takes its connection with it: to a server's half message
//! nothing can be added for the client, and a server that has had half a message of the client's waits for the rest.

use super::{Relay, RelayError, STREAM_BYTES_MAX};
use crate::wire::{InParts, Reply};

/// Bytes of a batch that are read before it runs; the rest of a longer one follows in the same transaction.
pub const BATCH_BYTES_MAX: usize = 4 << 20;

/// What of a client's messages passes in parts: parameters that are longer than a batch that can be run again, and the
/// data of COPY.
pub const FROM_CLIENT_IN_PARTS: InParts = &[(b'B', BATCH_BYTES_MAX), (b'd', STREAM_BYTES_MAX)];

/// What of a server's answers to a client's statement passes in parts: rows, and the data of COPY.
pub(super) const FROM_SERVER_IN_PARTS: InParts = &[(b'D', STREAM_BYTES_MAX), (b'd', STREAM_BYTES_MAX)];

impl Relay<'_> {
    /// Sends what of the request is still with the client, and its end.
    pub(super) async fn finish_request(&mut self) -> Result<(), RelayError> {
        (self.streams, self.went_out, self.start) = (true, true, 0);
        let passed = self.pass_rest().await;
        self.streams = false;
        if matches!(passed, Err(RelayError::Client(_))) {
            return passed;
        }
        if passed.is_ok() {
            self.backend.channel.output.message(b'S', b"");
        }
        // A message of which half has gone out could not be taken back.
        self.flush_client().await?;
        passed
    }

    /// The rest of a message of which the first part was given.
    pub(super) async fn give_rest(&mut self) -> Result<(), RelayError> {
        if self.backend.channel.rest() == 0 {
            return Ok(());
        }
        while self.backend.channel.rest() > 0 {
            let moved = match self.backend.channel.buffered_part() {
                Some(part) => self.give_bytes(&part).await,
                None => self.wait().await,
            };
            match moved {
                Err(RelayError::Client(_)) | Ok(()) => moved?,
                // What has gone out of it cannot be taken back, and nothing can be said in the middle of it.
                Err(error) if self.went_out => {
                    return Err(RelayError::Client(std::io::Error::other(error.to_string()).into()));
                }
                Err(error) => return Err(error),
            }
        }
        // A message of which half has gone out could not be taken back.
        if self.went_out && !self.streams { self.flush_client().await } else { Ok(()) }
    }

    /// Sends the rest of the client's message, of which the server has had the first part, whatever it says meanwhile.
    pub(super) async fn pass_rest(&mut self) -> Result<(), RelayError> {
        while self.client.rest() > 0 {
            self.give_own_answers();
            while let Some(frame) = self.backend.channel.buffered_frame().map_err(RelayError::Server)? {
                Box::pin(self.take(frame)).await?;
            }
            while self.backend.channel.unwritten() < STREAM_BYTES_MAX {
                let Some(part) = self.client.buffered_part() else { break };
                self.backend.channel.put(&part);
            }
            self.flow(self.client.rest() > 0).await?;
        }
        Ok(())
    }
}
