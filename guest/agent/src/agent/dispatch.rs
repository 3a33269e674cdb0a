//! Requests become work, each on a thread of its own.

use super::in_progress::InProgress;
use super::lines::Line;
use super::replies::{Replies, Reporter, Result, failure, malformed};
use super::{SwitchOff, clock, execute, files, free_pages, health, identity, postgres};
use crate::protocol::{
    Answer, Command, Failure, FailureKind, Greeting, Hello, LINE_BYTES_MAX, Outcome, Reply, Request, VERSION_NEWEST,
    VERSION_OLDEST,
};
use std::fs::read_to_string;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// What takes requests.
pub(crate) struct Dispatch {
    replies: Arc<Replies>,
    switch_off: Sender<SwitchOff>,
    in_progress: Arc<InProgress>,
}

impl Dispatch {
    pub(crate) fn new(replies: Arc<Replies>, switch_off: Sender<SwitchOff>) -> Dispatch {
        Dispatch { replies, switch_off, in_progress: Arc::default() }
    }

    /// Begins what a line asks for, or answers that it cannot be done.
    pub(crate) fn line(&self, line: Line) {
        let request = match line {
            Line::Whole(text) => serde_json::from_slice::<Request>(&text)
                .map_err(|error| (id_of(&text), malformed(format!("no request: {error}")))),
            Line::TooLong => Err((None, malformed(format!("a line of more than {LINE_BYTES_MAX} bytes")))),
        };
        match request {
            Ok(Request { id, command: Command::Hello(hello) }) => self.answer(Some(id), greeting(hello)),
            Ok(Request { id, command: Command::PowerOff {} }) => {
                self.answer(Some(id), Ok(Answer::Done {}));
                // Nobody receives: it is being switched off already.
                let _ = self.switch_off.send(SwitchOff);
            }
            Ok(Request { id, command: Command::Cancel { id: given_up } }) => {
                self.in_progress.cancel(given_up);
                self.answer(Some(id), Ok(Answer::Done {}));
            }
            Ok(request) => self.begin(request),
            Err((id, failure)) => self.answer(id, Err(failure)),
        }
    }

    fn answer(&self, id: Option<u64>, result: Result<Answer>) {
        self.replies.send(&Reply { id, outcome: outcome(result) });
    }

    fn begin(&self, Request { id, command }: Request) {
        let cancelled = match self.in_progress.begin(id, command.is_urgent()) {
            Ok(cancelled) => cancelled,
            Err(busy) => return self.answer(Some(id), Err(busy)),
        };
        let (replies, in_progress, is_urgent) =
            (Arc::clone(&self.replies), Arc::clone(&self.in_progress), command.is_urgent());
        let begun = std::thread::Builder::new().spawn(move || {
            let reporter = Reporter::new(&replies, id, cancelled);
            let result = catch_unwind(AssertUnwindSafe(|| perform(command, &reporter)))
                .unwrap_or_else(|_| Err(failure(FailureKind::Failed, "the agent failed: see the guest's console")));
            // Before the answer: who has it may ask for the next thing at once.
            in_progress.end(id, is_urgent);
            replies.send(&Reply { id: Some(id), outcome: outcome(result) });
        });
        if let Err(error) = begun {
            self.in_progress.end(id, is_urgent);
            self.answer(Some(id), Err(failure(FailureKind::Busy, format!("no thread for it: {error}"))));
        }
    }
}

fn outcome(result: Result<Answer>) -> Outcome {
    match result {
        Ok(answer) => Outcome::Ok(answer),
        Err(failure) => Outcome::Error(failure),
    }
}

fn perform(command: Command, reporter: &Reporter<'_>) -> Result<Answer> {
    match command {
        Command::Health {} => health::health().map(Answer::Health),
        Command::FreePages {} => free_pages::free_pages().map(Answer::FreePages),
        Command::Execute(execute) => execute::execute(&execute, reporter).map(Answer::Executed),
        Command::SetClock { unix_ns } => clock::set(unix_ns).map(done),
        Command::SetIdentity(identity) => identity::set(&identity).map(done),
        Command::WriteFile(file) => files::write(&file).map(done),
        Command::Postgres(action) => postgres::perform(&action, reporter),
        Command::Hello(hello) => greeting(hello),
        Command::PowerOff {} | Command::Cancel { .. } => Err(malformed("that is not done by a thread of its own")),
    }
}

fn done((): ()) -> Answer {
    Answer::Done {}
}

fn greeting(hello: Hello) -> Result<Answer> {
    let version = hello.newest.min(VERSION_NEWEST);
    if version < hello.oldest.max(VERSION_OLDEST) {
        return Err(Failure {
            kind: FailureKind::Version,
            message: format!(
                "the host speaks versions {} to {}, this guest's agent {VERSION_OLDEST} to {VERSION_NEWEST}: \
                 use an image that was built with the host's programs",
                hello.oldest, hello.newest
            ),
        });
    }
    let line = |path: &str| read_to_string(path).map(|text| text.trim_end().to_string()).unwrap_or_default();
    Ok(Answer::Hello(Greeting {
        version,
        program: env!("CARGO_PKG_VERSION").to_string(),
        boot_id: line("/proc/sys/kernel/random/boot_id"),
        kernel: line("/proc/sys/kernel/osrelease"),
    }))
}

/// The id of a line that is no request but an object with an id: whoever waits for that one is to hear of it.
fn id_of(text: &[u8]) -> Option<u64> {
    serde_json::from_slice::<serde_json::Value>(text).ok()?.get("id")?.as_u64()
}
