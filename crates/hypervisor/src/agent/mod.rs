//! The host's end of the talk with the agent in a guest (`onecopy_guest_agent::protocol`).
//!
//! ```text
//!            connect                    greeting
//!  nothing ──────────> Greeting ───────────────────> Ready ──┐ requests, several at once
//!                            └─ hello again, each with an id of its own
//!                                                            | a probe's hello tells of another boot
//!                                                            v
//!                                                          Lost: what was under way, too
//! ```
//!
//! The channel has no beginning: what an earlier host or an earlier life of the guest has left in it may come first, in
//! the midst of a line. So an empty line goes first, and everything is thrown away until a `hello` of this connection
//! is answered. Ids are random, so an answer to an earlier host's request is never taken for one of ours.

mod channel;
mod requests;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use onecopy_guest_agent::protocol::{
    Answer, COMMANDS_MAX, Command, FailureKind, Greeting, Hello, Outcome, Postgres, Progress, Request,
    URGENT_COMMANDS_MAX, VERSION_NEWEST, VERSION_OLDEST,
};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::{HypervisorError, printable};
use channel::Shared;

/// A request that only looks, or changes something small, is given up after this.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// The first `hello` is repeated after this, as one may have been lost with a guest that was starting anew; then after
/// twice as long each time.
const HELLO_INTERVAL_MIN: Duration = Duration::from_secs(1);
/// At most this.
const HELLO_INTERVAL_MAX: Duration = Duration::from_secs(8);
/// How often a socket is tried that is not there yet.
const CONNECT_INTERVAL: Duration = Duration::from_millis(50);
/// Lines that wait to be written while the guest does not read.
const LINES_WAITING_MAX: usize = COMMANDS_MAX * 2;
/// Progress that nobody has fetched; what comes then is thrown away.
const PROGRESS_WAITING_MAX: usize = 16;
/// Characters of what a guest says of itself.
const WORD_MAX: usize = 256;

