//! The endpoint of a host: who connects, and what for.

use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::keys::HostKeys;
use super::protocol::ProtocolError;
use super::request::{HostRequest, read_line};

/// Whoever connects has shown his certificate and said what he wants within this, or is sent away.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// A host that says nothing for so long, as while an order is carried out, is asked by TCP whether it is there ..
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
/// .. so often, and its connection has ended when it answers none.
const KEEPALIVE_QUESTIONS: u32 = 6;
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

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
        keep_alive(&stream)?;
        let mut stream = TlsAcceptor::from(keys.server()).accept(stream).await?;
        let shown = stream.get_ref().1.peer_certificates().and_then(|shown| shown.first());
        let certificate = shown.ok_or(ProtocolError::Malformed("no certificate was shown"))?.as_ref().to_vec();
        let request = read_line(&mut stream).await?;
        Ok(IncomingConnection { stream, request, certificate })
    };
    let slow = |_| ProtocolError::Broken(std::io::ErrorKind::TimedOut.into());
    timeout(GREETING_TIMEOUT, greeting).await.map_err(slow)?
}

/// A host that has lost its power keeps no connection. Not `TCP_USER_TIMEOUT`: one that takes nothing for a while is
/// there. Source: tcp(7).
fn keep_alive(stream: &TcpStream) -> std::io::Result<()> {
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_QUESTIONS)?;
    Ok(sockopt::set_socket_keepalive(stream, true)?)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_host_that_is_gone_without_a_word_keeps_its_connection_for_two_minutes() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_near, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (stream, _) = accepted.unwrap();
        keep_alive(&stream).unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        let interval = sockopt::tcp_keepintvl(&stream).unwrap() * sockopt::tcp_keepcnt(&stream).unwrap();
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap() + interval, Duration::from_secs(120));
    }
}
