//! QEMU's monitor: commands with answers, and events (<https://www.qemu.org/docs/master/interop/qmp-spec.html>).
//!
//! ```text
//!  execute ──> queue ──> writer task ──> qmp.sock ──> reader task ──┬─> who waits for the answer with this id
//!                                                                   └─> events, to all who listen
//! ```
//!
//! Answers are told by their ids, so a command that was given up does not confuse those after it. The connection may be
//! lost while the machine runs on: all that wait are told so, and [`Monitor::connect`] makes a new one.

mod commands;
mod connection;
mod devices;
mod event;
mod migration;

#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, broadcast, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::{HypervisorError, QemuVersion};
use connection::{Outgoing, Shared};

pub use commands::{Processor, RunState, Status};
pub use devices::{BlockDevice, CharacterDevice};
pub use event::{Event, EventKind};
pub use migration::{Migration, MigrationMemory, MigrationStatus, MigrationTarget};

/// A command that is not answered within this is given up. QEMU answers in microseconds; a host that swaps or
/// translates needs longer.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);
/// So many commands are under way at once; more wait for their turn.
const COMMANDS_MAX: usize = 32;
/// A listener that is more events behind than this loses the oldest, and is told how many.
const EVENTS_MAX: usize = 256;
/// QEMU's longest answers are lists of devices and the state of migrations: kilobytes. A longer line ends the
/// connection.
const LINE_BYTES_MAX: usize = 8 * 1024 * 1024;
/// How often a socket is tried that is not there yet.
const CONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// A connection to a monitor. Clones share it; when the last one goes it is closed, and the machine runs on.
#[derive(Debug, Clone)]
pub struct Monitor {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    version: QemuVersion,
    outgoing: mpsc::Sender<Outgoing>,
    places: Semaphore,
    next_id: AtomicU64,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Monitor {
    /// Connects, and waits up to `timeout` for a socket that is not there yet, or for somebody else to leave the
    /// monitor.
    ///
    /// # Errors
    /// [`HypervisorError::NoMonitor`] with what happened last.
    pub async fn connect(socket: impl AsRef<Path>, timeout: Duration) -> Result<Monitor, HypervisorError> {
        let socket = socket.as_ref();
        let no_monitor = |reason: String| HypervisorError::NoMonitor { socket: socket.to_owned(), reason };
        let deadline = Instant::now() + timeout;
        let (stream, version) = loop {
            let attempt = tokio::time::timeout_at(deadline, connection::greet(socket)).await;
            let reason = match attempt {
                Ok(Ok(greeted)) => break greeted,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "it does not greet in time".to_owned(),
            };
            if Instant::now() + CONNECT_INTERVAL >= deadline {
                return Err(no_monitor(reason));
            }
            tokio::time::sleep(CONNECT_INTERVAL).await;
        };
        let shared = Arc::new(Shared::new(socket.to_owned(), broadcast::Sender::new(EVENTS_MAX)));
        let (outgoing, queue) = mpsc::channel(COMMANDS_MAX);
        let tasks = connection::run(stream, queue, &shared);
        let (places, next_id) = (Semaphore::new(COMMANDS_MAX), AtomicU64::new(1));
        let monitor = Monitor { inner: Arc::new(Inner { shared, version, outgoing, places, next_id, tasks }) };
        let left = deadline.saturating_duration_since(Instant::now()).max(CONNECT_INTERVAL);
        monitor
            .execute_within("qmp_capabilities", json!({}), left)
            .await
            .map_err(|error| no_monitor(error.to_string()))?;
        Ok(monitor)
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.inner.shared.socket
    }

    /// QEMU's version, as it has greeted.
    pub fn version(&self) -> QemuVersion {
        self.inner.version
    }

    /// All events from now on. Who is more than 256 behind loses the oldest and is told how many.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.inner.shared.events.subscribe()
    }

