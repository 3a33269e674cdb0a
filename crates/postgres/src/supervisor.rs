//! Keeping a server running.
//!
//! ```text
//!   spawn        ready               its postmaster died
//! ──────> Starting ────> Running ──────────────────────────┐
//!          ▲  ▲  │          │                              ▼
//!          │  │  └──────────┼── start failed ─────────> BackingOff
//!          │  │             │ restart or stop              │ │
//!          │  └─────────────┼────────────── delay over ────┘ │ restart or stop
//!          │                ▼                                │
//!          └─ restart ── Stopping <──────────────────────────┘
//!                           └── stop ──> Stopped
//! ```
//!
//! A restart or stop is heard in every state; while the server starts, the waiting ends and the server is stopped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};

use crate::{PostgresError, Server, StopMode};

/// Delay before the first restart; it doubles with each failure.
const BACK_OFF_MIN: Duration = Duration::from_millis(100);
/// Longest delay before a restart.
const BACK_OFF_MAX: Duration = Duration::from_secs(30);
/// A server that ran this long was healthy: the next delay is the shortest again.
const HEALTHY_PERIOD: Duration = Duration::from_secs(30);
/// How often the log's size is looked at.
const LOG_CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Commands that may wait; a caller of one more waits himself.
const COMMANDS_MAX: usize = 4;

/// What a supervised server is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SupervisorState {
    /// Being started, recovery included.
    Starting,
    /// Accepts connections.
    Running {
        /// The postmaster.
        process_id: u32,
        /// Restarts after its death so far, over the supervisor's life.
        restarts: u64,
    },
    /// Waits before the next start.
    BackingOff {
        /// Why it is down.
        reason: String,
        /// How long it waits.
        delay: Duration,
    },
    /// Being stopped.
    Stopping,
    /// Not supervised any more.
    Stopped {
        /// Why the stop failed, if it did; the server then still runs.
        error: Option<String>,
    },
}

/// Keeps a server running until it is told to stop. Dropped without [`Supervisor::stop`], it lets go of the server, which runs on.
///
/// While it is supervised, stop and restart the server through the supervisor: what dies otherwise is started again.
#[derive(Debug)]
pub struct Supervisor {
    server: Arc<Server>,
    state: watch::Receiver<SupervisorState>,
    commands: mpsc::Sender<Command>,
}

/// What a supervisor is told, and where the outcome goes.
#[derive(Debug)]
struct Command {
    mode: StopMode,
    then: Then,
    outcome: Outcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Start,
    End,
}

type Outcome = oneshot::Sender<Result<(), PostgresError>>;

impl Supervisor {
    /// Starts the server, or takes over one that runs, and keeps it running. Returns at once: watch the state. Needs a tokio runtime.
    pub fn spawn(server: Arc<Server>) -> Supervisor {
        let (state_sender, state) = watch::channel(SupervisorState::Starting);
        let (commands, command_receiver) = mpsc::channel(COMMANDS_MAX);
        let task = Task {
            server: server.clone(),
            state: state_sender,
            commands: command_receiver,
            back_off: BackOff::new(),
            restarts: 0,
        };
        tokio::spawn(task.run());
        Supervisor { server, state, commands }
    }

    /// The server.
    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// The state, now and whenever it changes.
    pub fn state(&self) -> watch::Receiver<SupervisorState> {
        self.state.clone()
    }

    /// Waits until the server runs.
    ///
    /// # Errors
    /// [`PostgresError::Down`] when it backs off, with the reason (it is then tried again all the same);
    /// [`PostgresError::SupervisorGone`] when it is stopped.
    pub async fn wait_running(&self) -> Result<(), PostgresError> {
        let mut state = self.state();
        let settled = state.wait_for(|state| !matches!(state, SupervisorState::Starting | SupervisorState::Stopping));
        match settled.await.map_err(|_| PostgresError::SupervisorGone)?.clone() {
            SupervisorState::BackingOff { reason, .. } => Err(PostgresError::Down { reason }),
            SupervisorState::Stopped { .. } => Err(PostgresError::SupervisorGone),
            _ => Ok(()),
        }
    }

    /// Stops and starts the server, as a change of its settings may need.
    ///
    /// # Errors
    /// Those of [`Server::start`] (it is then tried again); those of [`Server::stop`] (it is then watched as it is);
    /// [`PostgresError::SupervisorGone`].
    pub async fn restart(&self, mode: StopMode) -> Result<(), PostgresError> {
        self.command(mode, Then::Start).await
    }

    /// Stops the server and ends.
    ///
    /// # Errors
    /// Those of [`Server::stop`]; the server is then still running and not supervised any more.
    pub async fn stop(self, mode: StopMode) -> Result<(), PostgresError> {
        self.command(mode, Then::End).await
    }

