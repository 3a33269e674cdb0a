//! Asking a daemon: one HTTP request over the Unix socket that it serves.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use crate::change::{ReinitRequest, ScaleRequest};
use crate::directory::Directory;
use crate::{ClusterStatus, Event, HostError, Progress};

/// Longest line of an answer that comes line by line.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// Largest answer that is read.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// How long the daemon may take; it asks every server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// What the daemon of `directory` says about its cluster.
///
/// # Errors
/// [`HostError::NotACluster`], [`HostError::NotRunning`] when nobody listens, [`HostError::InvalidReply`] else.
pub async fn status(directory: &Directory) -> Result<ClusterStatus, HostError> {
    let daemon = Daemon::OfCluster(directory.clone());
    let body = daemon.get("/status").await?;
    serde_json::from_slice(&body).map_err(|error| daemon.invalid_reply(error.to_string()))
}

/// The daemon's metrics in Prometheus' text form.
///
/// # Errors
/// As [`status`].
pub async fn metrics(directory: &Directory) -> Result<String, HostError> {
    let daemon = Daemon::OfCluster(directory.clone());
    String::from_utf8(daemon.get("/metrics").await?).map_err(|error| daemon.invalid_reply(error.to_string()))
}

/// Lets the daemon of `directory` have so many followers; returns their names when the new ones answer (or, so asked
/// for, are whole). The change goes on when this is dropped.
///
/// # Errors
/// [`HostError::NotACluster`], [`HostError::NotRunning`]; [`HostError::Daemon`] with the daemon's words;
/// [`HostError::InvalidReply`].
pub async fn scale(
    directory: &Directory,
    request: &ScaleRequest,
    progress: &dyn Progress,
) -> Result<Vec<String>, HostError> {
    followers(Daemon::OfCluster(directory.clone()).change("/scale", request, progress).await?)
}

/// Lets the daemon of `directory` make a follower anew.
///
/// # Errors
/// As [`scale`].
pub async fn reinit(
    directory: &Directory,
    request: &ReinitRequest,
    progress: &dyn Progress,
) -> Result<Vec<String>, HostError> {
    followers(Daemon::OfCluster(directory.clone()).change("/reinit", request, progress).await?)
}

/// The followers that a change's last event names.
fn followers(last: Event) -> Result<Vec<String>, HostError> {
    match last {
        Event::Done { followers } => Ok(followers),
        other => Err(HostError::Daemon(format!("the daemon ended with {other:?}; is it of another version?"))),
    }
}

/// A daemon that serves a Unix socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Daemon {
    /// That of the cluster in a directory.
    OfCluster(Directory),
    /// One that looks after memory only; its socket.
    OfMemory(PathBuf),
}

impl Daemon {
    /// Asks for one page.
    pub(crate) async fn get(&self, path: &str) -> Result<Vec<u8>, HostError> {
        let stream = self.connect().await?;
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, exchange(stream, path))
            .await
            .map_err(|_| self.invalid_reply(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs())))?
            .map_err(|error| self.invalid_reply(error.to_string()))?;
        body(&answer).map(<[u8]>::to_vec).map_err(|reason| self.invalid_reply(reason))
    }

    /// Asks for work that tells events; returns the last one, which is no failure.
    pub(crate) async fn change(
        &self,
        path: &str,
        request: &impl Serialize,
        progress: &dyn Progress,
    ) -> Result<Event, HostError> {
        let stream = self.connect().await?;
        let invalid_reply = |reason: String| self.invalid_reply(reason);
        let body = serde_json::to_string(request).expect("requests are strings and numbers");
        let length = body.len();
        let request =
            format!("POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}");
        let mut stream = BufReader::new(stream);
        stream.write_all(request.as_bytes()).await.map_err(|error| invalid_reply(error.to_string()))?;
        let is_good = read_head(&mut stream).await.map_err(invalid_reply)?;
        if !is_good {
            let mut message = String::new();
            let read = (&mut stream).take(LINE_BYTES_MAX).read_to_string(&mut message).await;
            read.map_err(|error| invalid_reply(error.to_string()))?;
            return Err(HostError::Daemon(message.trim().to_owned()));
        }
        loop {
            let line = read_line(&mut stream).await.map_err(invalid_reply)?;
            match serde_json::from_str(&line).map_err(|error| invalid_reply(format!("{error} in {line:?}")))? {
                Event::Failed { message } => return Err(HostError::Daemon(message)),
                event if event.is_last() => return Ok(event),
                event => progress.report(event),
            }
        }
    }

    async fn connect(&self) -> Result<UnixStream, HostError> {
        match self {
            Daemon::OfCluster(directory) => {
                directory.state()?;
                let not_running = |_| HostError::NotRunning { directory: directory.root().to_owned() };
                UnixStream::connect(directory.daemon_socket()).await.map_err(not_running)
            }
            Daemon::OfMemory(socket) => {
                let nobody = |_| HostError::NoMemoryAgent { socket: socket.clone() };
                UnixStream::connect(socket).await.map_err(nobody)
            }
        }
    }

    pub(crate) fn invalid_reply(&self, reason: String) -> HostError {
        match self {
            Daemon::OfCluster(directory) => HostError::InvalidReply { directory: directory.root().to_owned(), reason },
            Daemon::OfMemory(socket) => HostError::InvalidAgentReply { socket: socket.clone(), reason },
        }
    }
}

/// Reads the head of an answer; whether it is a good one.
async fn read_head(stream: &mut BufReader<UnixStream>) -> Result<bool, String> {
    let first = read_line(stream).await?;
    while !read_line(stream).await?.trim().is_empty() {}
    Ok(first.split(' ').nth(1) == Some("200"))
}

async fn read_line(stream: &mut BufReader<UnixStream>) -> Result<String, String> {
    let mut line = String::new();
    stream.take(LINE_BYTES_MAX).read_line(&mut line).await.map_err(|error| error.to_string())?;
    match line.ends_with('\n') {
        true => Ok(line),
        false => Err("it ended in the middle; the change may go on, see `onecopy status`".to_owned()),
    }
}

async fn exchange(mut stream: UnixStream, path: &str) -> std::io::Result<Vec<u8>> {
    // HTTP/1.0: the answer ends where the connection ends, so there are no chunks to parse.
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await?;
    Ok(answer)
}

/// The body of a successful answer.
fn body(answer: &[u8]) -> Result<&[u8], String> {
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").ok_or("its head has no end")?;
    let head = String::from_utf8_lossy(&answer[..end]);
    let line = head.lines().next().unwrap_or_default();
    match line.split(' ').nth(1) {
        Some("200") => Ok(&answer[end + 4..]),
        _ => Err(format!("{line:?}")),
    }
}

/// Whether the daemon of `directory` is ready.
pub async fn is_running(directory: &Directory) -> bool {
    UnixStream::connect(directory.daemon_socket()).await.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_good_answer_has_a_body() {
        assert_eq!(body(b"HTTP/1.0 200 OK\r\nx: y\r\n\r\n{}"), Ok(&b"{}"[..]));
        for answer in
            [&b""[..], b"HTTP/1.0 200 OK\r\n", b"HTTP/1.0 503 no\r\n\r\nwhy", b"\r\n\r\n", b"\xff\xfe\r\n\r\n"]
        {
            assert!(body(answer).is_err(), "{answer:?}");
        }
    }
}
