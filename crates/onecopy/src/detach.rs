//! `up --detach`: the same program again, in a session of its own.
//!
//! ```text
//! starter ── spawns ──> daemon (own session, standard error = onecopy.log)
//!    │   <── events, one JSON object a line, over the daemon's standard output ──┤
//!    │   <── Ready ───────────────────────────────────────────────────────────── │ serves on
//!    └─ ends
//! ```

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::process::Stdio;

use anyhow::Context;
use onecopy_host::{Directory, Event, Summary};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::exit::DetachedFailed;
use crate::progress::Display;
use crate::signals::{HangUp, StopSignal};

/// More than all events of a start take together.
const EVENT_BYTES_MAX: u64 = 16 << 20;

/// The log is begun anew when it is longer at the start of a daemon; the old one is kept beside it.
const LOG_BYTES_MAX: u64 = 16 << 20;

/// Lines of the log that are shown when a daemon ends without a word.
const LOG_LINES_SHOWN: usize = 20;

/// Starts the daemon with `arguments` and returns when it serves clients. A signal meanwhile stops it again.
pub async fn start(directory: &Directory, arguments: &[String], display: &Display) -> anyhow::Result<Summary> {
    let signal = StopSignal::listen(HangUp::Stops)?;
    directory.make_root()?;
    let log_path = directory.daemon_log();
    turn_over(&log_path)?;
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&log_path)
        .with_context(|| format!("cannot open {}", log_path.display()))?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(&program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    let mut daemon = command.spawn().with_context(|| format!("cannot run {}", program.display()))?;
    let events = daemon.stdout.take().expect("its standard output is piped");
    let mut events = BufReader::new(events.take(EVENT_BYTES_MAX)).lines();
    let mut stopping = false;
    loop {
        let line = tokio::select! {
            line = events.next_line() => line.context("cannot read the daemon's events")?,
            () = signal.received(), if !stopping => {
                stopping = true;
                terminate(&daemon);
                continue;
            }
        };
        let Some(line) = line else { break };
        match serde_json::from_str(&line) {
            Ok(Event::Ready { summary }) => return Ok(summary),
            Ok(Event::Failed { message }) => {
                let status = daemon.wait().await.context("cannot wait for the daemon")?;
                let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
                return Err(DetachedFailed { message, code }.into());
            }
            Ok(event) => display.show(event),
            Err(error) => tracing::warn!(%error, line, "not an event"),
        }
    }
    let status = daemon.wait().await.context("cannot wait for the daemon")?;
    let message =
        format!("the daemon ended without a word ({status}); the end of {}:\n{}", log_path.display(), tail(&log_path));
    Err(DetachedFailed { message, code: 1 }.into())
}

/// Leaves the starter's session and terminal, whose signals are not for a daemon; for the daemon itself.
pub fn leave_session() -> anyhow::Result<()> {
    rustix::process::setsid().context("cannot begin a session of its own")?;
    Ok(())
}

/// Asks the daemon to stop what it has begun; it says so by its last event.
fn terminate(daemon: &Child) {
    let pid = daemon.id().and_then(|number| Pid::from_raw(number.cast_signed()));
    if let Some(Err(error)) = pid.map(|pid| kill_process(pid, Signal::TERM)) {
        tracing::warn!(%error, "cannot stop the daemon");
    }
}

/// Begins a new log when the old one is too long.
fn turn_over(path: &Path) -> anyhow::Result<()> {
    if fs::metadata(path).is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX) {
        let old = path.with_extension("log.1");
        fs::rename(path, &old).with_context(|| format!("cannot rename {} to {}", path.display(), old.display()))?;
    }
    Ok(())
}

/// The last lines of a log.
fn tail(path: &Path) -> String {
    let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n")
}