    async fn command(&self, mode: StopMode, then: Then) -> Result<(), PostgresError> {
        let (outcome, answer) = oneshot::channel();
        let command = Command { mode, then, outcome };
        self.commands.send(command).await.map_err(|_| PostgresError::SupervisorGone)?;
        answer.await.map_err(|_| PostgresError::SupervisorGone)?
    }
}

/// The task behind a supervisor.
struct Task {
    server: Arc<Server>,
    state: watch::Sender<SupervisorState>,
    commands: mpsc::Receiver<Command>,
    back_off: BackOff,
    restarts: u64,
}

/// What the task does next; each step returns the next one.
enum Step {
    /// Start the server and tell the outcome to who asked for it, if anybody did.
    Start(Option<Outcome>),
    Watch,
    BackOff(String),
    Obey(Command),
    End,
}

impl Task {
    async fn run(mut self) {
        let mut step = Step::Start(None);
        loop {
            step = match step {
                Step::Start(outcome) => self.start(outcome).await,
                Step::Watch => self.watch().await,
                Step::BackOff(reason) => self.wait_before_start(reason).await,
                Step::Obey(command) => self.obey(command).await,
                Step::End => return,
            }
        }
    }

    async fn start(&mut self, outcome: Option<Outcome>) -> Step {
        self.state.send_replace(SupervisorState::Starting);
        let result = tokio::select! {
            result = self.server.start() => result,
            // The waiting ends here; the postmaster, if there is one already, is known to the server.
            command = self.commands.recv() => return command.map_or(Step::End, Step::Obey),
        };
        match result {
            Ok(started) => {
                tracing::info!(data_directory = %self.server.data_directory().display(), ?started, "server runs");
                tell(outcome, Ok(()));
                Step::Watch
            }
            Err(error) => {
                let reason = error.to_string();
                tell(outcome, Err(error));
                Step::BackOff(reason)
            }
        }
    }

    async fn watch(&mut self) -> Step {
        let log_start = self.server.log_end();
        let Some(process_id) = self.server.process_id() else { return self.died(log_start) };
        self.state.send_replace(SupervisorState::Running { process_id, restarts: self.restarts });
        let begin = Instant::now();
        let mut log_check = tokio::time::interval(LOG_CHECK_INTERVAL);
        loop {
            tokio::select! {
                () = self.server.wait_exit() => {
                    if begin.elapsed() >= HEALTHY_PERIOD {
                        self.back_off = BackOff::new();
                    }
                    return self.died(log_start);
                }
                command = self.commands.recv() => return command.map_or(Step::End, Step::Obey),
                _ = log_check.tick() => if let Err(error) = self.server.bound_log() {
                    tracing::warn!(%error, "the server's log cannot be cut");
                },
            }
        }
    }

    fn died(&mut self, log_start: u64) -> Step {
        self.restarts += 1;
        Step::BackOff(format!("its postmaster died; its log says:\n{}", self.server.log_complaints_since(log_start)))
    }

    async fn wait_before_start(&mut self, reason: String) -> Step {
        let delay = self.back_off.next_delay();
        tracing::warn!(data_directory = %self.server.data_directory().display(), %reason, ?delay, "server is down");
        self.state.send_replace(SupervisorState::BackingOff { reason, delay });
        tokio::select! {
            () = tokio::time::sleep(delay) => Step::Start(None),
            command = self.commands.recv() => command.map_or(Step::End, Step::Obey),
        }
    }

    async fn obey(&mut self, command: Command) -> Step {
        self.state.send_replace(SupervisorState::Stopping);
        let result = self.server.stop(command.mode).await;
        match (command.then, result) {
            (Then::Start, Ok(())) => Step::Start(Some(command.outcome)),
            (Then::Start, Err(error)) => {
                tell(Some(command.outcome), Err(error));
                Step::Watch
            }
            (Then::End, result) => {
                let error = result.as_ref().err().map(ToString::to_string);
                self.state.send_replace(SupervisorState::Stopped { error });
                tell(Some(command.outcome), result);
                Step::End
            }
        }
    }
}

/// Who asked may have stopped waiting: that changes nothing.
fn tell(outcome: Option<Outcome>, result: Result<(), PostgresError>) {
    if let Some(outcome) = outcome {
        let _ = outcome.send(result);
    }
}

/// Delays that double up to a bound.
struct BackOff {
    next: Duration,
}

impl BackOff {
    fn new() -> BackOff {
        BackOff { next: BACK_OFF_MIN }
    }

    fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(BACK_OFF_MAX);
        delay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_bound() {
        let mut back_off = BackOff::new();
        let delays: Vec<u128> = (0..11).map(|_| back_off.next_delay().as_millis()).collect();
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000]);
    }
}
