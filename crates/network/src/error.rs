//! What can go wrong with a machine's network.

use std::io;
use std::path::{Path, PathBuf};

/// Why an operation on a machine's network failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// No hardware address.
    #[error(
        "{text:?} is no hardware address of a card: six numbers such as 52:54:00:12:34:56, the first one even, not all \
         zero"
    )]
    HardwareAddress {
        /// What was given.
        text: String,
    },
    /// A name that no interface can have.
    #[error("{name:?} is no name of a network interface: 1 to 15 characters, no space, slash or colon")]
    InterfaceName {
        /// What was given.
        name: String,
    },
    /// There is no such bridge.
    #[error("there is no bridge {bridge} in this network namespace; make it with: ip link add {bridge} type bridge")]
    NoBridge {
        /// What was given.
        bridge: String,
    },
    /// Such an interface, and no bridge.
    #[error("{name} is an interface and no bridge; `ip link show type bridge` names the bridges")]
    NotABridge {
        /// What was given.
        name: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {what}: {source}")]
    Io {
        /// What was to be done.
        action: &'static str,
        /// With what.
        what: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The descriptor that was kept holds no state of a network.
    #[error("the kept state of the network is none: {what}; what it held is lost, as on a wire")]
    State {
        /// What is wrong with it.
        what: String,
    },
    /// The machine's frames do not end where they should.
    #[error("the machine's stream of frames ends within one: {bytes} bytes of it are there")]
    NoFrameBorder {
        /// Bytes after the last whole frame.
        bytes: usize,
    },
    /// The machine has sent more than can be taken while it stands.
    #[error("more than {bytes_max} bytes wait in the machine's stream: it does not stand")]
    DrainTooLong {
        /// The bound.
        bytes_max: usize,
    },
    /// An epoch that has not ended.
    #[error("epoch {epoch} of the network has not ended: the open one is {open}")]
    OpenEpoch {
        /// The one asked for.
        epoch: u64,
        /// The open one.
        open: u64,
    },
    /// The passing thread has ended.
    #[error("no frames are passed any more")]
    Ended,
}

impl NetworkError {
    /// For `map_err`: the operating system refused.
    pub(crate) fn io(action: &'static str, what: impl AsRef<Path>) -> impl FnOnce(io::Error) -> NetworkError {
        let what = what.as_ref().to_owned();
        move |source| NetworkError::Io { action, what, source }
    }
}
