//! What a machine does, and how it has ended.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;

use crate::monitor::RunState;

/// What a machine does. The module's documentation draws it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It waits for the state of another machine.
    Incoming,
    /// Its processors stand.
    Paused,
    /// Its processors run.
    Running,
    /// Its kernel has panicked; it stands, to be looked at.
    Panicked,
    /// QEMU has stopped it because something failed.
    Failed {
        /// What: `io-error`, `internal-error`.
        what: &'static str,
    },
    /// QEMU's process has ended.
    Ended(Arc<Ending>),
}

impl State {
    /// The state that QEMU's own stands for.
    pub(super) fn of(state: &RunState) -> State {
        match state {
            RunState::Inmigrate => State::Incoming,
            RunState::Running => State::Running,
            RunState::GuestPanicked => State::Panicked,
            RunState::IoError => State::Failed { what: "io-error" },
            RunState::InternalError => State::Failed { what: "internal-error" },
            _ => State::Paused,
        }
    }

    /// How it has ended, if it has.
    pub fn ending(&self) -> Option<&Arc<Ending>> {
        match self {
            State::Ended(ending) => Some(ending),
            _ => None,
        }
    }

    /// One word for programs and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            State::Incoming => "incoming",
            State::Paused => "paused",
            State::Running => "running",
            State::Panicked => "panicked",
            State::Failed { .. } => "failed",
            State::Ended(_) => "ended",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            State::Failed { what } => write!(formatter, "failed ({what})"),
            State::Ended(ending) => write!(formatter, "ended: it {ending}"),
            other => formatter.write_str(other.name()),
        }
    }
}

/// Why QEMU's process has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndCause {
    /// The guest has switched itself off.
    PoweredOff,
    /// The monitor was told to quit.
    Quit,
    /// The guest's kernel has panicked, and that ends QEMU by configuration.
    Panicked,
    /// A signal asked QEMU to end, and it did so in order.
    Terminated,
    /// A signal has killed it.
    Killed {
        /// The signal's number.
        signal: i32,
    },
    /// It has ended by itself with this status.
    Failed {
        /// The exit status.
        code: i32,
    },
    /// It was another process's child, and did not say.
    Unknown,
}

/// How a machine has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    /// Why.
    pub cause: EndCause,
    /// What QEMU has said last.
    pub qemu: String,
    /// What the guest's console has shown last.
    pub console: String,
}

impl Ending {
    /// It was meant to end: switched off by the guest, or told to.
    pub fn is_orderly(&self) -> bool {
        matches!(self.cause, EndCause::PoweredOff | EndCause::Quit | EndCause::Terminated)
    }
}

impl EndCause {
    /// Why, from QEMU's last `SHUTDOWN` event, the status and whether we have killed it.
    pub(super) fn of(shutdown: Option<&str>, status: Option<ExitStatus>, killed: bool) -> EndCause {
        // What kills counts more than what was announced: an announced end can be cut short.
        if let Some(signal) = status.and_then(|status| status.signal()) {
            return EndCause::Killed { signal };
        }
        match (shutdown, status.and_then(|status| status.code())) {
            (_, Some(code)) if code != 0 => EndCause::Failed { code },
            (Some("guest-shutdown"), _) => EndCause::PoweredOff,
            (Some("guest-panic"), _) => EndCause::Panicked,
            (Some("host-signal"), _) => EndCause::Terminated,
            (Some("host-qmp-quit"), _) => EndCause::Quit,
            (_, None) if killed => EndCause::Killed { signal: libc::SIGKILL },
            (_, Some(code)) => EndCause::Failed { code },
            (_, None) => EndCause::Unknown,
        }
    }
}

impl fmt::Display for EndCause {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EndCause::PoweredOff => formatter.write_str("has switched itself off"),
            EndCause::Quit => formatter.write_str("was told to quit"),
            EndCause::Panicked => formatter.write_str("has ended because the guest's kernel panicked"),
            EndCause::Terminated => formatter.write_str("was terminated by a signal"),
            EndCause::Killed { signal } => write!(formatter, "was killed by signal {signal}"),
            EndCause::Failed { code } => write!(formatter, "has ended by itself with status {code}"),
            EndCause::Unknown => formatter.write_str("has ended without saying why"),
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.cause)?;
        for (who, words) in [("QEMU said", &self.qemu), ("the guest's console ends with", &self.console)] {
            if !words.is_empty() {
                write!(formatter, "; {who}:\n{words}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_follow_from_what_was_seen() {
        let exited = |code: i32| Some(ExitStatus::from_raw(code << 8));
        let killed = Some(ExitStatus::from_raw(9));
        let table = [
            (Some("guest-shutdown"), exited(0), false, EndCause::PoweredOff),
            (Some("guest-shutdown"), None, false, EndCause::PoweredOff),
            (Some("guest-shutdown"), killed, true, EndCause::Killed { signal: 9 }),
            (Some("host-qmp-quit"), exited(0), false, EndCause::Quit),
            (Some("host-signal"), exited(0), false, EndCause::Terminated),
            (Some("guest-panic"), exited(0), false, EndCause::Panicked),
            (None, exited(1), false, EndCause::Failed { code: 1 }),
            (None, exited(0), false, EndCause::Failed { code: 0 }),
            (None, killed, false, EndCause::Killed { signal: 9 }),
            (None, None, true, EndCause::Killed { signal: 9 }),
            (None, None, false, EndCause::Unknown),
        ];
        for (shutdown, status, by_us, cause) in table {
            assert_eq!(EndCause::of(shutdown, status, by_us), cause, "{shutdown:?} {status:?} {by_us}");
        }
    }
}
