//! Lines from a peer that is not trusted: never longer than a bound, whatever it sends.

use std::io::{self, ErrorKind};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// As much is read at once.
const CHUNK_BYTES: usize = 16 * 1024;

/// Reads lines that end with a newline.
#[derive(Debug)]
pub struct LineReader<R> {
    from: R,
    bytes_max: usize,
    buffer: Vec<u8>,
    /// No newline is in the buffer before this place.
    searched: usize,
}

impl<R: AsyncRead + Unpin> LineReader<R> {
    /// Reads from `from` lines of at most `bytes_max` bytes.
    pub fn new(from: R, bytes_max: usize) -> LineReader<R> {
        LineReader { from, bytes_max, buffer: Vec::new(), searched: 0 }
    }

    /// The next line without its end (a carriage return belongs to that); none at the end of the stream, where a line
    /// without a newline is none. May be given up at any await: nothing is lost.
    ///
    /// # Errors
    /// What reading says; `InvalidData` for a line that is too long.
    pub async fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(found) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(self.searched + found + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                self.searched = 0;
                line.pop();
                line.pop_if(|last| *last == b'\r');
                return Ok(Some(line));
            }
            self.searched = self.buffer.len();
            if self.buffer.len() > self.bytes_max {
                let reason = format!("a line is longer than {} bytes", self.bytes_max);
                return Err(io::Error::new(ErrorKind::InvalidData, reason));
            }
            self.buffer.reserve(CHUNK_BYTES);
            if self.from.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
    }
}

impl<R> LineReader<R> {
    /// What was read and is no line yet, and where the rest is to be had.
    pub(crate) fn into_parts(self) -> (Vec<u8>, R) {
        (self.buffer, self.from)
    }
}

/// A connection on which each side says JSON values, a line each.
#[derive(Debug)]
pub struct JsonLines {
    reader: LineReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

impl JsonLines {
    /// Lines that come have at most `bytes_max` bytes.
    pub fn new(stream: UnixStream, bytes_max: usize) -> JsonLines {
        let (reader, writer) = stream.into_split();
        JsonLines { reader: LineReader::new(reader, bytes_max), writer }
    }

    /// Says a value.
    ///
    /// # Errors
    /// What writing says.
    ///
    /// # Panics
    /// For a value that JSON cannot hold, such as a map whose keys are no strings.
    pub async fn send(&mut self, value: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(value).expect("what is said is strings, numbers and lists");
        line.push(b'\n');
        self.writer.write_all(&line).await
    }

    /// The next value, or why the line is none; none at all when the other side has ended. May be given up at any
    /// await: nothing is lost.
    ///
    /// # Errors
    /// What reading says; `InvalidData` for a line that is too long.
    pub async fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<serde_json::Result<T>>> {
        Ok(self.reader.next().await?.map(|line| serde_json::from_slice(&line)))
    }

    /// The connection itself, for who says something else from here on; none when the other side has said more already.
    pub fn into_stream(self) -> Option<UnixStream> {
        let (said, reader) = self.reader.into_parts();
        if said.is_empty() { reader.reunite(self.writer).ok() } else { None }
    }

    /// Waits until the other side has gone; what it says meanwhile is not heard.
    pub async fn wait_left(&mut self) {
        while let Ok(Some(_)) = self.reader.next().await {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines_of(bytes: &[u8], bytes_max: usize) -> (Vec<String>, io::Result<()>) {
        let mut reader = LineReader::new(bytes, bytes_max);
        let mut lines = Vec::new();
        loop {
            match reader.next().await {
                Ok(Some(line)) => lines.push(String::from_utf8_lossy(&line).into_owned()),
                Ok(None) => return (lines, Ok(())),
                Err(error) => return (lines, Err(error)),
            }
        }
    }

    #[tokio::test]
    async fn lines_end_at_newlines() {
        let (lines, end) = lines_of(b"one\r\n\ntwo\nthe rest", 100).await;
        assert_eq!(lines, ["one", "", "two"]);
        assert!(end.is_ok());
    }

    #[tokio::test]
    async fn a_line_without_an_end_is_given_up() {
        let (lines, end) = lines_of(&[b'x'; 200_000], 1000).await;
        assert!(lines.is_empty());
        assert_eq!(end.unwrap_err().kind(), ErrorKind::InvalidData);
    }
}
