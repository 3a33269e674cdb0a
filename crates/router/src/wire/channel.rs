//! A socket with a buffer on each side, read frame by frame.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::Socket;
use super::buffered::{Tally, counted};

/// Bytes asked of the kernel at once.
const READ_BYTES: usize = 16 * 1024;

/// A buffer that grew beyond this for one large message is given back afterwards.
const BUFFER_KEEP_BYTES_MAX: usize = 256 * 1024;

/// Bytes from this on are written from where they lie; fewer are cheaper to copy.
const SHARED_BYTES_MIN: usize = 64 * 1024;

/// What there is at least of a message that comes in parts, in bytes: all that the router looks at.
const FIRST_PART_BYTES_MIN: usize = 64 * 1024;

/// How long a client that is not logged in may take nothing.
const STALL_MAX_BEFORE_LOGIN: Duration = Duration::from_secs(60);

/// Types of messages that need not be held whole, and from which length on, in bytes, they come in parts.
pub type InParts = &'static [(u8, usize)];

/// One message: its tag, and its bytes including tag and length.
#[derive(Debug, Clone)]
pub struct Frame {
    /// The message's type.
    pub tag: u8,
    /// Tag, length and body, or the first part of them.
    pub bytes: Bytes,
    /// How many bytes follow; they are had by [`Channel::buffered_part`] before the next frame.
    pub rest: usize,
}

impl Frame {
    /// What follows tag and length.
    pub fn body(&self) -> Bytes {
        self.bytes.slice(5..)
    }

    /// A message that is whole.
    pub fn whole(tag: u8, bytes: Bytes) -> Frame {
        Frame { tag, bytes, rest: 0 }
    }
}

/// Why no further frame can be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum ChannelError {
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("message {tag:?} claims {length} bytes; from 4 to {length_max} are possible here")]
    Length { tag: char, length: u32, length_max: usize },
    #[error("{0}")]
    Unexpected(&'static str),
}

/// A buffered connection. Reading is cancel-safe: bytes that arrived stay in the buffer.
#[derive(Debug)]
pub struct Channel {
    socket: Socket,
    input: BytesMut,
    /// Written before all else.
    before: BytesMut,
    /// Written before `output`: long bytes that somebody else holds as well, and what goes before them.
    shared: VecDeque<Bytes>,
    /// What is to be written with the next [`Channel::flush`].
    pub output: BytesMut,
    /// `output` was so long that its memory is given back when it is written.
    output_was_long: bool,
    /// Largest message accepted, in bytes.
    pub message_bytes_max: usize,
    /// What need not be whole.
    pub in_parts: InParts,
    /// For how long a client may take nothing of what is written to it, or stop in the middle of a message that a
    /// server waits for; none: for ever.
    pub stall_max: Option<Duration>,
    /// Bytes of the last frame's message that were not taken yet.
    rest: usize,
    taken: Arc<AtomicU64>,
    tally: Tally,
}

impl Channel {
    /// Wraps `socket`; no message longer than `message_bytes_max` bytes is read from it.
    pub fn new(socket: Socket, message_bytes_max: usize) -> Channel {
        Channel {
            socket,
            input: BytesMut::new(),
            before: BytesMut::new(),
            shared: VecDeque::new(),
            output: BytesMut::new(),
            output_was_long: false,
            message_bytes_max,
            in_parts: &[],
            stall_max: Some(STALL_MAX_BEFORE_LOGIN),
            rest: 0,
            taken: Arc::default(),
            tally: Tally::default(),
        }
    }

