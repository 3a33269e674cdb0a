//! Asking the daemon of a directory: one HTTP request over the Unix socket that it serves there.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::directory::Directory;
use crate::{ClusterStatus, HostError};

/// Largest answer that is read.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// How long the daemon may take; it asks every server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// What the daemon of `directory` says about its cluster.
///
/// # Errors
/// [`HostError::NotACluster`], [`HostError::NotRunning`] when nobody listens, [`HostError::StrangeAnswer`] else.
pub async fn status(directory: &Directory) -> Result<ClusterStatus, HostError> {
    let strange = |reason: String| HostError::StrangeAnswer { directory: directory.root().to_owned(), reason };
    let body = get(directory, "/status").await?;
    serde_json::from_slice(&body).map_err(|error| strange(error.to_string()))
}

/// The daemon's metrics in Prometheus' text form.
///
/// # Errors
/// As [`status`].
pub async fn metrics(directory: &Directory) -> Result<String, HostError> {
    let strange = |reason: String| HostError::StrangeAnswer { directory: directory.root().to_owned(), reason };
    String::from_utf8(get(directory, "/metrics").await?).map_err(|error| strange(error.to_string()))
}

async fn get(directory: &Directory, path: &str) -> Result<Vec<u8>, HostError> {
    directory.state()?;
    let strange = |reason: String| HostError::StrangeAnswer { directory: directory.root().to_owned(), reason };
    let Ok(stream) = UnixStream::connect(directory.daemon_socket()).await else {
        return Err(HostError::NotRunning { directory: directory.root().to_owned() });
    };
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, exchange(stream, path))
        .await
        .map_err(|_| strange(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs())))?
        .map_err(|error| strange(error.to_string()))?;
    body(&answer).map(<[u8]>::to_vec).map_err(strange)
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
