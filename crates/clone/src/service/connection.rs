//! One conversation over a service's socket.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::protocol::LINE_BYTES_MAX;
use crate::keeper;

/// Read at once.
const READ_BYTES: usize = 64 << 10;
/// Open files that arrived and that nobody has asked for yet, at most.
const DESCRIPTORS_WAITING_MAX: usize = 16;

/// Lines of JSON with open files, either way.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    received: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
}

impl Connection {
    /// Over a connected socket.
    pub fn new(stream: UnixStream) -> Connection {
        Connection { stream, received: Vec::new(), descriptors: VecDeque::new() }
    }

    /// Says one thing.
    ///
    /// # Errors
    /// The other side is gone.
    pub async fn send(&mut self, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let mut descriptors = descriptors;
        let mut rest = line.as_slice();
        while !rest.is_empty() {
            let send = || keeper::send(&self.stream, rest, descriptors);
            let sent = self.stream.async_io(Interest::WRITABLE, send).await?;
            // They go with the first byte.
            descriptors = &[];
            rest = &rest[sent..];
        }
        Ok(())
    }

    /// The next thing that the other side says; none when it has closed.
    ///
    /// # Errors
    /// Lost, or something that is not what is expected here.
    pub async fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut looked_at = 0;
        loop {
            if let Some(end) = self.received[looked_at..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=looked_at + end).collect();
                return Ok(Some(serde_json::from_slice(&line)?));
            }
            looked_at = self.received.len();
            if looked_at > LINE_BYTES_MAX {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a line is longer than it may be"));
            }
            if !self.read_more().await? {
                return Ok(None);
            }
        }
    }

    async fn read_more(&mut self) -> io::Result<bool> {
        let (mut bytes, mut files) = (vec![0; READ_BYTES], Vec::new());
        let receive = || keeper::receive(&self.stream, &mut bytes, &mut files, false);
        let length = self.stream.async_io(Interest::READABLE, receive).await?;
        self.received.extend(&bytes[..length]);
        self.descriptors.extend(files);
        if self.descriptors.len() > DESCRIPTORS_WAITING_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "more open files than words about them"));
        }
        Ok(length > 0)
    }

    /// The open files that came with what was received last, which says that there are `N`.
    ///
    /// # Errors
    /// They are not there.
    pub fn take_descriptors<const N: usize>(&mut self) -> io::Result<[OwnedFd; N]> {
        if self.descriptors.len() < N {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "open files are missing"));
        }
        let files: Vec<OwnedFd> = self.descriptors.drain(..N).collect();
        files.try_into().map_err(|_| io::Error::other("not as many files as were counted"))
    }

    /// Waits until the other side has closed, or says something out of turn.
    pub async fn closed(&mut self) {
        let _ = self.read_more().await;
    }

    /// The socket, to speak another protocol over it.
    ///
    /// # Errors
    /// The other side has already said more.
    pub fn into_stream(self) -> io::Result<UnixStream> {
        if self.received.is_empty() && self.descriptors.is_empty() {
            Ok(self.stream)
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidData, "words of two protocols in one piece"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::super::protocol::{Event, Request};
    use super::*;

    #[tokio::test]
    async fn files_stay_with_their_lines() {
        let (left, right) = UnixStream::pair().unwrap();
        let (mut left, mut right) = (Connection::new(left), Connection::new(right));
        let files = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        left.send(&Event::Preparing, &[]).await.unwrap();
        left.send(&Event::Descriptors, &[files[0].as_fd(), files[1].as_fd()]).await.unwrap();
        left.send(&Event::Done, &[]).await.unwrap();
        assert_eq!(right.receive::<Event>().await.unwrap(), Some(Event::Preparing));
        assert_eq!(right.receive::<Event>().await.unwrap(), Some(Event::Descriptors));
        let [_, _] = right.take_descriptors::<2>().unwrap();
        assert!(right.take_descriptors::<1>().is_err());
        assert_eq!(right.receive::<Event>().await.unwrap(), Some(Event::Done));
        drop(left);
        assert_eq!(right.receive::<Event>().await.unwrap(), None);
    }

    #[tokio::test]
    async fn long_lines_arrive_and_endless_ones_do_not() {
        let (left, right) = UnixStream::pair().unwrap();
        let (mut left, mut right) = (Connection::new(left), Connection::new(right));
        let target = std::path::PathBuf::from("x".repeat(1 << 20));
        let request = Request::Watch { target };
        let (sent, received) = tokio::join!(left.send(&request, &[]), right.receive::<Request>());
        sent.unwrap();
        assert_eq!(received.unwrap(), Some(request));
        let endless = "y".repeat(LINE_BYTES_MAX + READ_BYTES + 1);
        let (_, received) = tokio::join!(
            async {
                let sent = left.send(&endless, &[]).await;
                drop(left);
                sent
            },
            async {
                let received = right.receive::<String>().await;
                drop(right);
                received
            }
        );
        assert_eq!(received.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
