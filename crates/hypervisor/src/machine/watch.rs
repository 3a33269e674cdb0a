//! The task that watches a machine: its events, its process, its monitor's connection, its logs.

use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use super::state::{EndCause, Ending, State};
use super::{CONSOLE_LINES, QEMU_LINES, Seen};
use crate::monitor::EventKind;
use crate::process::Watch;
use crate::{Console, Event, Monitor};

/// How often it is looked whether logs have become too long and whether an incoming machine has arrived.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// A lost monitor is tried again for so long at a time.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// QEMU closes its monitor when it ends: what it has said before arrives within this.
const LAST_WORDS_TIMEOUT: Duration = Duration::from_secs(10);
/// QEMU's state is asked for with this much patience: the answer only says more exactly what an event has said.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// What is remembered of events for the machine's end.
#[derive(Debug, Default)]
struct Announced {
    /// The reason of the last `SHUTDOWN`.
    shutdown: Option<String>,
}

/// Watches until the process has ended.
pub(super) async fn run(seen: Arc<Seen>, mut watch: Watch, mut events: broadcast::Receiver<Event>) {
    let mut announced = Announced::default();
    let status = tokio::select! {
        status = watch.ended() => status,
        // Without an end of its own.
        () = follow(&seen, &mut events, &mut announced) => None,
    };
    let monitor = seen.monitor().clone();
    // A connection that does not end is kept open by nobody who could say more.
    let _silent = tokio::time::timeout(LAST_WORDS_TIMEOUT, monitor.wait_lost()).await;
    while let Some(event) = next_left(&mut events) {
        announced.note(&event);
    }
    seen.state.send_replace(State::Ended(Arc::new(ending(&seen, &announced, status))));
}

/// An event that has arrived already.
fn next_left(events: &mut broadcast::Receiver<Event>) -> Option<Event> {
    loop {
        match events.try_recv() {
            Ok(event) => return Some(event),
            Err(broadcast::error::TryRecvError::Lagged(_)) => {}
            Err(_) => return None,
        }
    }
}

fn ending(seen: &Seen, announced: &Announced, status: Option<ExitStatus>) -> Ending {
    let killed = seen.killed.load(Ordering::Relaxed);
    Ending {
        cause: EndCause::of(announced.shutdown.as_deref(), status, killed),
        qemu: Console::new(seen.directory.qemu_log()).tail(QEMU_LINES),
        console: Console::new(seen.directory.console_log()).tail(CONSOLE_LINES),
    }
}

impl Announced {
    fn note(&mut self, event: &Event) {
        if let EventKind::Shutdown { reason, .. } = &event.kind {
            self.shutdown = Some(reason.clone());
        }
    }
}

/// Follows the events, for ever.
async fn follow(seen: &Seen, events: &mut broadcast::Receiver<Event>, announced: &mut Announced) {
    let mut look = tokio::time::interval(LOOK_INTERVAL);
    // QEMU did not say in time: no event tells it again.
    let mut is_unknown = false;
    loop {
        let monitor = seen.monitor().clone();
        tokio::select! {
            // What has happened comes before what is lost.
            biased;
            event = events.recv() => match event {
                Ok(event) => {
                    announced.note(&event);
                    if let Some(is_known) = happened(seen, &monitor, &event).await {
                        is_unknown = !is_known;
                    }
                }
                Err(RecvError::Lagged(_)) => is_unknown = !ask(seen, &monitor).await,
                // The monitor is held above.
                Err(RecvError::Closed) => *events = monitor.events(),
            },
            () = monitor.wait_lost() => (*events, is_unknown) = reconnect(seen, &monitor).await,
            _ = look.tick() => {
                bound_logs(seen);
                // An arrival is not told by an event unless that was asked for.
                if is_unknown || *seen.state.borrow() == State::Incoming {
                    is_unknown = !ask(seen, &monitor).await;
                }
            }
        }
    }
}

/// Whether the state is known by it; nothing when the event says nothing of it.
async fn happened(seen: &Seen, monitor: &Monitor, event: &Event) -> Option<bool> {
    match &event.kind {
        EventKind::Resume => set(seen, State::Running),
        EventKind::GuestPanicked { .. } => set(seen, State::Panicked),
        // Why it stands is not in the event.
        EventKind::Stop => return Some(ask(seen, monitor).await),
        _ => return None,
    }
    Some(true)
}

