//! Asking over HTTP. The version is 1.0: the answer ends where the connection ends, so nothing is to be taken apart.

use std::io::{self, ErrorKind};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};

use crate::LineReader;

/// Bytes of the longest line of a head, and of a body that comes line by line.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Lines of the longest head.
const HEAD_LINES_MAX: usize = 100;

/// An answer whose head was read. While it is held, the other side sees that somebody waits.
#[derive(Debug)]
pub struct Response<S> {
    /// The status, such as 200.
    pub status: u16,
    lines: LineReader<ReadHalf<S>>,
    _writer: WriteHalf<S>,
}

/// Asks over a connection. `body` is JSON, if there is one.
///
/// # Errors
/// What reading and writing say; `InvalidData` for what is no answer, `UnexpectedEof` for half of one.
pub async fn request<S: AsyncRead + AsyncWrite>(
    stream: S,
    (method, path): (&str, &str),
    body: Option<&str>,
) -> io::Result<Response<S>> {
    let (reader, mut writer) = tokio::io::split(stream);
    let head = match body {
        Some(body) => format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len()),
        None => "\r\n".to_owned(),
    };
    writer.write_all(format!("{method} {path} HTTP/1.0\r\n{head}").as_bytes()).await?;
    let mut lines = LineReader::new(reader, LINE_BYTES_MAX);
    let mut next = async || lines.next().await?.ok_or(io::Error::from(ErrorKind::UnexpectedEof));
    let first = String::from_utf8_lossy(&next().await?).into_owned();
    let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
    let invalid = |reason: String| io::Error::new(ErrorKind::InvalidData, reason);
    let status = status.filter(|_| first.starts_with("HTTP/1.")).ok_or_else(|| invalid(format!("{first:?}")))?;
    for _ in 0..HEAD_LINES_MAX {
        if next().await?.is_empty() {
            return Ok(Response { status, lines, _writer: writer });
        }
    }
    Err(invalid("its head has no end".to_owned()))
}

impl<S: AsyncRead + AsyncWrite> Response<S> {
    /// The next line of the body; none at its end, where half a line is none.
    ///
    /// # Errors
    /// What reading says; `InvalidData` for a line that is too long.
    pub async fn line(&mut self) -> io::Result<Option<Vec<u8>>> {
        self.lines.next().await
    }

    /// The whole body.
    ///
    /// # Errors
    /// What reading says; `InvalidData` for one that is longer.
    pub async fn body(self, bytes_max: usize) -> io::Result<Vec<u8>> {
        let (mut body, from) = self.lines.into_parts();
        // One more byte tells that it is too long.
        from.take((bytes_max + 1) as u64).read_to_end(&mut body).await?;
        if body.len() > bytes_max {
            return Err(io::Error::new(ErrorKind::InvalidData, format!("an answer is longer than {bytes_max} bytes")));
        }
        Ok(body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn answered(answer: &[u8]) -> io::Result<(u16, Vec<u8>)> {
        let (ours, mut theirs) = tokio::io::duplex(1 << 16);
        theirs.write_all(answer).await?;
        theirs.shutdown().await?;
        let response = request(ours, ("GET", "/status"), None).await?;
        Ok((response.status, response.body(10).await?))
    }

    #[tokio::test]
    async fn only_a_whole_good_answer_has_a_body() {
        assert_eq!(answered(b"HTTP/1.0 200 OK\r\nx: y\r\n\r\n{\n}").await.unwrap(), (200, b"{\n}".to_vec()));
        assert_eq!(answered(b"HTTP/1.1 503 no\r\n\r\nwhy").await.unwrap(), (503, b"why".to_vec()));
        let endless = [&b"HTTP/1.0 200 OK\r\n"[..], &b"x: y\r\n".repeat(HEAD_LINES_MAX + 1)].concat();
        for answer in [
            &b""[..],
            b"HTTP/1.0 200 OK\r\n",
            b"HTTP/1.0 two OK\r\n\r\n",
            b"200 200 200\r\n\r\n",
            b"\xff\xfe\r\n\r\n",
            b"HTTP/1.0 200 OK\r\n\r\n12345678901",
            &endless,
        ] {
            assert!(answered(answer).await.is_err(), "{answer:?}");
        }
    }

    #[tokio::test]
    async fn a_body_goes_out_and_lines_come_in() {
        let (ours, mut theirs) = tokio::io::duplex(1 << 16);
        theirs.write_all(b"HTTP/1.0 200 OK\r\n\r\n{}\n[]\nhalf").await.unwrap();
        let mut response = request(ours, ("POST", "/scale"), Some("{\"count\":3}")).await.unwrap();
        assert_eq!(response.line().await.unwrap().unwrap(), b"{}");
        assert_eq!(response.line().await.unwrap().unwrap(), b"[]");
        theirs.shutdown().await.unwrap();
        assert_eq!(response.line().await.unwrap(), None);
        drop(response);
        let mut asked = String::new();
        theirs.read_to_string(&mut asked).await.unwrap();
        let head = "POST /scale HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n";
        assert_eq!(asked, format!("{head}{{\"count\":3}}"));
    }
}
