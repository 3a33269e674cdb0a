//! Asking a disk's server.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onecopy_disk::{Disk, Snapshot};
use serde::de::DeserializeOwned;

use crate::protocol::{Answer, Request, ServedDisk};
use crate::{CONTROL_SOCKET, DiskServerError, socket};

/// How long an answer may take: closing a disk writes all that is not on its files yet.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// Bytes of the longest answer; metrics and snapshots of a full disk are some hundred kilobytes.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// A connection to a disk's server.
pub struct DiskClient {
    directory: PathBuf,
    stream: BufReader<UnixStream>,
}

impl DiskClient {
    /// Connects to the server of the disk in this directory, behind its usual control socket.
    ///
    /// # Errors
    /// [`DiskServerError::NotServed`] when nobody listens there; [`DiskServerError::Disk`] when there is no disk.
    pub fn connect(directory: &Path) -> Result<DiskClient, DiskServerError> {
        DiskClient::connect_to(directory, &directory.join(CONTROL_SOCKET)).or_else(|error| match error {
            // Of what is no disk it would be the wrong advice to serve it.
            DiskServerError::NotServed { .. } => {
                Disk::geometry(directory).map_err(DiskServerError::disk(directory))?;
                Err(error)
            }
            _ => Err(error),
        })
    }

    /// The same, behind another socket.
    ///
    /// # Errors
    /// [`DiskServerError::NotServed`] when nobody listens there.
    pub fn connect_to(directory: &Path, control: &Path) -> Result<DiskClient, DiskServerError> {
        let stream = socket::connect(control).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::ConnectionRefused => {
                DiskServerError::NotServed { directory: directory.to_owned() }
            }
            _ => DiskServerError::io("connect to", control)(error),
        })?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT)).map_err(DiskServerError::io("bound waiting for", control))?;
        Ok(DiskClient { directory: directory.to_owned(), stream: BufReader::new(stream) })
    }

    /// Everything about the disk and its server.
    ///
    /// # Errors
    /// As [`DiskClient::ask`].
    pub fn info(&mut self) -> Result<ServedDisk, DiskServerError> {
        self.ask(&Request::Info)
    }

    /// Makes a durable snapshot.
    ///
    /// # Errors
    /// As [`DiskClient::ask`].
    pub fn snapshot(&mut self, name: &str) -> Result<Snapshot, DiskServerError> {
        self.ask(&Request::Snapshot { name: name.to_owned() })
    }

    /// Closes the disk and ends the server; returns when it has let the disk go.
    ///
    /// # Errors
    /// As [`DiskClient::ask`].
    pub fn stop(&mut self) -> Result<(), DiskServerError> {
        self.ask(&Request::Stop)
    }

    /// Asks one thing.
    ///
    /// # Errors
    /// The server refuses, is gone, or answers something else.
    pub fn ask<T: DeserializeOwned>(&mut self, request: &Request) -> Result<T, DiskServerError> {
        let mut line = serde_json::to_vec(request).expect("requests are strings and numbers");
        line.push(b'\n');
        let failed = DiskServerError::io("ask the server of", &self.directory);
        let asked = self.stream.get_mut().write_all(&line);
        let answer =
            asked.and_then(|()| read_line(&mut self.stream, Instant::now() + ANSWER_TIMEOUT)).map_err(failed)?;
        let invalid_reply =
            |reason: String| DiskServerError::InvalidReply { directory: self.directory.clone(), reason };
        if answer.is_empty() {
            return Err(invalid_reply("it ended before it answered".to_owned()));
        }
        match serde_json::from_slice(&answer).map_err(|error| invalid_reply(error.to_string()))? {
            Answer::Ok(value) => serde_json::from_value(value).map_err(|error| invalid_reply(error.to_string())),
            Answer::Error(reason) => Err(DiskServerError::Refused(reason)),
        }
    }
}

/// One line, or what came before the end; whoever sends it slowly is waited for no longer.
fn read_line(stream: &mut BufReader<UnixStream>, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') && line.len() < ANSWER_BYTES_MAX {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.get_ref().set_read_timeout(Some(left))?;
        let bytes = match stream.fill_buf() {
            Ok(bytes) => bytes,
            // What a read past its timeout says (socket(7), SO_RCVTIMEO).
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(ErrorKind::TimedOut.into()),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if bytes.is_empty() {
            break;
        }
        let length = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |end| end + 1);
        line.extend_from_slice(&bytes[..length]);
        stream.consume(length);
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec: A2
    #[test]
    fn who_answers_one_byte_at_a_time_is_waited_for_no_longer() {
        let (asks, mut answers) = UnixStream::pair().unwrap();
        let slow = std::thread::spawn(move || while answers.write_all(b"x").is_ok() {});
        let mut asks = BufReader::with_capacity(1, asks);
        let error = read_line(&mut asks, Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        drop(asks);
        slow.join().unwrap();
        let (asks, _silent) = UnixStream::pair().unwrap();
        let error = read_line(&mut BufReader::new(asks), Instant::now() + Duration::from_millis(5)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        let (asks, mut answers) = UnixStream::pair().unwrap();
        answers.write_all(b"one\ntwo").unwrap();
        drop(answers);
        let (mut asks, late) = (BufReader::new(asks), Instant::now() + ANSWER_TIMEOUT);
        assert_eq!(read_line(&mut asks, late).unwrap(), b"one\n");
        assert_eq!(read_line(&mut asks, late).unwrap(), b"two");
    }
}
