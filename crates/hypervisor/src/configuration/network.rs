//! The guest's network cards and what they are plugged into.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One network card of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its name inside QEMU, letters, digits and `-`; unique in the machine.
    pub id: String,
    /// Its address, `52:54:00:12:34:56`; none: QEMU's choice, the same for every machine.
    pub hardware_address: Option<String>,
    /// What it is plugged into.
    pub end: NetworkEnd,
}

impl Network {
    /// A card plugged into `end`.
    pub fn new(id: impl Into<String>, end: NetworkEnd) -> Network {
        Network { id: id.into(), hardware_address: None, end }
    }
}

/// What a card is plugged into.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetworkEnd {
    /// QEMU's own network: the guest is 10.0.2.15, the host's loopback is 10.0.2.2. Needs no rights on the host.
    User {
        /// Ports of the host that lead to the guest.
        forwards: Vec<Forward>,
        /// The guest reaches nothing, not even the host; the forwards work nevertheless.
        restricted: bool,
    },
    /// A stream of frames, each behind its length (32 bits, big-endian).
    Stream {
        /// The Unix socket.
        path: PathBuf,
        /// Who listens.
        role: SocketRole,
    },
    /// Nothing: a card without a cable.
    Unplugged,
}

/// Which end of a stream QEMU is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SocketRole {
    /// It listens.
    Listens,
    /// It connects.
    Connects {
        /// After a lost connection again after this many milliseconds; none: never.
        reconnect_ms: Option<u32>,
    },
}

/// A port of the host that leads to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forward {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// The address of the host that is listened on.
    pub host_address: Ipv4Addr,
    /// The port of the host.
    pub host_port: u16,
    /// The port of the guest.
    pub guest_port: u16,
}

impl Forward {
    /// A TCP port of the host's loopback.
    pub fn tcp(host_port: u16, guest_port: u16) -> Forward {
        Forward { protocol: Protocol::Tcp, host_address: Ipv4Addr::LOCALHOST, host_port, guest_port }
    }
}

/// What is forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}