    /// Why the connection is lost; none while it stands.
    pub fn lost(&self) -> Option<String> {
        self.inner.shared.lost.borrow().clone()
    }

    /// Waits until the connection is lost. All events that came before have been handed out by then.
    pub async fn wait_lost(&self) {
        let mut lost = self.inner.shared.lost.subscribe();
        // The sender lives as long as this connection.
        let _closed = lost.wait_for(Option::is_some).await;
    }

    /// Executes any command, with arguments as QEMU's reference names them, and waits [`COMMAND_TIMEOUT`] for its
    /// answer.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`], [`HypervisorError::NoAnswer`], [`HypervisorError::MonitorLost`].
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value, HypervisorError> {
        self.execute_within(command, arguments, COMMAND_TIMEOUT).await
    }

    /// The same with a time-out of its own.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn execute_within(
        &self,
        command: &str,
        arguments: Value,
        timeout: Duration,
    ) -> Result<Value, HypervisorError> {
        self.send(command, arguments, None, timeout).await
    }

    /// The same with a descriptor that goes along (`getfd`, `add-fd`).
    ///
    /// # Errors
    /// Those of [`Monitor::execute`].
    pub async fn execute_with_descriptor(
        &self,
        command: &str,
        arguments: Value,
        descriptor: OwnedFd,
    ) -> Result<Value, HypervisorError> {
        self.send(command, arguments, Some(descriptor), COMMAND_TIMEOUT).await
    }

    /// Executes a command and reads its answer as a `T`.
    async fn ask<T: DeserializeOwned>(&self, command: &str, arguments: Value) -> Result<T, HypervisorError> {
        let answer = self.execute(command, arguments).await?;
        serde_json::from_value(answer)
            .map_err(|error| HypervisorError::UnknownAnswer { command: command.to_owned(), reason: error.to_string() })
    }

    /// Executes a command whose answer says nothing.
    async fn tell(&self, command: &str, arguments: Value) -> Result<(), HypervisorError> {
        self.execute(command, arguments).await.map(|_| ())
    }

    async fn send(
        &self,
        command: &str,
        arguments: Value,
        descriptor: Option<OwnedFd>,
        timeout: Duration,
    ) -> Result<Value, HypervisorError> {
        let id = self.inner.next_id.fetch_add(1, Ordering::Relaxed);
        let answer = tokio::time::timeout(timeout, self.exchange(id, command, arguments, descriptor)).await;
        answer.unwrap_or_else(|_| Err(HypervisorError::NoAnswer { command: command.to_owned(), waited: timeout }))
    }

    async fn exchange(
        &self,
        id: u64,
        command: &str,
        arguments: Value,
        descriptor: Option<OwnedFd>,
    ) -> Result<Value, HypervisorError> {
        let inner = &self.inner;
        let _place = inner.places.acquire().await.map_err(|_| inner.shared.lost_error())?;
        let mut line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string().into_bytes();
        line.push(b'\n');
        let (answered, answer) = oneshot::channel();
        // Forgotten again when this is given up.
        let _waiting = inner.shared.wait_for(id, answered)?;
        let sent = inner.outgoing.send(Outgoing { line, descriptor }).await;
        sent.map_err(|_| inner.shared.lost_error())?;
        match answer.await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err((class, description))) => {
                Err(HypervisorError::Refused { command: command.to_owned(), class, description })
            }
            Err(_) => Err(inner.shared.lost_error()),
        }
    }
}

/// A path for a message to QEMU, which takes text only.
fn text_of(path: &Path) -> Result<String, HypervisorError> {
    path.to_str().map(str::to_owned).ok_or_else(|| HypervisorError::Configuration {
        name: path.display().to_string(),
        reason: "the monitor takes only paths that are UTF-8".to_owned(),
    })
}

/// For documentation and errors: which socket.
impl std::fmt::Display for Monitor {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}", PathBuf::from(self.socket()).display())
    }
}
