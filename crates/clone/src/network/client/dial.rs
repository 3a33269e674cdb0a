//! A connection to the other host, up to where the image protocol begins.

use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::CloneError;
use crate::network::RemoteHost;
use crate::network::keys::HostKeys;
use crate::network::protocol::ProtocolError;
use crate::network::request::{HostAnswer, HostRequest, read_line, write_line};

/// A connection, with both hosts known to each other, is there within this.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A stream of bytes, both ways.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// The stream that comes of dialling, or why there is none.
pub type Dialling<'a> = Pin<Box<dyn Future<Output = Result<Box<dyn Stream>, CloneError>> + Send + 'a>>;

/// Makes connections that speak the image protocol from their first byte.
pub trait Dial: Send + Sync + 'static {
    /// One more connection.
    fn dial(&self) -> Dialling<'_>;

    /// Who is dialled, for errors.
    fn peer(&self) -> String;
}

/// A connection to the host at `address` (`HOST:PORT`), each side known to the other.
///
/// # Errors
/// [`CloneError::Network`]: it was not reached; [`CloneError::Trust`].
pub async fn connect(address: &str, keys: &HostKeys) -> Result<TlsStream<TcpStream>, CloneError> {
    connect_to(address, keys, None).await
}

/// The same, to the host with this certificate alone if one is given.
async fn connect_to(
    address: &str,
    keys: &HostKeys,
    certificate: Option<&[u8]>,
) -> Result<TlsStream<TcpStream>, CloneError> {
    let failed = |reason: String| CloneError::Network { peer: address.to_owned(), reason };
    let no_trust = |reason: String| CloneError::Trust { peer: address.to_owned(), reason };
    let connecting = async {
        let name = server_name(address).ok_or_else(|| failed("give its address as HOST:PORT".to_owned()))?;
        let cannot = |error: std::io::Error| failed(format!("cannot connect: {error}"));
        let stream = TcpStream::connect(address).await.map_err(cannot)?;
        stream.set_nodelay(true).map_err(cannot)?;
        let connector = TlsConnector::from(keys.client());
        let stream = connector.connect(name, stream).await.map_err(|error| no_trust(error.to_string()))?;
        let shown = stream.get_ref().1.peer_certificates().and_then(|shown| shown.first());
        match certificate {
            Some(wanted) if shown.is_none_or(|shown| shown.as_ref() != wanted) => Err(no_trust(
                "it is another host than the one that ordered the clone (its certificate is another)".to_owned(),
            )),
            _ => Ok(stream),
        }
    };
    let outcome = timeout(CONNECT_TIMEOUT, connecting).await;
    outcome.unwrap_or_else(|_| Err(failed(format!("no connection within {} s", CONNECT_TIMEOUT.as_secs()))))
}

/// The name or address in `HOST:PORT`; brackets around an IPv6 address are left out.
fn server_name(address: &str) -> Option<ServerName<'static>> {
    let (host, port) = address.rsplit_once(':')?;
    port.parse::<u16>().ok()?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    ServerName::try_from(host.to_owned()).ok()
}

/// Dials the daemon of a source's host.
#[derive(Clone)]
pub struct HostDialler {
    address: String,
    keys: HostKeys,
    certificate: Option<Vec<u8>>,
    source: PathBuf,
}

impl HostDialler {
    /// For the image of the data directory `source` on `host`.
    ///
    /// # Errors
    /// [`CloneError::Keys`] when this host's keys cannot be used.
    pub fn new(host: &RemoteHost, source: PathBuf) -> Result<HostDialler, CloneError> {
        let (address, certificate) = (host.address.clone(), host.certificate.clone());
        Ok(HostDialler { address, keys: HostKeys::load(&host.keys)?, certificate, source })
    }

    async fn open(&self) -> Result<Box<dyn Stream>, CloneError> {
        let failed =
            |error: ProtocolError| CloneError::Network { peer: self.address.clone(), reason: error.to_string() };
        let mut stream = connect_to(&self.address, &self.keys, self.certificate.as_deref()).await?;
        let asking = async {
            write_line(&mut stream, &HostRequest::Image { source: self.source.clone() }).await?;
            match read_line(&mut stream).await? {
                HostAnswer::Ready => Ok(()),
                HostAnswer::Refused { reason } => Err(ProtocolError::refused(&reason)),
                _ => Err(ProtocolError::Unexpected { got: "another answer", wanted: "an image" }),
            }
        };
        let slow = || ProtocolError::Refused(format!("it did not answer within {} s", CONNECT_TIMEOUT.as_secs()));
        timeout(CONNECT_TIMEOUT, asking).await.unwrap_or_else(|_| Err(slow())).map_err(failed)?;
        Ok(Box::new(stream))
    }
}

impl Dial for HostDialler {
    fn dial(&self) -> Dialling<'_> {
        Box::pin(self.open())
    }

    fn peer(&self) -> String {
        self.address.clone()
    }
}

impl fmt::Debug for HostDialler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostDialler").field("address", &self.address).field("source", &self.source).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_their_server() {
        let cases = [
            ("db1.example.org:6440", Some("db1.example.org")),
            ("10.0.0.1:6440", Some("10.0.0.1")),
            ("[::1]:6440", Some("::1")),
            ("db1.example.org", None),
            ("db1:port", None),
            (":6440", None),
            ("a b:6440", None),
        ];
        for (address, name) in cases {
            let found = server_name(address).map(|name| name.to_str().into_owned());
            assert_eq!(found.as_deref(), name, "{address}");
        }
    }
}
