//! The vhost-user-blk back end: a virtio block device for QEMU, with the guest's memory mapped.
//!
//! A front end (QEMU's `vhost-user-blk-pci`) connects to a socket, shares the guest's memory and its rings, and from
//! then on requests pass without it: the guest kicks a ring's event descriptor, this process answers in the used ring.
//! Each request shows the guest physical address of its data, which is what the page map wants.
//!
//! ```text
//!  front end --socket-- connection (messages) --- ring 0: thread, progress, in-flight area ---+
//!                            |                    ring 1 ...                                  +-- Disk
//!                            +--- memory (regions, dirty log) --- used by all rings ----------+
//! ```
//! [`chain`] and [`request`] read what the guest wrote: hostile input. [`progress`] keeps a ring's counters. Rules that
//! cost dearly when they were broken, and where they are kept:
//! - every write into guest memory is marked while a machine migrates: [`dirty`];
//! - requests under way survive the death of this process: [`inflight`];
//! - what is hashed and written is a copy: `ring::worker`;
//! - the driver is called when a ring starts: [`ring`];
//! - the disk is this process's only from the first ring's start to the last one's stop: [`connection`];
//! - answers held back are let go when a ring stops: [`ring`].

mod chain;
mod config;
mod connection;
mod counters;
mod dirty;
mod drain;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod inflight;
mod memory;
mod pending;
mod progress;
mod request;
mod ring;
mod split;
#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::{Attachment, Disk, DiskError, Epoch};
use connection::Connection;
use counters::Counters;
use drain::{Drain, StopReason};
use ring::Ring;

pub use counters::VhostUserStatistics;
pub use pending::CompletionHold;

/// Queues of a device at most: one for each of the guest's processors is what a driver uses.
pub const QUEUES_MAX: u16 = 64;

/// How long nobody is let in after letting in has failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How the device looks.
#[derive(Clone, Debug)]
pub struct VhostUserOptions {
    /// Queues: 1 to [`QUEUES_MAX`]. QEMU's `num-queues` must not be more.
    pub queues: u16,
    /// The serial number that the guest sees: at most 20 bytes of it.
    pub serial: String,
    /// Whether writes into guest memory are marked during migration. Without it a migrated guest is corrupt: only the
    /// proof of that turns it off.
    pub log_dirty: bool,
    /// Which answers are kept back from the first one on; [`VhostUserBackend::hold`] changes it.
    pub hold: CompletionHold,
}

impl Default for VhostUserOptions {
    fn default() -> VhostUserOptions {
        VhostUserOptions { queues: 1, serial: "onecopy".into(), log_dirty: true, hold: CompletionHold::Nothing }
    }
}

/// What the back end's threads share.
struct Shared {
    attachment: Arc<Attachment>,
    rings: Vec<Arc<Ring>>,
    counters: Arc<Counters>,
    log_dirty: bool,
    drain: Drain,
    /// The disk, while this back end has it.
    attached: Mutex<Option<Disk>>,
    stopping: AtomicBool,
    stop: OwnedFd,
    /// The front end's socket, to end its connection from outside.
    front_end: Mutex<Option<UnixStream>>,
}

impl Shared {
    /// Stops all rings, which wait side by side, and gives the disk back.
    fn stop_rings(&self, reason: StopReason) -> Result<(), DiskError> {
        for ring in &self.rings {
            ring.enable(false);
            ring.begin_stop(reason);
        }
        self.drain.during(reason, |deadline| {
            for ring in &self.rings {
                ring.stop(reason, deadline);
            }
        });
        self.detach_if_idle()
    }

    /// Takes the disk, for a ring that starts.
    fn attach(&self) -> Result<Disk, DiskError> {
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(disk) = &*attached {
            return Ok(disk.clone());
        }
        Ok(attached.insert(self.attachment.attach()?).clone())
    }

    /// Gives the disk back when no ring runs.
    fn detach_if_idle(&self) -> Result<(), DiskError> {
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if self.rings.iter().any(|ring| ring.is_running()) || attached.take().is_none() {
            return Ok(());
        }
        self.attachment.detach()
    }
}

