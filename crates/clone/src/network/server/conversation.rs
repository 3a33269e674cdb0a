//! One connection of a clone elsewhere.

use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, split};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::spawn_blocking;
use tokio::time::{interval, timeout};

use super::sessions::{Ended, Frozen, Session, Sessions};
use crate::OriginError;
use crate::network::manifest;
use crate::network::protocol::{
    DeliveredRange, HOT_RANGES_MAX, Message, Payload, ProtocolError, READ_BYTES_MAX, ReadFailure, ReadRequest,
    SessionId, VERSION, read_message, write_message,
};
use crate::network::{KEEP_ALIVE_INTERVAL, UNRESPONSIVE_MAX};
use crate::plan::Plan;

/// Reads of one connection that are worked on at once; the next one waits in the socket.
const READS_IN_WORK_MAX: usize = 16;
/// Answers of one connection that wait to be sent; who has more waits before the next read.
const ANSWERS_WAITING_MAX: usize = 16;

/// Speaks with a clone elsewhere over `stream` until it leaves.
///
/// # Errors
/// [`ProtocolError`]: the connection broke or the other side does not keep to the protocol. The session goes on.
pub async fn serve<S>(stream: S, sessions: Arc<Sessions>) -> Result<(), ProtocolError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut stream = stream;
    match begin(&mut stream, &sessions).await {
        Ok(session) => converse(stream, session, &sessions).await,
        Err(ProtocolError::Broken(error)) => Err(ProtocolError::Broken(error)),
        Err(error) => {
            let refusal = Message::Refused { reason: error.to_string() };
            write_message(&mut stream, &refusal, &mut Vec::new()).await?;
            let _ = timeout(UNRESPONSIVE_MAX, stream.shutdown()).await;
            Err(error)
        }
    }
}

/// From the first byte to where reads may come.
async fn begin<S>(stream: &mut S, sessions: &Sessions) -> Result<Arc<Session>, ProtocolError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut buffer = Vec::new();
    match receive(stream, &mut buffer).await? {
        Message::Hello { version, .. } if version != VERSION => {
            let reason = format!("this host speaks version {VERSION} of the protocol, the clone's {version}");
            Err(ProtocolError::Refused(reason))
        }
        Message::Hello { session: Some(id), .. } => {
            let gone = || {
                ProtocolError::Refused(
                    "the image is gone: its lease was over, or the source's host restarted".to_owned(),
                )
            };
            let session = sessions.get(id).ok_or_else(gone)?;
            write_message(stream, &welcome(id, sessions), &mut buffer).await?;
            Ok(session)
        }
        Message::Hello { session: None, .. } => open(stream, sessions).await,
        other => Err(ProtocolError::Unexpected { got: other.name(), wanted: "a hello" }),
    }
}

fn welcome(session: SessionId, sessions: &Sessions) -> Message {
    let lease_seconds = u32::try_from(sessions.lease().as_secs()).unwrap_or(u32::MAX);
    Message::Welcome { version: VERSION, session, lease_seconds }
}

/// Freezes, and tells of the image.
async fn open<S>(stream: &mut S, sessions: &Sessions) -> Result<Arc<Session>, ProtocolError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut buffer = Vec::new();
    let full = || ProtocolError::Refused(format!("{} images are read already", super::SESSIONS_MAX));
    let _admission = sessions.admit().ok_or_else(full)?;
    let id = SessionId::generate()?;
    write_message(stream, &welcome(id, sessions), &mut buffer).await?;
    let Message::Open { plan } = receive(stream, &mut buffer).await? else {
        return Err(ProtocolError::Unexpected { got: "something else", wanted: "an opening" });
    };
    let plan: Plan = serde_json::from_slice(&plan).map_err(|_| ProtocolError::Malformed("a plan of another form"))?;
    let mut freezing = sessions.maker().freeze(id, plan);
    let mut signs_of_life = interval(KEEP_ALIVE_INTERVAL);
    let mut broken = None;
    // Also when nobody listens any more: a freeze that is given up half way would leave its slot.
    let frozen = loop {
        tokio::select! {
            frozen = &mut freezing => break frozen,
            _ = signs_of_life.tick(), if broken.is_none() => {
                broken = write_message(stream, &Message::KeepAlive, &mut buffer).await.err();
            }
        }
    };
    let Frozen { manifest, small_files, image_store } =
        frozen.map_err(|error| ProtocolError::Refused(error.to_string()))?;
    let session = sessions.insert(id, image_store);
    let sending = async {
        if let Some(error) = broken {
            return Err(error);
        }
        for message in manifest::to_messages(&manifest, small_files)? {
            // Who does not read is gone: the image is not kept for him alone.
            let unresponsive = |_| ProtocolError::Broken(std::io::ErrorKind::TimedOut.into());
            timeout(UNRESPONSIVE_MAX, write_message(stream, &message, &mut buffer)).await.map_err(unresponsive)??;
        }
        Ok(())
    };
    // Nobody can come back to an image that he has not heard of.
    let told: Result<(), ProtocolError> = sending.await;
    told.inspect_err(|_| sessions.end(id, Ended::GivenUp))?;
    Ok(session)
}

