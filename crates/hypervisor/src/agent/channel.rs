//! The two tasks of a connection to an agent, and who waits for what.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use onecopy_control::LineReader;
use onecopy_guest_agent::protocol::{Greeting, LINE_BYTES_MAX, Outcome, Reply};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// What both tasks and all callers see.
#[derive(Debug)]
pub(super) struct Shared {
    /// Why the connection is lost.
    lost: watch::Sender<Option<String>>,
    state: Mutex<Waiters>,
}

/// Locked for moments only.
#[derive(Debug, Default)]
struct Waiters {
    by_id: HashMap<u64, mpsc::Sender<Outcome>>,
    greeting: Option<Greeting>,
}

impl Shared {
    pub(super) fn new() -> Shared {
        Shared { lost: watch::Sender::new(None), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, Waiters> {
        self.state.lock().expect("nothing panics while it holds this lock")
    }

    pub(super) fn greeting(&self) -> Option<Greeting> {
        self.state().greeting.clone()
    }

    pub(super) fn greeted(&self, greeting: Greeting) {
        self.state().greeting = Some(greeting);
    }

    pub(super) fn lost(&self) -> Option<String> {
        self.lost.borrow().clone()
    }

    pub(super) async fn wait_lost(&self) {
        let mut lost = self.lost.subscribe();
        // The sender is this value's own.
        let _closed = lost.wait_for(Option::is_some).await;
    }

    /// Waits for replies to `id` until what is returned is dropped; none when the connection is lost.
    pub(super) fn wait_for(&self, id: u64, said: mpsc::Sender<Outcome>) -> Option<Waiting<'_>> {
        let mut state = self.state();
        // Under the lock, as whoever loses the connection takes it after saying so.
        if self.lost.borrow().is_some() {
            return None;
        }
        state.by_id.insert(id, said);
        Some(Waiting { shared: self, id })
    }

    /// Nobody is answered any more who waits now.
    fn forget(&self, reason: &str) {
        let forgotten = std::mem::take(&mut self.state().by_id).len();
        if forgotten > 0 {
            tracing::debug!(forgotten, reason, "requests to a guest's agent are lost");
        }
    }

    pub(super) fn lose(&self, reason: String) {
        self.lost.send_if_modified(|lost| match lost {
            Some(_) => false,
            None => {
                *lost = Some(reason.clone());
                true
            }
        });
        self.forget(&reason);
    }

    /// Hands a line to who waits for it. A line that answers nobody is of an earlier connection, or a guest's nonsense.
    fn receive(&self, line: &[u8]) {
        let Ok(Reply { id: Some(id), outcome }) = serde_json::from_slice::<Reply>(line) else {
            tracing::debug!(bytes = line.len(), "a line of a guest's agent that answers nothing");
            return;
        };
        let mut state = self.state();
        let is_last = !matches!(outcome, Outcome::Progress(_));
        let Some(said) = state.by_id.get(&id) else { return };
        // One place is kept for the last word.
        if is_last || said.capacity() > 1 {
            let _given_up = said.try_send(outcome);
        }
        if is_last {
            state.by_id.remove(&id);
        }
    }
}

/// Somebody waits for replies.
#[derive(Debug)]
pub(super) struct Waiting<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.shared.state().by_id.remove(&self.id);
    }
}

/// Starts the two tasks.
pub(super) fn run(stream: UnixStream, queue: mpsc::Receiver<Vec<u8>>, shared: &Arc<Shared>) -> [JoinHandle<()>; 2] {
    let (reader, writer) = stream.into_split();
    let (for_reader, for_writer) = (shared.clone(), shared.clone());
    let reading = async move {
        let reason = read(reader, &for_reader).await;
        for_reader.lose(reason);
    };
    let writing = async move {
        if let Err(error) = write(writer, queue).await {
            for_writer.lose(error.to_string());
        }
    };
    [tokio::spawn(reading), tokio::spawn(writing)]
}

async fn read(reader: OwnedReadHalf, shared: &Shared) -> String {
    let mut reader = LineReader::new(reader, LINE_BYTES_MAX);
    loop {
        match reader.next().await {
            Ok(Some(line)) if line.is_empty() => {}
            Ok(Some(line)) => shared.receive(&line),
            Ok(None) => return "QEMU has closed it".to_owned(),
            Err(error) => return error.to_string(),
        }
    }
}

/// Writes whole lines only: a request that is given up half written would spoil the next one.
async fn write(mut writer: OwnedWriteHalf, mut queue: mpsc::Receiver<Vec<u8>>) -> io::Result<()> {
    while let Some(line) = queue.recv().await {
        writer.write_all(&line).await?;
    }
    Ok(())
}
