//! Replies on their way to the host: one line at a time, from any thread.

use super::in_progress::Cancelled;
use super::port::Port;
use crate::protocol::{Answer, Failure, FailureKind, Outcome, Progress, Reply};
use std::sync::{Arc, Mutex, PoisonError};

/// How a command ends.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// A failure of that kind.
pub(crate) fn failure(kind: FailureKind, message: impl Into<String>) -> Failure {
    Failure { kind, message: message.into() }
}

/// It was tried and failed.
pub(crate) fn failed(what: &str, error: impl std::fmt::Display) -> Failure {
    failure(FailureKind::Failed, format!("{what}: {error}"))
}

/// It makes no sense.
pub(crate) fn malformed(message: impl Into<String>) -> Failure {
    failure(FailureKind::Malformed, message)
}

/// The port's writing side.
pub(crate) struct Replies {
    port: Arc<Port>,
    /// A line was begun whose end no host has read: the next one starts on a line of its own.
    torn: Mutex<bool>,
}

impl Replies {
    pub(crate) fn new(port: Arc<Port>) -> Replies {
        Replies { port, torn: Mutex::new(false) }
    }

    /// Sends a reply; nobody gets it when no host listens.
    pub(crate) fn send(&self, reply: &Reply) {
        let mut line = Vec::new();
        let mut torn = self.torn.lock().unwrap_or_else(PoisonError::into_inner);
        // A host that greets may find the end of what the one before it has not read.
        if *torn || matches!(reply.outcome, Outcome::Ok(Answer::Hello(_))) {
            line.push(b'\n');
        }
        if let Err(error) = serde_json::to_writer(&mut line, reply) {
            eprintln!("onecopy-guest: a reply cannot be written as JSON: {error}");
            return;
        }
        line.push(b'\n');
        match self.port.write(&line) {
            Ok(written) => *torn = !written,
            Err(error) => {
                *torn = true;
                eprintln!("onecopy-guest: writing to the host: {error}");
            }
        }
    }
}

/// One command's host: where its progress goes, and whether it still waits.
pub(crate) struct Reporter<'a> {
    replies: &'a Replies,
    id: u64,
    cancelled: Cancelled,
}

impl<'a> Reporter<'a> {
    pub(crate) fn new(replies: &'a Replies, id: u64, cancelled: Cancelled) -> Reporter<'a> {
        Reporter { replies, id, cancelled }
    }

    /// Set when the host waits no more.
    pub(crate) fn cancelled(&self) -> Cancelled {
        Arc::clone(&self.cancelled)
    }

    pub(crate) fn progress(&self, progress: Progress) {
        self.replies.send(&Reply { id: Some(self.id), outcome: Outcome::Progress(progress) });
    }

    pub(crate) fn say(&self, message: &str) {
        self.progress(Progress { message: message.to_string(), done_bytes: None, total_bytes: None });
    }
}