    /// The next frame if it is already here. What nobody has taken of the message before is passed over.
    pub fn buffered_frame(&mut self) -> Result<Option<Frame>, ChannelError> {
        if self.rest > 0 {
            self.buffered_part();
        }
        if self.rest > 0 || self.input.len() < 5 {
            return Ok(None);
        }
        let tag = self.input[0];
        let length = u32::from_be_bytes([self.input[1], self.input[2], self.input[3], self.input[4]]);
        if length < 4 || length as usize > self.message_bytes_max {
            return Err(ChannelError::Length { tag: tag as char, length, length_max: self.message_bytes_max });
        }
        let total = 1 + length as usize;
        let in_parts = self.in_parts.iter().any(|(of_type, bytes)| *of_type == tag && total >= *bytes);
        if self.input.len() < if in_parts { total.min(FIRST_PART_BYTES_MIN) } else { total } {
            return Ok(None);
        }
        let bytes = self.input.split_to(total.min(self.input.len()));
        self.rest = total - bytes.len();
        let bytes = if bytes.len() > BUFFER_KEEP_BYTES_MAX {
            // What follows must not keep the memory of the whole.
            self.input = BytesMut::from(&self.input[..]);
            counted(bytes)
        } else {
            bytes.freeze()
        };
        self.note_buffered();
        Ok(Some(Frame { tag, bytes, rest: self.rest }))
    }

    /// Makes the last frame the next one again. None of its rest was taken.
    pub fn put_back(&mut self, frame: &Frame) {
        debug_assert_eq!(self.rest, frame.rest, "the last frame, as it came");
        self.rest = 0;
        let behind = std::mem::take(&mut self.input);
        self.input.reserve(frame.bytes.len() + behind.len());
        self.input.extend_from_slice(&frame.bytes);
        self.input.extend_from_slice(&behind);
        self.note_buffered();
    }

    /// What is already here of the rest of the last frame's message.
    pub fn buffered_part(&mut self) -> Option<Bytes> {
        let bytes = self.rest.min(self.input.len());
        self.rest -= bytes;
        let part = (bytes > 0).then(|| self.input.split_to(bytes).freeze());
        self.note_buffered();
        part
    }

    /// How many bytes of the last frame's message were not taken yet.
    pub fn rest(&self) -> usize {
        self.rest
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
        self.note_buffered();
        Ok(())
    }

    /// Counts what is in the buffers now. Long bytes that somebody else holds as well are counted already.
    pub fn note_buffered(&mut self) {
        let short = self.shared.iter().map(Bytes::len).filter(|bytes| *bytes <= BUFFER_KEEP_BYTES_MAX);
        self.tally.note(self.input.len() + self.before.len() + self.output.len() + short.sum::<usize>());
    }

    /// The next frame, waited for while what is to be written goes out: a peer that writes before it has read
    /// everything is never waited for in vain.
    pub async fn exchange(&mut self) -> Result<Frame, ChannelError> {
        loop {
            if let Some(frame) = self.buffered_frame()? {
                return Ok(frame);
            }
            self.exchange_some().await?;
        }
    }

    /// Reads some, or writes some of what is to be written.
    pub async fn exchange_some(&mut self) -> io::Result<()> {
        std::future::poll_fn(|context| self.poll_flow(context, true)).await
    }

    /// Moves what can be moved: writes and, if `reads`, reads once. Pending when nothing could be.
    pub fn poll_flow(&mut self, context: &mut Context<'_>, reads: bool) -> Poll<io::Result<()>> {
        let written = self.poll_output(context);
        if !reads {
            return written;
        }
        self.input.reserve(READ_BYTES);
        let read = pin!(self.socket.read_buf(&mut self.input)).poll(context);
        self.note_buffered();
        match (read, written) {
            // A peer that takes nothing any more may have said why before it closed.
            (Poll::Ready(Ok(count)), _) if count > 0 => Poll::Ready(Ok(())),
            (_, Poll::Ready(Err(error))) => Poll::Ready(Err(error)),
            (Poll::Ready(Ok(_)), _) => Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
            (Poll::Ready(Err(error)), _) => Poll::Ready(Err(error)),
            (Poll::Pending, written) => written,
        }
    }

    /// Appends tag and length of a message whose body of `bytes` bytes follows.
    pub fn begin(&mut self, tag: u8, bytes: usize) {
        self.output.put_u8(tag);
        self.output.put_u32(u32::try_from(4 + bytes).expect("messages are bounded far below 4 GiB"));
    }

