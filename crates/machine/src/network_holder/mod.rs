//! The process that passes the frames of a machine on a bridge, below the machine's keeper: `onecopy network-holder`.
//!
//! ```text
//!  keeper ── makes interface and state, holds both descriptors ──> network holder ── takes them, passes frames
//!     ^                                                                 │ network.sock
//!     └───────────────── a new keeper takes them back <────────────────┘
//! ```
//!
//! Both hold the interface and the memory file with what is held, and each gives them to the other's successor. A
//! holder that dies loses what it has in hand, as a wire would, and nothing of what it holds: [`onecopy_network`]. When
//! both die at once the interface is gone, and the next keeper makes another one of the same name; what was held is
//! lost as on a wire, and what comes is held again (`network.holding`).

mod client;
mod protocol;

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use onecopy_control::{Answer, server, socket};
use onecopy_directory::atomic_file;
use onecopy_network::{NetworkError, Passer, Remote, State, Tap};
use onecopy_postgres::ServiceUser;
use rustix::fs::Mode;
use rustix::process::umask;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use crate::files::absent_is_fine;
use crate::keeper::{Role, servers_of};
use crate::memory_server::descriptor_of;
use crate::{MachineError, MachineHome};
pub use client::NetworkClient;
pub use protocol::{EndedEpoch, Request, ServedNetwork};

/// What a network holder takes over, by its numbers in the process that has started it.
#[derive(Debug, Clone, Copy)]
pub struct Inherited {
    /// The tap interface.
    pub tap: i32,
    /// The memory file with what is held.
    pub state: i32,
}

/// Passes the frames of the machine in `directory` until SIGTERM. Call it from the process's only thread.
///
/// # Errors
/// [`MachineError::Network`], [`MachineError::File`].
pub async fn run(directory: &Path, inherited: Inherited) -> Result<(), MachineError> {
    let home = MachineHome::at(directory)?;
    let user = ServiceUser::resolve(None)?;
    let mut terminated =
        signal(SignalKind::terminate()).map_err(MachineError::file("listen for signals of", home.root()))?;
    let (tap, state) = adopt(&home, inherited)?;
    let numbers = (tap.as_raw_fd(), state.as_raw_fd());
    let own = |descriptor: &OwnedFd| descriptor.try_clone().map_err(MachineError::file("open", home.root()));
    let failed = || home.network_failed();
    let (interface, held) = (Tap::adopt(own(&tap)?).map_err(failed())?, State::open(own(&state)?).map_err(failed())?);
    if is_to_hold(&home) {
        held.hold().map_err(failed())?;
    }
    let frames = listen_for_qemu(&home)?;
    let (passer, remote) = Passer::new(interface, held, (frames, user.user_id())).map_err(failed())?;
    let listener = socket::remove(&home.network_socket()).and_then(|()| socket::listen(&home.network_socket()));
    let listener = listener.map_err(MachineError::file("listen on", home.network_socket()))?;
    // All that needs them is open. Who gets hold of this process by a frame is root in name alone.
    give_up_rights().map_err(MachineError::file("give up rights in", "the network holder"))?;
    let (died, mut has_died) = oneshot::channel();
    let passing = std::thread::Builder::new().name("frames".to_owned()).spawn(move || {
        let _ = died.send(passer.run());
    });
    passing.map_err(MachineError::file("start a thread in", "the network holder"))?;
    tracing::info!("the network is held");
    let served = Served { home: home.clone(), numbers, remote };
    tokio::spawn(server::serve(listener, move |request| served.respond(request), std::future::pending()));
    tokio::select! {
        _ = terminated.recv() => Ok(()),
        ended = &mut has_died => ended.unwrap_or(Err(NetworkError::Ended)).map_err(failed()),
    }
}

/// What the process that has started this one holds.
fn adopt(home: &MachineHome, inherited: Inherited) -> Result<(OwnedFd, OwnedFd), MachineError> {
    let holders = servers_of(Role::Network, home).map_err(MachineError::file("look for who holds", home.root()))?;
    // Two would each write the state of the other.
    if let Some(other) = holders.into_iter().find(|holder| *holder != std::process::id()) {
        let reason = format!("process {other} holds its network already");
        return Err(MachineError::Ended { machine: home.name().to_string(), reason });
    }
    let keeper = rustix::process::getppid().map_or(0, |process| process.as_raw_nonzero().get().unsigned_abs());
    let taken = |number| {
        descriptor_of(keeper, number).map_err(MachineError::file("take over descriptors of the keeper of", home.root()))
    };
    Ok((taken(inherited.tap)?, taken(inherited.state)?))
}

/// Where QEMU connects: in a directory that only its account and root enter, so its mode need not keep anybody out.
/// Nothing there is followed: a name that is taken is an error.
fn listen_for_qemu(home: &MachineHome) -> Result<UnixListener, MachineError> {
    let path = frames_socket(home);
    let before = umask(Mode::empty());
    let listener = socket::remove(&path).and_then(|()| UnixListener::bind(&path));
    umask(before);
    listener.map_err(MachineError::file("listen on", &path))
}

/// Where QEMU connects.
pub(crate) fn frames_socket(home: &MachineHome) -> PathBuf {
    home.in_run("frames.sock")
}

fn give_up_rights() -> std::io::Result<()> {
    set_no_new_privs(true)?;
    let none = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?)
}

/// Whether it is written down that what the machine sends is held: no holder passes it on that has lost its state.
pub(crate) fn is_to_hold(home: &MachineHome) -> bool {
    home.holding_file().exists()
}

/// What a holder answers with.
struct Served {
    home: MachineHome,
    /// Those of its descriptors.
    numbers: (i32, i32),
    remote: Remote,
}

impl Served {
    fn respond(&self, request: Request) -> Answer {
        let outcome = match request {
            Request::Info => self.remote.statistics().map(|statistics| {
                let (tap_descriptor, state_descriptor) = self.numbers;
                value(ServedNetwork { process_id: std::process::id(), tap_descriptor, state_descriptor, statistics })
            }),
            Request::Hold { enabled } => return self.hold(enabled),
            Request::Drain => self.remote.drain().map(value),
            Request::Cut => self.remote.cut().map(|epoch| value(EndedEpoch { epoch })),
            Request::Release { epoch } => self.remote.release(epoch).map(value),
            Request::Announce { addresses } => self.remote.announce(addresses).map(value),
        };
        Answer::from(outcome)
    }

    /// It is written down first, and forgotten last.
    fn hold(&self, enabled: bool) -> Answer {
        let path = self.home.holding_file();
        if enabled && let Err(error) = atomic_file::write(&path, 0o600, b"") {
            return Answer::Error(error.to_string());
        }
        if let Err(error) = self.remote.set_holding(enabled) {
            return Answer::Error(error.to_string());
        }
        match enabled || absent_is_fine(fs::remove_file(&path)).is_ok() {
            true => Answer::done(()),
            false => Answer::Error(format!("{} cannot be removed", path.display())),
        }
    }
}

fn value(of: impl Serialize) -> serde_json::Value {
    serde_json::to_value(of).expect("answers are strings and numbers")
}
