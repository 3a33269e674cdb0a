//! COPY FROM STDIN: the client's data goes to the server while what the server says goes to the client.

use std::io::ErrorKind;

use bytes::BufMut;

use super::{Expected, Relay, RelayError, STREAM_BYTES_MAX};
use crate::wire::{ChannelError, Frame, Reply};

impl Relay<'_> {
    /// COPY FROM STDIN: the client's data goes to the server until either ends it. Whatever the server says meanwhile
    /// goes to the client at the same time: a server whose notices nobody takes would take no data.
    pub(super) async fn copy_in(&mut self, frame: Frame) -> Result<(), RelayError> {
        // What the batch goes on with is no data. A server ends such a session, and does not see all of it here.
        let ends_batch = matches!(self.expected.get(1), None | Some(Expected::Sync));
        if self.client.rest() > 0 || self.is_followed || self.extended && !ends_batch {
            return Err(unexpected_in_copy());
        }
        (self.streams, self.went_out, self.start) = (true, true, 0);
        self.began_copy = true;
        self.backend.channel.in_parts = &[];
        let copied = match self.give(&frame).await {
            Ok(()) => self.copy().await,
            Err(error) => Err(error),
        };
        self.streams = false;
        if matches!(copied, Err(RelayError::Client(_))) {
            return copied;
        }
        // A message of which half has gone out could not be taken back.
        self.flush_client().await?;
        copied
    }

    async fn copy(&mut self) -> Result<(), RelayError> {
        loop {
            while let Some(frame) = self.backend.channel.buffered_frame().map_err(RelayError::Server)? {
                let failed = frame.tag == b'E';
                if failed && self.extended {
                    self.take_error(frame).await?;
                    self.pass_rest().await?;
                    return self.finish_copy().await;
                }
                Box::pin(self.take(frame)).await?;
                if failed {
                    return self.pass_rest().await;
                }
            }
            while self.backend.channel.unwritten() < STREAM_BYTES_MAX {
                if self.client.rest() > 0 {
                    let Some(part) = self.client.buffered_part() else { break };
                    self.backend.channel.put(&part);
                    continue;
                }
                let Some(frame) = self.client.buffered_frame().map_err(RelayError::Client)? else { break };
                match frame.tag {
                    b'd' => self.backend.channel.put(&frame.bytes),
                    b'c' | b'f' => {
                        self.backend.channel.put(&frame.bytes);
                        if !self.extended {
                            return Ok(());
                        }
                        // The server says what has become of it before it is asked for more.
                        self.backend.channel.output.message(b'H', b"");
                        return self.finish_copy().await;
                    }
                    // The server ignores these during COPY as well.
                    b'H' | b'S' => {}
                    _ => return Err(unexpected_in_copy()),
                }
            }
            self.flow(true).await?;
        }
    }

    /// COPY in the extended protocol is over, or has failed. The server has ignored the `Sync` that was sent with it,
    /// or not, depending on when it failed; the client sends another. After that an empty query marks where all is
    /// over. What a client sends up to its `Sync` a server skips where COPY has failed, and runs in the same
    /// transaction where it has not: that is refused.
    async fn finish_copy(&mut self) -> Result<(), RelayError> {
        let mut marker = Marker::NotSent;
        let has_ended = !matches!(self.expected.front(), Some(Expected::Execute));
        let mut is_decided = has_ended || self.relayed.error.is_some();
        loop {
            while let Some(frame) = self.backend.channel.buffered_frame().map_err(RelayError::Server)? {
                match frame.tag {
                    b'I' => marker = Marker::Passed,
                    b'Z' if marker == Marker::Passed => {
                        self.note_status(&frame);
                        self.expected.clear();
                        return Ok(());
                    }
                    b'Z' => {}
                    b'E' => {
                        is_decided = true;
                        self.take_error(frame).await?;
                    }
                    tag => {
                        is_decided |= tag == b'C';
                        self.note_parameter(&frame)?;
                        self.give(&frame).await?;
                    }
                }
            }
            while is_decided && marker == Marker::NotSent {
                let Some(frame) = self.client.buffered_frame().map_err(RelayError::Client)? else { break };
                match frame.tag {
                    b'S' => {
                        self.took_sync = true;
                        self.backend.channel.output.put_slice(&frame.bytes);
                        self.backend.channel.output.query("");
                        self.backend.prepared.unnamed = None;
                        marker = Marker::Sent;
                    }
                    b'd' | b'c' | b'f' | b'H' => {}
                    b'X' => return Err(RelayError::Client(std::io::Error::from(ErrorKind::UnexpectedEof).into())),
                    _ if self.relayed.error.is_some() => {}
                    _ => {
                        return Err(RelayError::Client(ChannelError::Unexpected(
                            "a message follows COPY without Sync",
                        )));
                    }
                }
            }
            self.flow(is_decided && marker == Marker::NotSent).await?;
        }
    }
}

/// The empty query that marks where an extended COPY is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Marker {
    NotSent,
    Sent,
    Passed,
}

fn unexpected_in_copy() -> RelayError {
    RelayError::Client(ChannelError::Unexpected("unexpected message during COPY"))
}