/// Takes QEMU's own word for the state; whether it gave it.
async fn ask(seen: &Seen, monitor: &Monitor) -> bool {
    match tokio::time::timeout(STATUS_TIMEOUT, monitor.status()).await {
        Ok(Ok(status)) => {
            set(seen, State::of(&status.state));
            return true;
        }
        Ok(Err(error)) => tracing::debug!(machine = seen.name, %error, "QEMU's state is not known"),
        Err(_) => tracing::warn!(machine = seen.name, "QEMU does not say in which state it is"),
    }
    false
}

fn set(seen: &Seen, new: State) {
    seen.state.send_if_modified(|state| {
        let changed = *state != new;
        if changed {
            tracing::debug!(machine = seen.name, from = state.name(), to = new.name(), "a machine's state");
            *state = new;
        }
        changed
    });
}

/// Makes the connection anew, however long it takes: the process's end ends this, too. Gives its events, and whether
/// the state is unknown.
async fn reconnect(seen: &Seen, lost: &Monitor) -> (broadcast::Receiver<Event>, bool) {
    loop {
        tracing::debug!(machine = seen.name, reason = lost.lost(), "the monitor is connected anew");
        match Monitor::connect(seen.directory.monitor(), RECONNECT_TIMEOUT).await {
            Ok(monitor) => {
                let events = monitor.events();
                *seen.monitor() = monitor.clone();
                return (events, !ask(seen, &monitor).await);
            }
            Err(error) => tracing::debug!(machine = seen.name, %error, "the monitor does not answer"),
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

fn bound_logs(seen: &Seen) {
    for log in [seen.directory.console_log(), seen.directory.qemu_log()] {
        if let Err(error) = Console::new(&log).bound() {
            tracing::warn!(machine = seen.name, log = %log.display(), %error, "a log cannot be cut");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use serde_json::{Value, json};
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::{UnixListener, UnixStream};

    use super::*;
    use crate::MachineDirectory;
    use crate::machine::{Machine, TimeLimits};
    use crate::process::Process;

    /// The end of a monitor's socket that QEMU has.
    struct Qemu(BufReader<UnixStream>);

    impl Qemu {
        async fn say(&mut self, message: Value) {
            self.0.write_all(format!("{message}\r\n").as_bytes()).await.unwrap();
        }

        /// The next command, which must be this one; its id.
        async fn hear(&mut self, command: &str) -> Value {
            let mut line = String::new();
            self.0.read_line(&mut line).await.unwrap();
            let heard: Value = serde_json::from_str(&line).unwrap();
            assert_eq!(heard["execute"], command, "{heard}");
            heard["id"].clone()
        }
    }

    /// Spec: A7
    #[tokio::test]
    async fn v2_a_state_that_qemu_was_slow_to_tell_is_asked_for_again() {
        let home = tempfile::tempdir().unwrap();
        let directory = MachineDirectory::new(home.path()).unwrap();
        let listener = UnixListener::bind(directory.monitor()).unwrap();
        let serving = async {
            let mut qemu = Qemu(BufReader::new(listener.accept().await.unwrap().0));
            qemu.say(json!({ "QMP": { "version": { "qemu": { "major": 10, "minor": 0 } } } })).await;
            let id = qemu.hear("qmp_capabilities").await;
            qemu.say(json!({ "return": {}, "id": id })).await;
            qemu
        };
        let patience = Duration::from_secs(120);
        let (monitor, mut qemu) = tokio::join!(Monitor::connect(directory.monitor(), patience), serving);
        let mut command = tokio::process::Command::new("sleep");
        let child = command.arg("1000").stdin(Stdio::null()).kill_on_drop(true).spawn().unwrap();
        let process = Process::of_child(child).unwrap();
        let limits = TimeLimits::default();
        let machine = Machine::watched("m".to_owned(), &directory, limits, process, monitor.unwrap(), State::Running);
        let now = json!({ "seconds": 1, "microseconds": 0 });
        qemu.say(json!({ "event": "STOP", "timestamp": now })).await;
        let _unanswered = qemu.hear("query-status").await;
        let id = qemu.hear("query-status").await;
        qemu.say(json!({ "return": { "status": "paused", "running": false }, "id": id })).await;
        machine.wait_for("paused", |state| *state == State::Paused, patience).await.unwrap();
        machine.kill();
        machine.wait_killed().await.unwrap();
    }
}
