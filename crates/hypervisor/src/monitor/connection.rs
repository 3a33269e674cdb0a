//! The two tasks of a connection to a monitor, and who waits for what.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use onecopy_control::LineReader;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::Value;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use super::{Event, LINE_BYTES_MAX};
use crate::{HypervisorError, QemuVersion};

/// QEMU's answer: a value, or class and description of an error.
type Answer = Result<Value, (String, String)>;

/// A line on its way to QEMU.
pub(super) struct Outgoing {
    pub(super) line: Vec<u8>,
    /// Goes with the line's first byte.
    pub(super) descriptor: Option<OwnedFd>,
}

/// What both tasks and all callers see.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) socket: PathBuf,
    pub(super) events: broadcast::Sender<Event>,
    /// Why the connection is lost.
    pub(super) lost: watch::Sender<Option<String>>,
    /// Who waits, by id; none once the connection is lost. Locked for moments only.
    waiting: Mutex<Option<HashMap<u64, oneshot::Sender<Answer>>>>,
}

impl Shared {
    pub(super) fn new(socket: PathBuf, events: broadcast::Sender<Event>) -> Shared {
        Shared { socket, events, lost: watch::Sender::new(None), waiting: Mutex::new(Some(HashMap::new())) }
    }

    /// The error for who finds the connection lost.
    pub(super) fn lost_error(&self) -> HypervisorError {
        let reason = self.lost.borrow().clone().unwrap_or_else(|| "it is closed".to_owned());
        HypervisorError::MonitorLost { socket: self.socket.clone(), reason }
    }

    /// Waits for the answer `id` until what is returned is dropped.
    pub(super) fn wait_for(&self, id: u64, answered: oneshot::Sender<Answer>) -> Result<Waiting<'_>, HypervisorError> {
        match self.waiting().as_mut() {
            Some(waiting) => waiting.insert(id, answered),
            None => return Err(self.lost_error()),
        };
        Ok(Waiting { shared: self, id })
    }

    fn waiting(&self) -> MutexGuard<'_, Option<HashMap<u64, oneshot::Sender<Answer>>>> {
        self.waiting.lock().expect("nothing panics while it holds this lock")
    }

    /// Ends the connection for all.
    fn lose(&self, reason: String) {
        self.lost.send_if_modified(|lost| match lost {
            Some(_) => false,
            None => {
                *lost = Some(reason);
                true
            }
        });
        self.waiting().take();
    }

    /// Hands one message to who waits for it. What is neither an event nor an answer that somebody waits for is thrown
    /// away.
    fn receive(&self, mut message: Value) {
        if let Some(event) = Event::of_message(&message) {
            // Nobody may be listening.
            let _listeners = self.events.send(event);
            return;
        }
        let Some(id) = message.get("id").and_then(Value::as_u64) else {
            tracing::debug!(%message, "a message of the monitor that answers nothing");
            return;
        };
        let answer = match message.get_mut("return").map(Value::take) {
            Some(value) => Ok(value),
            None => {
                let text = |key| message.pointer(key).and_then(Value::as_str).unwrap_or("?").to_owned();
                Err((text("/error/class"), text("/error/desc")))
            }
        };
        if let Some(answered) = self.waiting().as_mut().and_then(|waiting| waiting.remove(&id)) {
            // Given up in this moment: nobody wants to know any more.
            let _given_up = answered.send(answer);
        }
    }
}

/// Somebody waits for an answer.
#[derive(Debug)]
pub(super) struct Waiting<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(waiting) = self.shared.waiting().as_mut() {
            waiting.remove(&self.id);
        }
    }
}

/// A connection that was greeted.
pub(super) struct Greeted {
    reader: LineReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

/// Connects and reads the greeting. A monitor that serves another connection greets when that one has gone.
pub(super) async fn greet(socket: &Path) -> io::Result<(Greeted, QemuVersion)> {
    let (reader, writer) = UnixStream::connect(socket).await?.into_split();
    let mut reader = LineReader::new(reader, LINE_BYTES_MAX);
    let line = reader.next().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    let greeting: Value = serde_json::from_slice(&line)?;
    let number = |part: &str| {
        let number = greeting.pointer(&format!("/QMP/version/qemu/{part}")).and_then(Value::as_u64);
        number.and_then(|number| u32::try_from(number).ok())
    };
    match (number("major"), number("minor")) {
        (Some(major), Some(minor)) => Ok((Greeted { reader, writer }, QemuVersion { major, minor })),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "what answers is no monitor of QEMU")),
    }
}

/// Starts the two tasks.
pub(super) fn run(greeted: Greeted, queue: mpsc::Receiver<Outgoing>, shared: &Arc<Shared>) -> [JoinHandle<()>; 2] {
    let Greeted { reader, writer } = greeted;
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

/// Reads until the connection ends; why it did.
async fn read(mut reader: LineReader<OwnedReadHalf>, shared: &Shared) -> String {
    loop {
        match reader.next().await {
            Ok(Some(line)) if line.is_empty() => {}
            Ok(Some(line)) => match serde_json::from_slice(&line) {
                Ok(message) => shared.receive(message),
                Err(error) => return format!("what QEMU sends is no JSON: {error}"),
            },
            Ok(None) => return "QEMU has closed it".to_owned(),
            Err(error) => return error.to_string(),
        }
    }
}

async fn write(writer: OwnedWriteHalf, mut queue: mpsc::Receiver<Outgoing>) -> io::Result<()> {
    let stream: &UnixStream = writer.as_ref();
    while let Some(Outgoing { line, mut descriptor }) = queue.recv().await {
        let mut rest = line.as_slice();
        while !rest.is_empty() {
            let sent = stream.async_io(Interest::WRITABLE, || send(stream, rest, descriptor.as_ref())).await?;
            // It went with the first bytes.
            descriptor = None;
            rest = &rest[sent..];
        }
    }
    Ok(())
}

/// Sends some of `bytes`, and the descriptor with them.
fn send(stream: &UnixStream, bytes: &[u8], descriptor: Option<&OwnedFd>) -> io::Result<usize> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let borrowed = descriptor.map(|descriptor| [descriptor.as_fd()]);
    if let Some(descriptors) = &borrowed
        && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors))
    {
        return Err(io::Error::other("there is no room for a descriptor"));
    }
    let sent = rustix::net::sendmsg(stream, &[io::IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(sent)
}
