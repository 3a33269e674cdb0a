//! The endpoint of a host: who connects, and what for.

use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::keys::HostKeys;
use super::protocol::ProtocolError;
use super::request::{HostRequest, read_line};

/// Whoever connects has shown his certificate and said what he wants within this, or is sent away.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// Another host, known by its certificate, and what it wants.
#[derive(Debug)]
pub struct IncomingConnection {
    /// What is said from here on.
    pub stream: TlsStream<TcpStream>,
    /// What it wants.
    pub request: HostRequest,
    /// Who it is, as DER.
    pub certificate: Vec<u8>,
}

/// Lets a connection in.
///
/// # Errors
/// [`ProtocolError`] for who has no certificate of the authority, says nothing, or nothing known.
pub async fn receive(stream: TcpStream, keys: &HostKeys) -> Result<IncomingConnection, ProtocolError> {
    let greeting = async {
        stream.set_nodelay(true)?;
        let mut stream = TlsAcceptor::from(keys.server()).accept(stream).await?;
        let shown = stream.get_ref().1.peer_certificates().and_then(|shown| shown.first());
        let certificate = shown.ok_or(ProtocolError::Malformed("no certificate was shown"))?.as_ref().to_vec();
        let request = read_line(&mut stream).await?;
        Ok(IncomingConnection { stream, request, certificate })
    };
    let slow = |_| ProtocolError::Broken(std::io::ErrorKind::TimedOut.into());
    timeout(GREETING_TIMEOUT, greeting).await.map_err(slow)?
}