/// A back end that listens. One front end at a time; it may go and come back.
pub struct VhostUserBackend {
    shared: Arc<Shared>,
    socket: PathBuf,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl VhostUserBackend {
    /// Listens at a socket. The disk is taken when a front end starts a ring.
    ///
    /// # Errors
    /// There is no disk, or somebody listens there already, or the socket cannot be made.
    pub fn serve(
        attachment: Arc<Attachment>,
        socket: &Path,
        options: VhostUserOptions,
    ) -> Result<VhostUserBackend, DiskError> {
        let failed = |action| move |error: std::io::Error| DiskError::io(action, socket, error);
        attachment.geometry()?;
        let counters = Arc::new(Counters::default());
        let rings: Vec<Arc<Ring>> = (0..options.queues.clamp(1, QUEUES_MAX))
            .map(|index| Ring::new(index, counters.clone(), options.serial.clone()).map(Arc::new))
            .collect::<Result<_, _>>()
            .map_err(failed("make rings for"))?;
        rings.iter().for_each(|ring| ring.set_hold(options.hold));
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| failed("make rings for")(error.into()))?;
        let listener = listen(socket).map_err(failed("listen at"))?;
        let shared = Arc::new(Shared {
            attachment,
            rings,
            counters,
            log_dirty: options.log_dirty,
            drain: Drain::default(),
            attached: Mutex::new(None),
            stopping: AtomicBool::new(false),
            stop,
            front_end: Mutex::new(None),
        });
        let served = shared.clone();
        let thread = std::thread::Builder::new()
            .name("vhost-user".into())
            .spawn(move || accept(&served, &listener))
            .map_err(failed("start a thread for"))?;
        Ok(VhostUserBackend { shared, socket: socket.to_owned(), thread: Mutex::new(Some(thread)) })
    }

    /// Keeps answers back from now on. Those kept already stay until they are released.
    pub fn hold(&self, policy: CompletionHold) {
        self.shared.rings.iter().for_each(|ring| ring.set_hold(policy));
    }

    /// Lets go answers of this epoch and all before it.
    pub fn release(&self, upto: Epoch) {
        self.shared.rings.iter().for_each(|ring| ring.release(Some(upto)));
    }

    /// What the back end did so far.
    pub fn statistics(&self) -> VhostUserStatistics {
        let rings = &self.shared.rings;
        let running = rings.iter().filter(|ring| ring.is_running()).count();
        let held: usize = rings.iter().map(|ring| ring.held()).sum();
        self.shared.counters.statistics(running as u64, held as u64)
    }

    /// Closes the back end: the front end loses its connection, the disk is given back. What has no answer yet, because
    /// it waits for another host or is kept back, stays marked in flight for the next back end.
    pub fn stop(&self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        // A full counter wakes, too.
        let _ = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes());
        if let Some(stream) = self.shared.front_end.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            // A front end that has gone already is as good.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            if thread.join().is_err() {
                tracing::error!("the back end's thread panicked");
            }
            // Somebody may have removed it, which is what is wanted.
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}

impl Drop for VhostUserBackend {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Listens, in the place of a back end that has died; not in that of one that lives.
fn listen(socket: &Path) -> std::io::Result<UnixListener> {
    match UnixListener::bind(socket) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            // What is no socket is somebody's file, and one that does not refuse may be alive.
            let is_socket = std::fs::symlink_metadata(socket)?.file_type().is_socket();
            let is_refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::ConnectionRefused;
            if !is_socket || !UnixStream::connect(socket).is_err_and(is_refused) {
                return Err(error);
            }
            std::fs::remove_file(socket)?;
            UnixListener::bind(socket)
        }
        outcome => outcome,
    }
}

/// Serves one front end after the other.
fn accept(backend: &Arc<Shared>, listener: &UnixListener) {
    while !backend.stopping.load(Ordering::SeqCst) {
        let mut descriptors = [PollFd::new(listener, PollFlags::IN), PollFd::new(&backend.stop, PollFlags::IN)];
        if poll(&mut descriptors, None).is_err() || !descriptors[0].revents().contains(PollFlags::IN) {
            continue;
        }
        match listener.accept() {
            Ok((stream, _)) => serve_front_end(backend, stream),
            Err(error) => {
                tracing::warn!(%error, "a front end was not let in");
                // Descriptors may be short: who asks at once again only burns a processor.
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// Serves one front end until it goes.
fn serve_front_end(backend: &Arc<Shared>, stream: UnixStream) {
    backend.counters.connections.add(1);
    let handle = match stream.try_clone() {
        Ok(handle) => handle,
        Err(error) => return tracing::warn!(%error, "a front end was not let in"),
    };
    let front_end = || backend.front_end.lock().unwrap_or_else(PoisonError::into_inner);
    *front_end() = Some(handle);
    // Whoever stopped the back end before that could not end this connection.
    if !backend.stopping.load(Ordering::SeqCst) {
        let connection = Arc::new(Mutex::new(Connection::new(backend.clone())));
        let mut handler = BackendReqHandler::from_stream(stream, connection);
        let ended = loop {
            if let Err(error) = handler.handle_request() {
                break error;
            }
        };
        match ended {
            Error::Disconnected => tracing::debug!("the front end has gone"),
            error => tracing::warn!(%error, "the front end's connection ends"),
        }
    }
    *front_end() = None;
}