/// A connection to a guest's agent. Clones share it, and several may ask at the same time.
#[derive(Debug, Clone)]
pub struct Agent {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    socket: PathBuf,
    shared: Arc<Shared>,
    outgoing: mpsc::Sender<Vec<u8>>,
    places: Semaphore,
    urgent_places: Semaphore,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Agent {
    /// Connects to the socket of a machine's agent port and waits up to `timeout` until an agent answers.
    ///
    /// # Errors
    /// [`HypervisorError::NoAgent`]: the guest is not up, or another process talks to it;
    /// [`HypervisorError::AgentVersion`].
    pub async fn connect(socket: impl AsRef<Path>, timeout: Duration) -> Result<Agent, HypervisorError> {
        let socket = socket.as_ref();
        let deadline = Instant::now() + timeout;
        let stream = loop {
            match UnixStream::connect(socket).await {
                Ok(stream) => break stream,
                Err(error) if Instant::now() + CONNECT_INTERVAL >= deadline => {
                    return Err(HypervisorError::NoAgent { socket: socket.to_owned(), reason: error.to_string() });
                }
                Err(_) => tokio::time::sleep(CONNECT_INTERVAL).await,
            }
        };
        let shared = Arc::new(Shared::new());
        let (outgoing, queue) = mpsc::channel(LINES_WAITING_MAX);
        let tasks = channel::run(stream, queue, &shared);
        let socket = socket.to_owned();
        let (places, urgent_places) = (Semaphore::new(COMMANDS_MAX), Semaphore::new(URGENT_COMMANDS_MAX));
        let agent = Agent { inner: Arc::new(Inner { socket, shared, outgoing, places, urgent_places, tasks }) };
        agent.greet(deadline, timeout).await?;
        Ok(agent)
    }

    /// Who answers: versions, and the guest's boot.
    pub fn greeting(&self) -> Greeting {
        self.inner.shared.greeting().expect("an agent is made when it has answered")
    }

    /// Why the connection is lost; none while it stands.
    pub fn lost(&self) -> Option<String> {
        self.inner.shared.lost()
    }

    /// Waits until the connection is lost.
    pub async fn wait_lost(&self) {
        self.inner.shared.wait_lost().await;
    }

    /// Whether the agent answers at all: a hello, which waits behind no other request and for nothing in the guest. A
    /// guest that has booted anew knows nothing of what was asked before: the connection is lost.
    ///
    /// # Errors
    /// [`HypervisorError::AgentUnresponsive`], [`HypervisorError::AgentLost`].
    pub async fn probe(&self, timeout: Duration) -> Result<(), HypervisorError> {
        let command = Command::Hello(Hello { oldest: VERSION_OLDEST, newest: VERSION_NEWEST });
        let name = requests::name(&command);
        match tokio::time::timeout(timeout, self.exchange(name, command, |_| {})).await {
            Ok(Ok(Answer::Hello(greeting))) if bounded(greeting.clone()).boot_id != self.greeting().boot_id => {
                self.inner.shared.lose("the guest has booted anew".to_owned());
                // QEMU serves the next connection when this one is closed.
                self.inner.tasks.iter().for_each(JoinHandle::abort);
                Err(self.lost_error(name))
            }
            // Whatever else it says, it is there.
            Ok(Ok(_) | Err(HypervisorError::Agent { .. })) => Ok(()),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(HypervisorError::AgentUnresponsive { command: name.to_owned(), waited: timeout }),
        }
    }

    /// Asks, and waits up to `timeout` for the answer. At most as many requests are under way as the agent takes;
    /// others wait. When nobody waits any more, because of `timeout` or because what is returned is dropped, the guest
    /// is told to end a program.
    ///
    /// # Errors
    /// [`HypervisorError::Agent`] with the agent's words, [`HypervisorError::AgentUnresponsive`],
    /// [`HypervisorError::AgentLost`].
    pub async fn request(&self, command: Command, timeout: Duration) -> Result<Answer, HypervisorError> {
        self.request_with_progress(command, timeout, |_| {}).await
    }

    /// The same, and tells how far it is.
    ///
    /// # Errors
    /// Those of [`Agent::request`].
    pub async fn request_with_progress(
        &self,
        command: Command,
        timeout: Duration,
        told: impl FnMut(Progress),
    ) -> Result<Answer, HypervisorError> {
        let name = requests::name(&command);
        let asked = tokio::time::timeout(timeout, self.ask(name, command, told)).await;
        asked.unwrap_or_else(|_| Err(HypervisorError::AgentUnresponsive { command: name.to_owned(), waited: timeout }))
    }

    async fn ask(
        &self,
        name: &'static str,
        command: Command,
        told: impl FnMut(Progress),
    ) -> Result<Answer, HypervisorError> {
        let places = if command.is_urgent() { &self.inner.urgent_places } else { &self.inner.places };
        let _place = places.acquire().await.map_err(|_| self.lost_error(name))?;
        self.exchange(name, command, told).await
    }

    fn lost_error(&self, name: &'static str) -> HypervisorError {
        let reason = self.lost().unwrap_or_else(|| "the connection was begun anew".to_owned());
        HypervisorError::AgentLost { command: name.to_owned(), reason }
    }

    /// Sends a request for which there is a place, or that needs none, and waits for its answer.
    async fn exchange(
        &self,
        name: &'static str,
        command: Command,
        mut told: impl FnMut(Progress),
    ) -> Result<Answer, HypervisorError> {
        let lost = || self.lost_error(name);
        let id = rand::random::<u64>();
        let (said, mut replies) = mpsc::channel(PROGRESS_WAITING_MAX + 1);
        let _waiting = self.inner.shared.wait_for(id, said).ok_or_else(lost)?;
        let can_be_ended = matches!(command, Command::Execute(_) | Command::Postgres(Postgres::BaseBackup(_)));
        self.inner.outgoing.send(line_of(&Request { id, command })).await.map_err(|_| lost())?;
        let mut waiting = can_be_ended.then(|| CancelOnDrop { agent: &self.inner, id, is_over: false });
        let answer = loop {
            match replies.recv().await {
                Some(Outcome::Progress(progress)) => told(progress),
                Some(Outcome::Ok(answer)) => break Ok(answer),
                Some(Outcome::Error(failure)) => {
                    break Err(HypervisorError::Agent { command: name.to_owned(), failure });
                }
                None => break Err(lost()),
            }
        };
        if let Some(waiting) = &mut waiting {
            waiting.is_over = true;
        }
        answer
    }

    /// Says hello until one is answered.
    async fn greet(&self, deadline: Instant, timeout: Duration) -> Result<(), HypervisorError> {
        let no_agent = |reason: String| HypervisorError::NoAgent { socket: self.inner.socket.clone(), reason };
        let unresponsive =
            || no_agent(format!("no answer within {timeout:?}; the guest is not up, or another process talks to it"));
        let lost = || no_agent(self.lost().unwrap_or_else(|| "the connection is lost".to_owned()));
        // A guest that does not read takes no line, and those that wait for it take its place.
        let send = async |line: Vec<u8>| {
            let sent = tokio::time::timeout_at(deadline, self.inner.outgoing.send(line)).await;
            sent.map_err(|_| unresponsive())?.map_err(|_| lost())
        };
        // Ends the line that an earlier host may have begun.
        send(b"\n".to_vec()).await?;
        let (said, mut replies) = mpsc::channel(PROGRESS_WAITING_MAX + 1);
        let mut interval = HELLO_INTERVAL_MIN;
        let mut waiting = Vec::new();
        loop {
            let id = rand::random::<u64>();
            waiting.push(self.inner.shared.wait_for(id, said.clone()).ok_or_else(lost)?);
            let hello = Command::Hello(Hello { oldest: VERSION_OLDEST, newest: VERSION_NEWEST });
            send(line_of(&Request { id, command: hello })).await?;
            let next = deadline.min(Instant::now() + interval);
            let answer = tokio::select! {
                answer = tokio::time::timeout_at(next, replies.recv()) => answer,
                () = self.inner.shared.wait_lost() => return Err(lost()),
            };
            match answer {
                Ok(Some(Outcome::Ok(Answer::Hello(greeting)))) => {
                    self.inner.shared.greeted(bounded(greeting));
                    return Ok(());
                }
                Ok(Some(Outcome::Error(failure))) if failure.kind == FailureKind::Version => {
                    return Err(HypervisorError::AgentVersion { reason: failure.message });
                }
                // An agent that is still busy with what an earlier host has asked for, or that is confused: again.
                Ok(_) => tokio::time::sleep_until(next).await,
                Err(_) => {}
            }
            if Instant::now() >= deadline {
                return Err(unresponsive());
            }
            interval = HELLO_INTERVAL_MAX.min(interval * 2);
        }
    }
}

/// What a guest says of itself is kept and shown: no more than a line of it, and nothing that commands a terminal.
fn bounded(greeting: Greeting) -> Greeting {
    let line = |text: String| printable(&text).chars().filter(|&letter| letter != '\n').take(WORD_MAX).collect();
    let Greeting { version, program, boot_id, kernel } = greeting;
    Greeting { version, program: line(program), boot_id: line(boot_id), kernel: line(kernel) }
}

/// Tells the guest when a request is given up.
struct CancelOnDrop<'a> {
    agent: &'a Inner,
    id: u64,
    /// It was answered, or cannot be any more.
    is_over: bool,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let request = Request { id: rand::random::<u64>(), command: Command::Cancel { id: self.id } };
        // A guest that does not read ends the program when its own time is over.
        if self.agent.outgoing.try_send(line_of(&request)).is_err() {
            tracing::debug!("a guest is not told that nobody waits for a program");
        }
    }
}

fn line_of(request: &Request) -> Vec<u8> {
    let mut line = serde_json::to_vec(request).expect("a request has only text keys");
    line.push(b'\n');
    line
}
