//! TCP and Unix sockets behind one type: servers are reached by either, clients come by either.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixStream};

/// The longest and the shortest time that the kernel takes for keepalive.
const KEEPALIVE_MAX: Duration = Duration::from_secs(32_767);
const KEEPALIVE_MIN: Duration = Duration::from_secs(1);

/// How often an unresponsive peer is asked before it is given up: one question that is lost ends no connection.
const KEEPALIVE_QUESTIONS: u32 = 6;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// Host name or address, and port.
    Tcp(String, u16),
    /// The socket file, `<directory>/.s.PGSQL.<port>`.
    Unix(PathBuf),
}

impl Address {
    /// The address that libpq would use for `host` and `port`: a host that starts with `/` is a socket directory.
    pub fn of(host: &str, port: u16) -> Address {
        if host.starts_with('/') {
            Address::Unix(PathBuf::from(host).join(format!(".s.PGSQL.{port}")))
        } else {
            Address::Tcp(host.to_owned(), port)
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Tcp(host, port) => write!(formatter, "{host}:{port}"),
            Address::Unix(path) => write!(formatter, "{}", path.display()),
        }
    }
}

/// A connected stream.
#[derive(Debug)]
pub enum Socket {
    /// TCP, without Nagle's delay.
    Tcp(TcpStream),
    /// Unix domain.
    Unix(UnixStream),
}

impl Socket {
    /// Connects to `address`.
    pub async fn connect(address: &Address) -> io::Result<Socket> {
        match address {
            Address::Tcp(host, port) => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                Ok(Socket::Tcp(stream))
            }
            Address::Unix(path) => Ok(Socket::Unix(UnixStream::connect(path).await?)),
        }
    }

    /// Has the kernel ask a peer that says nothing for `idle` whether it is there, and end the connection when it
    /// acknowledges nothing for as long again, neither that question nor what was sent to it. Source: tcp(7).
    ///
    /// # Errors
    /// What the kernel does not take.
    pub fn keep_alive(&self, idle: Duration) -> io::Result<()> {
        let Socket::Tcp(stream) = self else { return Ok(()) };
        let idle = idle.min(KEEPALIVE_MAX);
        sockopt::set_tcp_keepidle(stream, idle)?;
        sockopt::set_tcp_keepintvl(stream, (idle / KEEPALIVE_QUESTIONS).max(KEEPALIVE_MIN))?;
        sockopt::set_tcp_keepcnt(stream, KEEPALIVE_QUESTIONS)?;
        sockopt::set_tcp_user_timeout(stream, u32::try_from((idle * 2).as_millis()).unwrap_or(u32::MAX))?;
        Ok(sockopt::set_socket_keepalive(stream, true)?)
    }

    /// Where a client comes from; none where that has no name.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        match self {
            Socket::Tcp(stream) => stream.peer_addr().ok(),
            Socket::Unix(_) => None,
        }
    }

    /// Reads what is there without waiting; `WouldBlock` when nothing is.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.try_read(buffer),
            Socket::Unix(stream) => stream.try_read(buffer),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Tcp(stream) => stream.as_fd(),
            Socket::Unix(stream) => stream.as_fd(),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Socket::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Socket::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Socket::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Socket::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Socket::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Socket::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

/// Where clients arrive.
#[derive(Debug)]
pub struct Listener(TcpListener);

impl Listener {
    /// Listens on `address`; port 0 takes a free one.
    pub async fn bind(address: SocketAddr) -> io::Result<Listener> {
        Ok(Listener(TcpListener::bind(address).await?))
    }

    /// The address with the port that was taken.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// The next client.
    pub async fn accept(&self) -> io::Result<(Socket, SocketAddr)> {
        let (stream, peer) = self.0.accept().await?;
        stream.set_nodelay(true)?;
        Ok((Socket::Tcp(stream), peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host that is gone without a word is found out within twice the time that was asked for, however long that is.
    ///
    /// Spec: A2
    #[tokio::test]
    async fn a_silent_peer_is_asked_for_as_often_and_as_long_as_said() {
        let listener = Listener::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
        let address = Address::of("127.0.0.1", listener.local_address().unwrap().port());
        let (_client, accepted) = tokio::join!(Socket::connect(&address), listener.accept());
        let (socket, _) = accepted.unwrap();
        let Socket::Tcp(stream) = &socket else { panic!("a TCP listener accepts TCP") };
        assert!(!sockopt::socket_keepalive(stream).unwrap());
        for (asked, idle, interval) in [(60, 60, 10), (1, 1, 1), (40_000, 32_767, 5462)] {
            socket.keep_alive(Duration::from_secs(asked)).unwrap();
            assert!(sockopt::socket_keepalive(stream).unwrap());
            assert_eq!(sockopt::tcp_keepidle(stream).unwrap(), Duration::from_secs(idle), "{asked}");
            assert_eq!(sockopt::tcp_keepintvl(stream).unwrap().as_secs(), interval, "{asked}");
            assert_eq!(u64::from(sockopt::tcp_user_timeout(stream).unwrap()), idle * 2000, "{asked}");
        }
    }
}
