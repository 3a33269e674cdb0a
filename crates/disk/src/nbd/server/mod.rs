//! The server itself: who listens, who is connected, and how it ends.

mod budget;
mod connection;
mod exports;
mod negotiation;
mod replies;
#[cfg(test)]
mod tests;
mod transmission;
mod workers;

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use tracing::{debug, warn};

use super::address::{Address, Listener};
use super::socket::Socket;
use super::tls;
use crate::{DiskError, TlsFiles};
use budget::Budget;
pub use exports::{Content, DiskExports, Export, ExportInformation, Exports, SourceExports};

/// After a failed accept (no descriptors left) the next try waits so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Places beyond those that are allowed, of connections that were ended for others and have not gone yet.
const ENDING_MAX: u64 = 16;

/// How long connections that are cut may take to end.
const CUT_TIMEOUT: Duration = Duration::from_secs(5);

/// How a server is opened.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Where clients come in. Port 0 is any free one: [`Server::addresses`] tells which.
    pub addresses: Vec<Address>,
    /// With certificates, every client must encrypt and show a certificate of the same authority.
    pub tls: Option<TlsFiles>,
    /// Connections at one time, with those of lost clients whose reads have not returned; one more is closed at once.
    pub connections_max: usize,
}

impl ServerOptions {
    /// Plain connections at one address, 128 at a time.
    pub fn at(address: Address) -> ServerOptions {
        ServerOptions { addresses: vec![address], tls: None, connections_max: 128 }
    }
}

/// What a server did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ServerStatistics {
    /// Connections now, with those of lost clients whose reads have not returned.
    pub connections: u64,
    /// Connections ever.
    pub connections_total: u64,
    /// Requests received.
    pub requests: u64,
    /// Of them, answered with an error.
    pub errors: u64,
    /// Bytes sent for reads, holes included.
    pub read_bytes: u64,
    /// Bytes received for writes.
    pub written_bytes: u64,
}

/// Counters behind [`ServerStatistics`].
#[derive(Default)]
struct Counters {
    connections: AtomicU64,
    requests: AtomicU64,
    errors: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

/// What all threads of a server share.
struct Shared {
    exports: Arc<dyn Exports>,
    tls: Option<Arc<rustls::ServerConfig>>,
    connections_max: usize,
    counters: Counters,
    budget: Arc<Budget>,
    stopping: AtomicBool,
    /// Nobody's answers are waited for any more.
    cut: AtomicBool,
    /// Places that are taken; one more only under the lock of `connections`.
    places: AtomicU64,
    /// Living connections, the oldest first, to end them. Each removes itself.
    connections: Mutex<Vec<Connection>>,
    /// Told when a connection has ended.
    ended: Condvar,
}

/// A connection, as the server knows it.
struct Connection {
    socket: Weak<Socket>,
    /// It has shown a certificate, or opens an export where none is wanted.
    keeps_its_place: Arc<AtomicBool>,
    /// It was ended to make room, and gives its place back in a moment.
    is_ending: bool,
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shut_down(&self, how: Shutdown) {
        for socket in self.connections().iter().filter_map(|connection| connection.socket.upgrade()) {
            socket.shutdown(how);
        }
    }

    /// A place for one more. When there is none, the connection that has negotiated for longest without showing who it
    /// is is ended: who says nothing keeps nobody out.
    fn take_place(&self, connections: &mut [Connection]) -> bool {
        let ending = connections.iter().filter(|one| one.is_ending).count() as u64;
        if self.places.load(Ordering::Acquire) >= self.connections_max as u64 + ending {
            let is_stranger = |one: &&mut Connection| !one.is_ending && !one.keeps_its_place.load(Ordering::Acquire);
            let oldest = connections.iter_mut().find(is_stranger).filter(|_| ending < ENDING_MAX);
            let Some(oldest) = oldest else { return false };
            oldest.is_ending = true;
            if let Some(socket) = oldest.socket.upgrade() {
                socket.shutdown(Shutdown::Both);
            }
        }
        self.places.fetch_add(1, Ordering::AcqRel);
        true
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }

    /// Ends all connections, whatever they have in flight.
    fn cut_off(&self) {
        self.cut.store(true, Ordering::Release);
        self.shut_down(Shutdown::Both);
    }

    /// Whether all connections have ended by then.
    fn wait_until_ended(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.ended.wait_timeout_while(self.connections(), left, |connections| !connections.is_empty());
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

/// A server that listens. It closes when this is dropped, at once; [`stop`](Server::stop) lets requests finish before.
pub struct Server {
    shared: Arc<Shared>,
    addresses: Vec<Address>,
    wake: Arc<OwnedFd>,
    listeners: Vec<JoinHandle<()>>,
}

impl Server {
    /// Opens the server: when this returns, clients can connect.
    ///
    /// # Errors
    /// An address cannot be had, or the certificates cannot be used.
    pub fn start(options: &ServerOptions, exports: Arc<dyn Exports>) -> Result<Server, DiskError> {
        let failed = |error: io::Error| DiskError::io("listen for NBD at", Path::new("(event)"), error);
        let shared = Arc::new(Shared {
            exports,
            tls: options.tls.as_ref().map(tls::server).transpose()?,
            connections_max: options.connections_max,
            counters: Counters::default(),
            budget: Arc::default(),
            stopping: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            places: AtomicU64::new(0),
            connections: Mutex::new(Vec::new()),
            ended: Condvar::new(),
        });
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| failed(error.into()))?);
        let mut server = Server { shared, addresses: Vec::new(), wake, listeners: Vec::new() };
        for address in &options.addresses {
            let at = address.to_string();
            let failed = |error| DiskError::io("listen for NBD at", Path::new(&at), error);
            let (listener, bound) = address.listen().map_err(failed)?;
            let (shared, wake) = (Arc::clone(&server.shared), Arc::clone(&server.wake));
            let thread = thread::Builder::new().name("nbd-listen".into());
            let thread = thread.spawn(move || listen(&listener, &shared, &wake)).map_err(failed)?;
            server.addresses.push(bound);
            server.listeners.push(thread);
        }
        Ok(server)
    }

