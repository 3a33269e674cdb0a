//! A running machine: QEMU's process, watched.
//!
//! ```text
//!              start                      start, incoming
//!                |                              |
//!                v          resume              v
//!   adopt ──> Paused  <──────────────> Running <─── Incoming
//!                |          pause       |   |
//!                |                      |   ├──> Panicked   the guest's kernel has said so
//!                |                      |   └──> Failed     a disk or the accelerator has failed
//!                v                      v             |
//!              Ended  <─────────────────┴─────────────┘      QEMU's process has ended, whoever wanted it
//! ```
//!
//! QEMU tells by events; its process is watched by a handle of the kernel. A lost connection to the monitor is made
//! anew while the process lives. When the last [`Machine`] is dropped the machine runs on, and [`Machine::adopt`] takes
//! it over.

mod start;
mod state;
mod stop;
mod watch;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch as latest;
use tokio::task::JoinHandle;

use crate::process::Process;
use crate::{Agent, Console, HypervisorError, MachineDirectory, Monitor};

pub use state::{EndCause, Ending, State};

/// Lines of QEMU's own log that an ending shows.
const QEMU_LINES: usize = 12;
/// Lines of the guest's console that an ending shows: a kernel's panic with its registers and stack.
const CONSOLE_LINES: usize = 120;

/// How long a machine's steps may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeLimits {
    /// QEMU answers at its monitor after its start. It has no guest to wait for, but may have memory to allocate.
    pub start: Duration,
    /// The guest has switched itself off after the button was pressed.
    pub power_down: Duration,
    /// QEMU has ended after it was told to quit. It writes back what its disks hold.
    pub quit: Duration,
    /// A killed QEMU is gone: the kernel frees its memory.
    pub kill: Duration,
    /// A machine stands, or runs, after it was told so.
    pub pause: Duration,
    /// The guest's agent answers after the guest's start.
    pub agent: Duration,
}

impl Default for TimeLimits {
    fn default() -> TimeLimits {
        TimeLimits {
            start: Duration::from_secs(60),
            power_down: Duration::from_secs(90),
            quit: Duration::from_secs(20),
            kill: Duration::from_secs(20),
            pause: Duration::from_secs(30),
            agent: Duration::from_secs(180),
        }
    }
}

/// A machine that runs, or has run. Clones are the same machine.
#[derive(Debug, Clone)]
pub struct Machine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    seen: Arc<Seen>,
    watcher: JoinHandle<()>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The process runs on.
        self.watcher.abort();
    }
}

/// What the watcher and the machine's owners share.
#[derive(Debug)]
struct Seen {
    name: String,
    directory: MachineDirectory,
    limits: TimeLimits,
    process: Process,
    state: latest::Sender<State>,
    /// Locked for moments only.
    monitor: Mutex<Monitor>,
    /// We have killed it.
    killed: std::sync::atomic::AtomicBool,
}

impl Seen {
    fn monitor(&self) -> MutexGuard<'_, Monitor> {
        self.monitor.lock().expect("nothing panics while it holds this lock")
    }
}

impl Machine {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.inner.seen.name
    }

    /// Where its sockets and logs are.
    pub fn directory(&self) -> &MachineDirectory {
        &self.inner.seen.directory
    }

    /// QEMU's process id. Its number may belong to another process once the machine has ended.
    pub fn process_id(&self) -> u32 {
        self.inner.seen.process.id()
    }

    /// What it does, as far as is known in this moment.
    pub fn state(&self) -> State {
        self.inner.seen.state.borrow().clone()
    }

    /// Tells each change of its state.
    pub fn states(&self) -> latest::Receiver<State> {
        self.inner.seen.state.subscribe()
    }

    /// The monitor. It may be lost and made anew: ask again each time.
    pub fn monitor(&self) -> Monitor {
        self.inner.seen.monitor().clone()
    }

    /// What the guest writes to its console.
    pub fn console(&self) -> Console {
        Console::new(self.directory().console_log())
    }

    /// Connects to the guest's agent and waits until it answers. It serves one connection at a time.
    ///
    /// # Errors
    /// [`HypervisorError::Ended`] when the machine ends meanwhile, those of [`Agent::connect`].
    pub async fn agent(&self) -> Result<Agent, HypervisorError> {
        tokio::select! {
            agent = Agent::connect(self.directory().agent(), self.inner.seen.limits.agent) => agent,
            ending = self.wait_ended() => Err(self.ended_error(&ending)),
        }
    }

    /// Its processors stand when this returns.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`], [`HypervisorError::NotReached`], [`HypervisorError::Ended`].
    pub async fn pause(&self) -> Result<(), HypervisorError> {
        self.monitor().stop().await?;
        self.wait_for("paused", |state| !matches!(state, State::Running), self.inner.seen.limits.pause).await
    }

    /// Its processors run when this returns.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`], [`HypervisorError::NotReached`], [`HypervisorError::Ended`].
    pub async fn resume(&self) -> Result<(), HypervisorError> {
        self.monitor().cont().await?;
        self.wait_for("running", |state| matches!(state, State::Running), self.inner.seen.limits.pause).await
    }

    /// Waits until its state is as `reached` says.
    ///
    /// # Errors
    /// [`HypervisorError::NotReached`], [`HypervisorError::Ended`].
    pub async fn wait_for(
        &self,
        wanted: &'static str,
        reached: impl Fn(&State) -> bool,
        timeout: Duration,
    ) -> Result<(), HypervisorError> {
        let mut states = self.states();
        let wait = states.wait_for(|state| reached(state) || state.ending().is_some());
        match tokio::time::timeout(timeout, wait).await {
            Ok(Ok(state)) => match state.ending() {
                Some(ending) if !reached(&state) => Err(self.ended_error(ending)),
                _ => Ok(()),
            },
            // The sender lives as long as this machine.
            Ok(Err(_)) | Err(_) => Err(HypervisorError::NotReached {
                name: self.name().to_owned(),
                wanted,
                state: self.state().to_string(),
                waited: timeout,
            }),
        }
    }

    /// Waits until QEMU's process has ended; how it has.
    pub async fn wait_ended(&self) -> Arc<Ending> {
        let mut states = self.states();
        loop {
            if let Some(ending) = states.borrow_and_update().ending() {
                return ending.clone();
            }
            if states.changed().await.is_err() {
                // The sender lives as long as this machine.
                std::future::pending::<()>().await;
            }
        }
    }

    fn ended_error(&self, ending: &Ending) -> HypervisorError {
        HypervisorError::Ended { name: self.name().to_owned(), ending: ending.to_string() }
    }
}