    /// Appends `bytes` to what is to be written; many of them are not copied.
    pub fn put(&mut self, bytes: &Bytes) {
        if bytes.len() < SHARED_BYTES_MIN {
            self.output.extend_from_slice(bytes);
            return;
        }
        if !self.output.is_empty() {
            let before = self.output.split();
            let is_long = before.len() > BUFFER_KEEP_BYTES_MAX;
            self.shared.push_back(if is_long { counted(before) } else { before.freeze() });
        }
        self.shared.push_back(bytes.clone());
    }

    /// Has `bytes` written before all that is to be written, which must begin with a message.
    pub fn put_before(&mut self, bytes: &[u8]) {
        debug_assert!(self.shared.is_empty(), "what has begun to go out ends first");
        self.before.extend_from_slice(bytes);
        self.note_buffered();
    }

    /// Whether something is to be written before all else.
    pub fn has_before(&self) -> bool {
        !self.before.is_empty()
    }

    /// Writes what is to be written before all else, and nothing of the rest.
    pub async fn flush_before(&mut self) -> io::Result<()> {
        std::future::poll_fn(|context| {
            while self.has_before() {
                match std::task::ready!(Pin::new(&mut self.socket).poll_write(context, &self.before))? {
                    0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                    count => self.written(count),
                }
            }
            self.note_buffered();
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// How many bytes are to be written.
    pub fn unwritten(&self) -> usize {
        self.before.len() + self.output.len() + self.shared.iter().map(Bytes::len).sum::<usize>()
    }

    /// Writes what the socket takes.
    fn poll_output(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.output_was_long |= self.output.len() > BUFFER_KEEP_BYTES_MAX;
        let mut done = false;
        loop {
            let next = match self.shared.front() {
                _ if self.has_before() => &self.before[..],
                Some(shared) => &shared[..],
                None => &self.output[..],
            };
            if next.is_empty() {
                break;
            }
            match Pin::new(&mut self.socket).poll_write(context, next)? {
                Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(count) => {
                    self.written(count);
                    done = true;
                }
                Poll::Pending => break,
            }
        }
        // Its capacity says nothing of it: that shrinks as bytes are taken from its front.
        if self.output.is_empty() && std::mem::take(&mut self.output_was_long) {
            self.output = BytesMut::new();
        }
        self.note_buffered();
        if done { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn written(&mut self, count: usize) {
        match self.shared.front_mut() {
            _ if !self.before.is_empty() => {
                self.before.advance(count);
                if self.before.is_empty() {
                    self.before = BytesMut::new();
                }
            }
            Some(shared) => {
                shared.advance(count);
                if shared.is_empty() {
                    self.shared.pop_front();
                }
            }
            None => self.output.advance(count),
        }
        self.taken.fetch_add(count as u64, Relaxed);
    }

    /// Writes everything that is to be written.
    pub async fn flush(&mut self) -> io::Result<()> {
        while self.unwritten() > 0 {
            self.flush_some().await?;
        }
        Ok(())
    }

    /// Writes some of it, as soon as any of it can be.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Reply;

    /// Longer than what a buffer may keep.
    const LONG: usize = 4 * BUFFER_KEEP_BYTES_MAX;

    fn channels() -> (Channel, Channel) {
        let (one, other) = tokio::net::UnixStream::pair().unwrap();
        (Channel::new(Socket::Unix(one), 1 << 30), Channel::new(Socket::Unix(other), 1 << 30))
    }

    /// Spec: L1
    #[tokio::test]
    async fn a_long_message_leaves_no_long_buffer_behind() {
        let (mut sender, mut receiver) = channels();
        for _ in 0..3 {
            sender.output.message(b'd', &vec![b'x'; LONG]);
            sender.output.message(b'c', b"");
            let (sent, received) =
                tokio::join!(sender.flush(), async { [receiver.frame().await, receiver.frame().await] });
            sent.unwrap();
            let [long, short] = received.map(Result::unwrap);
            assert_eq!((long.bytes.len(), short.tag), (LONG + 5, b'c'));
            // What follows is not in the long message's buffer, whose memory is free when nobody has that any more.
            let behind = long.bytes.as_ptr_range().end;
            assert!(!(behind..=behind.wrapping_add(5)).contains(&receiver.input.as_ptr()));
            assert!(receiver.input.capacity() <= BUFFER_KEEP_BYTES_MAX);
            assert_eq!((sender.output.capacity(), sender.unwritten()), (0, 0));
        }
    }

    /// A message comes in parts where it need not be whole, and whoever takes only its beginning gets the next message
    /// after it. What is in the buffer does not grow with it.
    ///
    /// Spec: L1
    #[tokio::test]
    async fn a_message_in_parts_is_the_same_bytes_and_is_never_held_whole() {
        let (mut sender, mut receiver) = channels();
        receiver.in_parts = &[(b'd', LONG)];
        for takes_all in [true, false] {
            for (tag, bytes) in [(b'd', LONG - 6), (b'd', LONG - 5), (b'Q', LONG)] {
                sender.output.message(tag, &(0..bytes).map(|number| number as u8).collect::<Vec<_>>());
                sender.output.message(b'c', b"");
                let receive = async {
                    let frame = receiver.frame().await.unwrap();
                    receiver.put_back(&frame);
                    let frame = receiver.frame().await.unwrap();
                    assert_eq!((frame.rest > 0, receiver.rest()), (tag == b'd' && bytes + 5 >= LONG, frame.rest));
                    let mut whole = frame.bytes.to_vec();
                    while takes_all && receiver.rest() > 0 {
                        assert!(receiver.input.len() <= BUFFER_KEEP_BYTES_MAX);
                        match receiver.buffered_part() {
                            Some(part) => whole.extend_from_slice(&part),
                            None => receiver.fill().await.unwrap(),
                        }
                    }
                    let next = receiver.frame().await.unwrap();
                    (frame.rest, whole, next.tag)
                };
                let (sent, (rest, whole, next)) = tokio::join!(sender.flush(), receive);
                sent.unwrap();
                assert_eq!(next, b'c');
                assert_eq!(whole.len() + if takes_all { 0 } else { rest }, bytes + 5);
                assert!(whole[5..].iter().enumerate().all(|(number, byte)| *byte == number as u8));
            }
        }
    }

    /// What goes before all else is copied: a few bytes do not keep the buffer that they were read into.
    #[tokio::test]
    async fn what_goes_before_is_written_first_and_alone() {
        let (mut sender, mut receiver) = channels();
        sender.output.message(b'D', b"row");
        sender.put_before(b"N\0\0\0\x05x");
        sender.put_before(b"N\0\0\0\x05y");
        assert!(sender.has_before() && sender.unwritten() == 6 + 6 + 8);
        sender.flush_before().await.unwrap();
        assert!(!sender.has_before() && sender.unwritten() == 8 && sender.before.capacity() == 0);
        sender.put_before(b"N\0\0\0\x05z");
        sender.flush().await.unwrap();
        for (tag, body) in [(b'N', "x"), (b'N', "y"), (b'N', "z"), (b'D', "row")] {
            let frame = receiver.frame().await.unwrap();
            assert_eq!((frame.tag, &*frame.body()), (tag, body.as_bytes()));
        }
    }

    #[tokio::test]
    async fn many_bytes_are_written_in_their_order_from_where_they_lie() {
        let (mut sender, mut receiver) = channels();
        let long = Bytes::from(vec![b'x'; LONG]);
        sender.output.message(b'1', b"");
        sender.begin(b'Q', LONG + 1);
        sender.put(&long);
        sender.output.put_u8(0);
        sender.begin(b'd', 3);
        sender.put(&Bytes::from_static(b"abc"));
        assert_eq!(sender.shared[1].as_ptr(), long.as_ptr());
        assert_eq!(sender.unwritten(), 5 + 5 + LONG + 1 + 8);
        let (sent, tags) = tokio::join!(sender.flush(), async {
            let mut tags = Vec::new();
            for _ in 0..3 {
                let frame = receiver.frame().await.unwrap();
                tags.push((frame.tag, frame.body().len()));
            }
            tags
        });
        sent.unwrap();
        assert_eq!(tags, [(b'1', 0), (b'Q', LONG + 1), (b'd', 3)]);
        assert_eq!(sender.unwritten(), 0);
    }
}