    /// Where clients can connect.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// What happened so far.
    pub fn statistics(&self) -> ServerStatistics {
        let counters = &self.shared.counters;
        ServerStatistics {
            connections: self.shared.places.load(Ordering::Acquire),
            connections_total: counters.connections.load(Ordering::Relaxed),
            requests: counters.requests.load(Ordering::Relaxed),
            errors: counters.errors.load(Ordering::Relaxed),
            read_bytes: counters.read_bytes.load(Ordering::Relaxed),
            written_bytes: counters.written_bytes.load(Ordering::Relaxed),
        }
    }

    /// Closes the server: nobody new comes in, no new request is begun, what is in flight is finished and answered for
    /// as long as `drain`, then connections are cut, without an answer to what waits still: who comes again can ask for
    /// it anew. Returns whether all were finished.
    pub fn stop(mut self, drain: Duration) -> bool {
        self.close_listeners();
        let deadline = Instant::now() + drain;
        // The connections' readers see the end of the stream and let what they have begun finish.
        self.shared.shut_down(Shutdown::Read);
        let is_finished = self.shared.wait_until_ended(deadline);
        if !is_finished {
            self.shared.cut_off();
            // They give their exports back: whoever owns the disk can close it then.
            self.shared.wait_until_ended(Instant::now() + CUT_TIMEOUT);
        }
        is_finished
    }

    fn close_listeners(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // An eventfd takes a one unless its counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        for thread in self.listeners.drain(..) {
            if thread.join().is_err() {
                warn!("a listener for NBD panicked");
            }
        }
        for address in self.addresses.drain(..) {
            if let Address::Unix(path) = address {
                // Somebody may have removed it already.
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close_listeners();
        self.shared.cut_off();
    }
}

/// Lets clients in until the server closes.
fn listen(listener: &Listener, shared: &Arc<Shared>, wake: &OwnedFd) {
    while !shared.is_stopping() {
        let mut waiting = [PollFd::new(listener, PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
        if poll(&mut waiting, None).is_err() {
            continue;
        }
        match listener.accept() {
            Ok(socket) => begin(shared, socket),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                warn!(%error, "cannot accept a client of NBD");
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// Gives a new client its thread.
fn begin(shared: &Arc<Shared>, socket: Socket) {
    let (socket, keeps_its_place) = (Arc::new(socket), Arc::new(AtomicBool::new(false)));
    {
        let mut connections = shared.connections();
        if !shared.take_place(&mut connections) {
            debug!(connections_max = shared.connections_max, "one NBD client too many");
            return;
        }
        let keeps_its_place = Arc::clone(&keeps_its_place);
        connections.push(Connection { socket: Arc::downgrade(&socket), keeps_its_place, is_ending: false });
    }
    shared.counters.connections.fetch_add(1, Ordering::Relaxed);
    let place = Arc::new(Place { shared: Arc::clone(shared), keeps_its_place });
    let living =
        Living { shared: Arc::clone(shared), place: Some(Arc::clone(&place)), socket: Arc::downgrade(&socket) };
    // When there is no thread to be had the place is given back as the closure is dropped.
    let spawned = thread::Builder::new().name("nbd".into()).spawn(move || {
        let _living = living;
        let served = connection::serve(&place, socket);
        drop(place);
        match served {
            Ok(()) => debug!("an NBD client left"),
            Err(error) => debug!(%error, "an NBD client was lost"),
        }
    });
    if let Err(error) = spawned {
        warn!(%error, "no thread for a client of NBD");
    }
}

/// A connection's place among those that are allowed: its own as long as it lives, then that of its threads.
struct Place {
    shared: Arc<Shared>,
    /// Its client has shown a certificate, or opens an export where none is wanted.
    keeps_its_place: Arc<AtomicBool>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.places.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A connection that lives: its end is waited for when the server closes.
struct Living {
    shared: Arc<Shared>,
    /// Until it has ended.
    place: Option<Arc<Place>>,
    socket: Weak<Socket>,
}

impl Drop for Living {
    fn drop(&mut self) {
        // First: a connection that has gone from the list holds no place.
        drop(self.place.take());
        let shared = &self.shared;
        shared.connections().retain(|other| !Weak::ptr_eq(&other.socket, &self.socket));
        shared.ended.notify_all();
    }
}
