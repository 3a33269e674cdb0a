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

use crate::{Instance, PostgresError, StopMode};

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
        /// The postmaster, or the machine that it runs in.
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

/// Keeps a server running until it is told to stop. Dropped without [`Supervisor::stop`], it lets go of the server,
/// which runs on.
///
/// While it is supervised, stop and restart the server through the supervisor: what dies otherwise is started again.
#[derive(Debug)]
pub struct Supervisor {
    instance: Arc<dyn Instance>,
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
    /// Starts the server, or takes over one that runs, and keeps it running. Returns at once: watch the state. Needs a
    /// tokio runtime.
    pub fn spawn(instance: Arc<dyn Instance>) -> Supervisor {
        Supervisor::spawn_task(instance, None)
    }

    /// As [`Supervisor::spawn`]; `held` is dropped when the server runs for the first time, or when nothing starts it
    /// any more because the supervisor was dropped or has stopped it. Who stops servers that nobody looks after waits
    /// for that: one may be started until then.
    pub fn spawn_holding(instance: Arc<dyn Instance>, held: Arc<dyn Send + Sync>) -> Supervisor {
        Supervisor::spawn_task(instance, Some(held))
    }

    fn spawn_task(instance: Arc<dyn Instance>, held: Option<Arc<dyn Send + Sync>>) -> Supervisor {
        let (state_sender, state) = watch::channel(SupervisorState::Starting);
        let (commands, command_receiver) = mpsc::channel(COMMANDS_MAX);
        let task = Task {
            instance: instance.clone(),
            state: state_sender,
            commands: command_receiver,
            back_off: BackOff::new(),
            restarts: 0,
            held,
        };
        tokio::spawn(task.run());
        Supervisor { instance, state, commands }
    }

    /// The server.
    pub fn instance(&self) -> &Arc<dyn Instance> {
        &self.instance
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
    /// Those of [`Instance::start`] (it is then tried again); those of [`Instance::stop`] (it is then watched as it
    /// is); [`PostgresError::SupervisorGone`].
    pub async fn restart(&self, mode: StopMode) -> Result<(), PostgresError> {
        self.command(mode, Then::Start).await
    }

    /// Stops the server and ends.
    ///
    /// # Errors
    /// Those of [`Instance::stop`]; the server is then still running and not supervised any more.
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
    instance: Arc<dyn Instance>,
    state: watch::Sender<SupervisorState>,
    commands: mpsc::Receiver<Command>,
    back_off: BackOff,
    restarts: u64,
    /// Kept until the server has been started once.
    held: Option<Arc<dyn Send + Sync>>,
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
            biased;
            // The waiting ends here; the postmaster, if there is one already, is known to the server. Who has let go
            // starts none.
            command = self.commands.recv() => return command.map_or(Step::End, Step::Obey),
            result = self.instance.start() => result,
        };
        match result {
            Ok(started) => {
                tracing::info!(place = %self.instance.place(), ?started, "server runs");
                tell(outcome, Ok(()));
                self.held = None;
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
        let log_start = self.instance.log_end();
        let Some(process_id) = self.instance.process_id() else { return self.died(log_start) };
        self.state.send_replace(SupervisorState::Running { process_id, restarts: self.restarts });
        let begin = Instant::now();
        let mut log_check = tokio::time::interval(LOG_CHECK_INTERVAL);
        loop {
            tokio::select! {
                () = self.instance.wait_exit() => {
                    if begin.elapsed() >= HEALTHY_PERIOD {
                        self.back_off = BackOff::new();
                    }
                    return self.died(log_start);
                }
                command = self.commands.recv() => return command.map_or(Step::End, Step::Obey),
                _ = log_check.tick() => if let Err(error) = self.instance.bound_log() {
                    tracing::warn!(%error, "the server's log cannot be cut");
                },
            }
        }
    }

    fn died(&mut self, log_start: u64) -> Step {
        self.restarts += 1;
        Step::BackOff(self.instance.last_words(log_start))
    }

    async fn wait_before_start(&mut self, reason: String) -> Step {
        let delay = self.back_off.next_delay();
        tracing::warn!(place = %self.instance.place(), %reason, ?delay, "server is down");
        self.state.send_replace(SupervisorState::BackingOff { reason, delay });
        tokio::select! {
            () = tokio::time::sleep(delay) => Step::Start(None),
            command = self.commands.recv() => command.map_or(Step::End, Step::Obey),
        }
    }

    async fn obey(&mut self, command: Command) -> Step {
        self.state.send_replace(SupervisorState::Stopping);
        let result = self.instance.stop(command.mode).await;
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
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::instance::InstanceFuture;
    use crate::{ConnectionParameters, StartOutcome};

    /// A server that takes a while to be begun, and is not ready then.
    #[derive(Debug, Default)]
    struct Slow {
        is_being_begun: AtomicBool,
        was_begun: AtomicBool,
    }

    impl Instance for Slow {
        fn place(&self) -> String {
            "nowhere".to_owned()
        }

        fn start(&self) -> InstanceFuture<'_, Result<StartOutcome, PostgresError>> {
            Box::pin(async {
                self.is_being_begun.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(300));
                self.was_begun.store(true, Ordering::SeqCst);
                std::future::pending().await
            })
        }

        fn stop(&self, _: StopMode) -> InstanceFuture<'_, Result<(), PostgresError>> {
            unreachable!("nobody stops it")
        }

        fn wait_exit(&self) -> InstanceFuture<'_, ()> {
            unreachable!("it never runs")
        }

        fn process_id(&self) -> Option<u32> {
            None
        }

        fn administration(&self) -> ConnectionParameters {
            unreachable!("nobody connects")
        }

        fn log_end(&self) -> u64 {
            0
        }

        fn last_words(&self, _: u64) -> String {
            String::new()
        }

        fn bound_log(&self) -> Result<(), PostgresError> {
            Ok(())
        }
    }

    /// Who drops a supervisor can wait until it starts its server no more: what it was given to hold is let go only
    /// then.
    ///
    /// Spec: A3
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_held_tells_when_a_server_is_no_more_begun() {
        let (server, held) = (Arc::new(Slow::default()), Arc::new(()));
        let supervisor = Supervisor::spawn_holding(server.clone(), held.clone());
        while !server.is_being_begun.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(supervisor);
        while Arc::strong_count(&held) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(server.was_begun.load(Ordering::SeqCst), "who stops servers now would miss it");
    }

    #[test]
    fn delays_double_up_to_the_bound() {
        let mut back_off = BackOff::new();
        let delays: Vec<u128> = (0..11).map(|_| back_off.next_delay().as_millis()).collect();
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000]);
    }
}
