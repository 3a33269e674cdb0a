//! Ports for servers that take a number and no socket.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

/// The sockets that hold ports until this process ends.
static HELD: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());

/// A port of 127.0.0.1 for a server that this test will start. A bound socket holds it until the process ends: the
/// kernel gives it to nobody who asks for any port, and to no connection. A server that sets `SO_REUSEADDR`, as
/// PostgreSQL, MariaDB and the router do, may listen there all the same, again and again, because the socket that holds
/// it does not listen (Linux, `inet_csk_bind_conflict`).
///
/// # Panics
///
/// When the kernel has no port left.
pub fn free_port() -> u16 {
    // No program that the test starts shall have it.
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    // Afterwards: with it, the kernel might choose a port that another test holds in this way.
    sockopt::set_socket_reuseaddr(&socket, true).expect("an option of every socket");
    let address = getsockname(&socket).expect("it is bound");
    let address = SocketAddrV4::try_from(address).expect("of the family that was asked for");
    HELD.lock().unwrap_or_else(PoisonError::into_inner).push(socket);
    address.port()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::{TcpListener, TcpStream};

    use super::free_port;

    #[test]
    fn a_held_port_is_for_its_server_alone() {
        let port = free_port();
        let others: BTreeSet<u16> = (0..200).map(|_| free_port()).collect();
        assert!(others.len() == 200 && !others.contains(&port), "a port was given away twice");
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "nobody listens yet");
        // The standard library sets SO_REUSEADDR, as servers do.
        for _ in 0..2 {
            let server = TcpListener::bind(("127.0.0.1", port)).expect("the server may listen, also a second time");
            assert!(TcpStream::connect(("127.0.0.1", port)).is_ok());
            assert!(TcpListener::bind(("127.0.0.1", port)).is_err(), "two servers share a port");
            drop(server);
        }
    }
}
