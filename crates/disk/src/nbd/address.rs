//! Where an NBD server is: an address of the network, or a socket in the file system.

use std::fmt;
use std::fs;
use std::io;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::socket::Socket;

/// An address, written `HOST:PORT` or `unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// Host (in brackets if it is an IPv6 address) and port.
    Tcp(String),
    /// A socket's path.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err("unix: without a path".into()) } else { Ok(Address::Unix(path.into())) };
        }
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(Address::Tcp(text.into())),
            _ => Err(format!("{text:?} is no address: HOST:PORT or unix:PATH")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => f.write_str(address),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Address {
    /// Whether only this host can connect: a socket in the file system, or a name all of whose addresses are loopback
    /// ones. A name that cannot be looked up is not known to be.
    pub fn is_of_this_host(&self) -> bool {
        match self {
            Address::Unix(_) => true,
            Address::Tcp(address) => address
                .to_socket_addrs()
                .is_ok_and(|found| found.into_iter().all(|address| address.ip().to_canonical().is_loopback())),
        }
    }

    /// Connects. Each of the host's addresses gets as long as `timeout`.
    pub(crate) fn dial(&self, timeout: Duration) -> io::Result<Socket> {
        match self {
            Address::Unix(path) => UnixStream::connect(path).map(Socket::unix),
            Address::Tcp(address) => {
                let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
                for address in address.to_socket_addrs()? {
                    match TcpStream::connect_timeout(&address, timeout) {
                        Ok(stream) => return Socket::tcp(stream),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }

    /// Listens; at a socket of the file system for this account only. A socket file that a dead server left behind is
    /// replaced.
    pub(super) fn listen(&self) -> io::Result<(Listener, Address)> {
        match self {
            Address::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                let bound = Address::Tcp(listener.local_addr()?.to_string());
                Ok((Listener::Tcp(listener), bound))
            }
            Address::Unix(path) => {
                let is_socket = fs::symlink_metadata(path).is_ok_and(|there| there.file_type().is_socket());
                let is_dead = || {
                    matches!(
                        UnixStream::connect(path),
                        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused
                    )
                };
                if is_socket && is_dead() {
                    fs::remove_file(path)?;
                }
                let listener = UnixListener::bind(path)?;
                fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
                listener.set_nonblocking(true)?;
                Ok((Listener::Unix(listener), self.clone()))
            }
        }
    }
}

/// Where clients come in; accepting never waits.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    pub(super) fn accept(&self) -> io::Result<Socket> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                Socket::tcp(stream)
            }
            Listener::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                Ok(Socket::unix(stream))
            }
        }
    }
}

impl std::os::fd::AsFd for Listener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for text in ["127.0.0.1:10809", "[::1]:1", "host.example:65535", "unix:/run/a b.sock"] {
            assert_eq!(text.parse::<Address>().map(|address| address.to_string()).as_deref(), Ok(text));
        }
        for text in ["", "unix:", "host", ":1", "host:65536", "host:port", "/run/a.sock"] {
            assert!(text.parse::<Address>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn only_sockets_and_loopback_addresses_are_of_this_host() {
        let is_of_this_host = |text: &str| text.parse::<Address>().unwrap().is_of_this_host();
        for text in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "unix:/run/a.sock"] {
            assert!(is_of_this_host(text), "{text}");
        }
        for text in ["0.0.0.0:1", "[::]:1", "192.0.2.1:1", "nowhere.invalid:1"] {
            assert!(!is_of_this_host(text), "{text}");
        }
    }

    #[test]
    fn a_dead_servers_socket_is_replaced_and_a_living_ones_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let address = Address::Unix(directory.path().join("socket"));
        let living = address.listen().unwrap();
        assert_eq!(fs::metadata(directory.path().join("socket")).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(address.listen().is_err());
        drop(living);
        address.listen().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "precious").unwrap();
        assert!(Address::Unix(file.clone()).listen().is_err());
        assert_eq!(fs::read(file).unwrap(), b"precious");
    }
}
