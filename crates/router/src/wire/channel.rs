//! A socket with a buffer on each side, read frame by frame.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::Socket;

/// Bytes asked of the kernel at once.
const READ_BYTES: usize = 16 * 1024;

/// A buffer that grew beyond this for one large message is given back afterwards.
const BUFFER_KEEP_BYTES_MAX: usize = 256 * 1024;

/// One whole message: its tag, and its bytes including tag and length.
#[derive(Debug, Clone)]
pub struct Frame {
    /// The message's type.
    pub tag: u8,
    /// Tag, length and body.
    pub bytes: Bytes,
}

impl Frame {
    /// What follows tag and length.
    pub fn body(&self) -> Bytes {
        self.bytes.slice(5..)
    }
}

/// Why no further frame can be read.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// the connection was closed or failed
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// a length that cannot be
    #[error("message {tag:?} claims {length} bytes; from 4 to {length_max} are possible here")]
    Length {
        /// The message's type.
        tag: char,
        /// What its header says.
        length: u32,
        /// The bound in force.
        length_max: usize,
    },
}

/// A buffered connection. Reading is cancel-safe: bytes that arrived stay in the buffer.
#[derive(Debug)]
pub struct Channel {
    socket: Socket,
    input: BytesMut,
    /// What is to be written with the next [`Channel::flush`].
    pub output: BytesMut,
    /// Largest message accepted, in bytes.
    pub message_bytes_max: usize,
    taken: Arc<AtomicU64>,
}

impl Channel {
    /// Wraps `socket`; no message longer than `message_bytes_max` bytes is read from it.
    pub fn new(socket: Socket, message_bytes_max: usize) -> Channel {
        Channel { socket, input: BytesMut::new(), output: BytesMut::new(), message_bytes_max, taken: Arc::default() }
    }

    /// The next frame if it is already here.
    pub fn buffered_frame(&mut self) -> Result<Option<Frame>, ChannelError> {
        if self.input.len() < 5 {
            return Ok(None);
        }
        let tag = self.input[0];
        let length = u32::from_be_bytes([self.input[1], self.input[2], self.input[3], self.input[4]]);
        if length < 4 || length as usize > self.message_bytes_max {
            return Err(ChannelError::Length { tag: tag as char, length, length_max: self.message_bytes_max });
        }
        let total = 1 + length as usize;
        if self.input.len() < total {
            return Ok(None);
        }
        Ok(Some(Frame { tag, bytes: self.input.split_to(total).freeze() }))
    }

    /// The next frame, waited for. A closed connection is an `UnexpectedEof`.
    pub async fn frame(&mut self) -> Result<Frame, ChannelError> {
        loop {
            if let Some(frame) = self.buffered_frame()? {
                return Ok(frame);
            }
            self.fill().await?;
        }
    }

    /// A start-up packet: a length and a body, without tag. Bounded as PostgreSQL bounds it, by 10000 bytes.
    pub async fn startup_packet(&mut self) -> Result<Bytes, ChannelError> {
        const STARTUP_BYTES_MAX: usize = 10_000;
        loop {
            if self.input.len() >= 4 {
                let length = u32::from_be_bytes([self.input[0], self.input[1], self.input[2], self.input[3]]);
                if length < 8 || length as usize > STARTUP_BYTES_MAX {
                    return Err(ChannelError::Length { tag: '-', length, length_max: STARTUP_BYTES_MAX });
                }
                if self.input.len() >= length as usize {
                    let mut packet = self.input.split_to(length as usize).freeze();
                    packet.advance(4);
                    return Ok(packet);
                }
            }
            self.fill().await?;
        }
    }

    /// True when bytes arrived that were not yet taken as frames.
    pub fn has_input(&self) -> bool {
        !self.input.is_empty()
    }

    /// Reads what is there without waiting; an error when the peer has closed.
    pub fn peek(&mut self) -> io::Result<()> {
        let mut bytes = [0_u8; 4096];
        match self.socket.try_read(&mut bytes) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.input.extend_from_slice(&bytes[..count]);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn fill(&mut self) -> io::Result<()> {
        self.input.reserve(READ_BYTES);
        if self.socket.read_buf(&mut self.input).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// The next frame, waited for while `output` is written: a peer that writes before it has read everything is never
    /// waited for in vain.
    pub async fn exchange(&mut self) -> Result<Frame, ChannelError> {
        loop {
            if let Some(frame) = self.buffered_frame()? {
                return Ok(frame);
            }
            std::future::poll_fn(|context| self.poll_flow(context, true)).await?;
        }
    }

    /// Moves what can be moved: writes of `output` and, if `reads`, reads once. Pending when nothing could be.
    pub fn poll_flow(&mut self, context: &mut Context<'_>, reads: bool) -> Poll<io::Result<()>> {
        let written = self.poll_output(context);
        if !reads {
            return written;
        }
        self.input.reserve(READ_BYTES);
        let read = pin!(self.socket.read_buf(&mut self.input));
        match (read.poll(context), written) {
            // A peer that takes nothing any more may have said why before it closed.
            (Poll::Ready(Ok(count)), _) if count > 0 => Poll::Ready(Ok(())),
            (_, Poll::Ready(Err(error))) => Poll::Ready(Err(error)),
            (Poll::Ready(Ok(_)), _) => Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
            (Poll::Ready(Err(error)), _) => Poll::Ready(Err(error)),
            (Poll::Pending, written) => written,
        }
    }

    /// Writes what the socket takes.
    fn poll_output(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut done = false;
        while !self.output.is_empty() {
            match Pin::new(&mut self.socket).poll_write(context, &self.output)? {
                Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(count) => {
                    self.output.advance(count);
                    self.taken.fetch_add(count as u64, Relaxed);
                    done = true;
                }
                Poll::Pending => break,
            }
        }
        self.give_back_output();
        if done { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn give_back_output(&mut self) {
        if self.output.is_empty() && self.output.capacity() > BUFFER_KEEP_BYTES_MAX {
            self.output = BytesMut::new();
        }
    }

    /// Writes everything in `output`.
    pub async fn flush(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            self.flush_some().await?;
        }
        Ok(())
    }

    /// Writes some of `output`, as soon as any of it can be.
    pub async fn flush_some(&mut self) -> io::Result<()> {
        std::future::poll_fn(|context| self.poll_output(context)).await
    }

    /// Counts the bytes that the socket has taken.
    pub fn taken(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.taken)
    }

    /// A second handle of the socket, to be looked at beside reading and writing.
    pub fn handle(&self) -> io::Result<OwnedFd> {
        self.socket.as_fd().try_clone_to_owned()
    }

    /// One raw byte, the answer to a request for encryption.
    pub async fn answer_byte(&mut self, byte: u8) -> io::Result<()> {
        self.socket.write_all(&[byte]).await
    }
}
