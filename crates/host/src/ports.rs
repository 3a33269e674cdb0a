//! Ports of 127.0.0.1 that are chosen here and remembered.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;

use rand::RngExt;

/// Below those that Linux gives to connections that go out and to who asks for any (32768 and up; ip(7)), so that none
/// of them takes one while who it was chosen for is at rest.
pub(crate) const PORTS: Range<u16> = 20_000..32_000;

/// How many of them are tried.
const ATTEMPTS_MAX: u32 = 1000;

/// Whether a server can listen on this port now.
pub(crate) fn is_free(port: u16) -> bool {
    TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).is_ok()
}

/// One of [`PORTS`] that is free and none of `taken`; none when none is found.
pub(crate) fn free_port(taken: &BTreeSet<u16>) -> Option<u16> {
    let mut random = rand::rng();
    let mut ports = (0..ATTEMPTS_MAX).map(|_| random.random_range(PORTS));
    ports.find(|port| !taken.contains(port) && is_free(*port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_free_and_stays_out_of_the_way_of_connections() {
        let kernels = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").expect("the kernel's range");
        let first: u16 = kernels.split_whitespace().next().and_then(|first| first.parse().ok()).expect("a number");
        let port = free_port(&BTreeSet::new()).expect("a port");
        assert!(PORTS.contains(&port) && port < first, "{port}, the kernel's begin at {first}");
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        assert!(taken.is_ok(), "{taken:?}");
        assert!(!is_free(port));
        let all_but_one: BTreeSet<u16> = PORTS.skip(1).collect();
        assert!(free_port(&all_but_one).is_none_or(|port| port == PORTS.start));
    }
}