async fn receive<S>(stream: &mut S, buffer: &mut Vec<u8>) -> Result<Message, ProtocolError>
where
    S: AsyncRead + Unpin,
{
    let unresponsive = |_| ProtocolError::Broken(std::io::ErrorKind::TimedOut.into());
    timeout(UNRESPONSIVE_MAX, read_message(stream, buffer)).await.map_err(unresponsive)?
}

async fn converse<S>(stream: S, session: Arc<Session>, sessions: &Arc<Sessions>) -> Result<(), ProtocolError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let _attendance = session.supervise();
    let (reader, writer) = split(stream);
    let (answers, waiting) = mpsc::channel(ANSWERS_WAITING_MAX);
    let mut over = session.over.subscribe();
    tokio::select! {
        outcome = listen(reader, &session, sessions, answers) => outcome,
        outcome = answer(writer, waiting) => outcome,
        _ = over.wait_for(|over| *over) => Ok(()),
    }
}

async fn listen<R>(
    mut reader: R,
    session: &Arc<Session>,
    sessions: &Arc<Sessions>,
    answers: mpsc::Sender<Message>,
) -> Result<(), ProtocolError>
where
    R: AsyncRead + Unpin,
{
    let mut buffer = Vec::new();
    let in_work = Arc::new(Semaphore::new(READS_IN_WORK_MAX));
    let mut hot_wanted = false;
    loop {
        match receive(&mut reader, &mut buffer).await? {
            Message::Read(request) => {
                let permit = Arc::clone(&in_work).acquire_owned().await.expect("the semaphore is never closed");
                let (session, answers) = (Arc::clone(session), answers.clone());
                tokio::spawn(async move {
                    let read = spawn_blocking(move || read(&session, request)).await;
                    // Nobody waits for it when the connection is gone.
                    if let Ok(message) = read {
                        let _ = answers.send(message).await;
                    }
                    drop(permit);
                });
            }
            // Once a connection: it is a long answer.
            Message::HotWanted if !hot_wanted => {
                hot_wanted = true;
                tokio::spawn(send_hot(Arc::clone(sessions), Arc::clone(session), answers.clone()));
            }
            Message::Delivered(ranges) => deliver(session, ranges).await,
            Message::KeepAlive => {}
            Message::End { whole } => {
                sessions.end(session.id, if whole { Ended::Whole } else { Ended::GivenUp });
                return Ok(());
            }
            other => return Err(ProtocolError::Unexpected { got: other.name(), wanted: "a read" }),
        }
    }
}

/// Nobody waits for it when the connection is gone.
async fn send_hot(sessions: Arc<Sessions>, session: Arc<Session>, answers: mpsc::Sender<Message>) {
    let ranges = session.hot.get_or_init(|| sessions.maker().hot(session.id)).await;
    for part in ranges.chunks(HOT_RANGES_MAX) {
        if answers.send(Message::Hot { last: false, ranges: part.to_vec() }).await.is_err() {
            return;
        }
    }
    let _ = answers.send(Message::Hot { last: true, ranges: Vec::new() }).await;
}

/// May wait for a disk.
fn read(session: &Session, request: ReadRequest) -> Message {
    let ReadRequest { id, file, offset_bytes, length_bytes } = request;
    let length = length_bytes as usize;
    if length > READ_BYTES_MAX {
        return Message::Failed { id, failure: ReadFailure::Lost, reason: "a read that is too long".to_owned() };
    }
    let mut content = vec![0; length];
    match session.image_store.read(file, offset_bytes, &mut content) {
        Ok(()) => Message::Content { id, payload: Payload::pack(&content) },
        Err(OriginError::Io(error)) => Message::Failed { id, failure: ReadFailure::Io, reason: error.to_string() },
        Err(OriginError::Lost(reason)) => Message::Failed { id, failure: ReadFailure::Lost, reason },
    }
}

/// In order, as the end that may follow asks what is delivered.
async fn deliver(session: &Arc<Session>, ranges: Vec<DeliveredRange>) {
    let session = Arc::clone(session);
    let delivering = spawn_blocking(move || ranges.into_iter().for_each(|range| session.image_store.deliver(range)));
    if delivering.await.is_err() {
        tracing::error!("an acknowledgement could not be noted");
    }
}

async fn answer<W>(mut writer: W, mut waiting: mpsc::Receiver<Message>) -> Result<(), ProtocolError>
where
    W: AsyncWrite + Unpin,
{
    let mut buffer = Vec::new();
    loop {
        let message = match timeout(KEEP_ALIVE_INTERVAL, waiting.recv()).await {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(()),
            Err(_) => Message::KeepAlive,
        };
        write_message(&mut writer, &message, &mut buffer).await?;
    }
}
