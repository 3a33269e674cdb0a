//! What a host is asked first on every connection: one JSON object a line, one a connection.
//!
//! ```text
//!  ping   ──> pong
//!  image  ──> ready, from then on the image protocol with the source's service
//!  clone  ──> progress, progress, .. done      (or refused)
//!  machine ─> progress, one                    (or ready, and from then on what was ordered)
//! ```

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::protocol::ProtocolError;

/// The longest line: a clone's order with its settings.
pub const LINE_BYTES_MAX: usize = 1 << 20;

/// What a host is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum HostRequest {
    /// Are you there?
    Ping,
    /// The image of a source of yours.
    Image {
        /// Its data directory.
        source: PathBuf,
    },
    /// Make a clone on your side.
    Clone {
        /// Which, as the host's program understands it.
        order: serde_json::Value,
    },
    /// Something about a virtual machine.
    Machine {
        /// What, as the host's program understands it.
        order: serde_json::Value,
    },
}

/// What a host answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum HostAnswer {
    /// I am there.
    Pong {
        /// The program's version.
        version: String,
    },
    /// The image protocol begins.
    Ready,
    /// How far it is.
    Progress {
        /// What has happened, as the program tells it.
        event: serde_json::Value,
    },
    /// That was all.
    Done,
    /// No.
    Refused {
        /// Why not, and what to do.
        reason: String,
    },
}

/// Says one thing.
///
/// # Errors
/// [`ProtocolError::Broken`]; [`ProtocolError::TooLong`].
pub async fn write_line<W>(writer: &mut W, line: &impl Serialize) -> Result<(), ProtocolError>
where
    W: AsyncWrite + Unpin,
{
    let mut bytes = serde_json::to_vec(line).map_err(std::io::Error::from)?;
    if bytes.len() > LINE_BYTES_MAX {
        return Err(ProtocolError::TooLong(bytes.len()));
    }
    bytes.push(b'\n');
    writer.write_all(&bytes).await?;
    Ok(writer.flush().await?)
}

/// Hears one thing; takes no byte after its line, as another protocol may follow.
///
/// # Errors
/// [`ProtocolError::Broken`], [`ProtocolError::TooLong`], [`ProtocolError::Malformed`].
pub async fn read_line<R, T>(reader: &mut R) -> Result<T, ProtocolError>
where
    R: AsyncRead + Unpin,
    T: DeserializeOwned,
{
    let mut line = Vec::new();
    loop {
        match reader.read_u8().await? {
            b'\n' => break,
            _ if line.len() == LINE_BYTES_MAX => return Err(ProtocolError::TooLong(line.len())),
            byte => line.push(byte),
        }
    }
    serde_json::from_slice(&line).map_err(|_| ProtocolError::Malformed("a line that is no known request or answer"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_line_is_read_and_nothing_after_it() {
        let (mut near, mut far) = tokio::io::duplex(256);
        let request = HostRequest::Image { source: "/srv/a".into() };
        write_line(&mut near, &request).await.unwrap();
        near.write_all(b"rest").await.unwrap();
        assert_eq!(read_line::<_, HostRequest>(&mut far).await.unwrap(), request);
        let mut rest = [0; 4];
        far.read_exact(&mut rest).await.unwrap();
        assert_eq!(&rest, b"rest");
        near.write_all(b"{\"request\":\"dance\"}\n").await.unwrap();
        assert!(matches!(read_line::<_, HostRequest>(&mut far).await, Err(ProtocolError::Malformed(_))));
        let endless = vec![b' '; LINE_BYTES_MAX + 10];
        let mut endless: &[u8] = &endless;
        assert!(matches!(read_line::<_, HostRequest>(&mut endless).await, Err(ProtocolError::TooLong(_))));
    }
}
