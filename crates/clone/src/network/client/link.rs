//! The two connections to the source's host: made, spoken over, made again.
//!
//! ```text
//!   dial ── Hello/Welcome ──> speaking ── broken ──> waiting (longer each time) ──> dial
//!                                │                      └── no sign of life for the lease, or refused ──> lost
//!                                └── End ──> over
//! ```

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, split};
use tokio::sync::watch;
use tokio::time::{Instant as TokioInstant, sleep, sleep_until, timeout};

use super::acknowledge::Acknowledger;
use super::dial::{Dial, Stream};
use super::lane::Lane;
use crate::image::{FileNumber, Image};
use crate::network::protocol::{
    Lane as Kind, Message, ProtocolError, SessionId, VERSION, read_message, words, write_message,
};
use crate::network::{KEEP_ALIVE_INTERVAL, LEASE, UNRESPONSIVE_MAX};
use crate::warm::RANGES_MAX;
use crate::{ByteRange, CloneError};

/// The first pause before a connection is made again; each one is twice as long as that before.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(100);
/// The longest pause.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often the source is told what the clone has.
const ACKNOWLEDGE_INTERVAL: Duration = Duration::from_millis(100);

/// What the connections have done.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub received_bytes: AtomicU64,
    pub sent_bytes: AtomicU64,
    pub reconnects: AtomicU64,
    pub damaged: AtomicU64,
}

/// How the connections shall go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Course {
    Speak,
    /// The source is to be told that the image may go.
    End {
        whole: bool,
    },
    /// Nobody is left who wants to hear.
    Leave,
}

/// What both connections share.
pub(super) struct Link {
    pub dialler: Arc<dyn Dial>,
    pub session: SessionId,
    pub lease: Duration,
    pub image: Arc<Image>,
    pub demand: Lane,
    pub background: Lane,
    pub counters: Counters,
    pub acknowledger: Mutex<Option<Acknowledger>>,
    /// Somebody wants to know what is hot.
    pub hot_wanted: AtomicBool,
    /// What is hot on the source, once it has told.
    pub hot: watch::Sender<Option<HotRanges>>,
    pub lost: OnceLock<String>,
    pub course: watch::Sender<Course>,
}

/// Hottest first.
pub(super) type HotRanges = Vec<(FileNumber, ByteRange)>;

/// A stream after its Welcome.
pub(super) struct Connected {
    pub stream: Box<dyn Stream>,
    pub session: SessionId,
    pub lease: Duration,
}

/// Dials and greets.
///
/// # Errors
/// [`CloneError::Network`]; the inner error tells whether the source's side refuses for good.
pub(super) async fn greet(
    dialler: &dyn Dial,
    lane: Kind,
    session: Option<SessionId>,
) -> Result<Connected, GreetingError> {
    let mut stream = dialler.dial().await?;
    let mut buffer = Vec::new();
    let greeting = async {
        write_message(&mut stream, &Message::Hello { version: VERSION, lane, session }, &mut buffer).await?;
        read_message(&mut stream, &mut buffer).await
    };
    let unresponsive = || ProtocolError::Broken(std::io::ErrorKind::TimedOut.into());
    match timeout(UNRESPONSIVE_MAX, greeting).await.unwrap_or_else(|_| Err(unresponsive()))? {
        Message::Welcome { version: VERSION, session, lease_seconds } => {
            // How long a clone stands still without its source is not the source's to say alone.
            Ok(Connected { stream, session, lease: Duration::from_secs(lease_seconds.into()).min(LEASE) })
        }
        Message::Welcome { version, .. } => {
            let reason = format!("it speaks version {version} of the protocol, this program {VERSION}");
            Err(ProtocolError::Refused(reason).into())
        }
        Message::Refused { reason } => Err(ProtocolError::refused(&reason).into()),
        other => Err(ProtocolError::Unexpected { got: other.name(), wanted: "a welcome" }.into()),
    }
}

/// Why a connection could not begin.
#[derive(Debug, thiserror::Error)]
pub(super) enum GreetingError {
    #[error(transparent)]
    Unreachable(#[from] CloneError),
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
}

impl Link {
    /// No more content will come.
    pub fn lose(&self, reason: &str) {
        let reason = self.lost.get_or_init(|| reason.to_owned());
        self.demand.close(reason);
        self.background.close(reason);
    }

    /// Keeps one connection until the end of the link.
    pub async fn keep(&self, lane: &Lane, mut first: Option<Box<dyn Stream>>) {
        let mut alive_at = Instant::now();
        let mut pause = RETRY_PAUSE_MIN;
        while self.lost.get().is_none() {
            let stream = match first.take() {
                Some(stream) => Ok(stream),
                None => greet(&*self.dialler, lane.kind, Some(self.session)).await.map(|connected| connected.stream),
            };
            let error = match stream {
                Ok(stream) => match self.run_connection(lane, stream, &mut alive_at, &mut pause).await {
                    Ok(()) => return,
                    Err(error) => error.to_string(),
                },
                Err(GreetingError::Protocol(ProtocolError::Refused(reason))) => return self.lose(&reason),
                Err(error) => error.to_string(),
            };
            if alive_at.elapsed() > self.lease {
                return self.lose(&format!("no connection for {} s: {error}", self.lease.as_secs()));
            }
            tracing::warn!(lane = ?lane.kind, error, "the connection to the source's host is made again");
            self.counters.reconnects.fetch_add(1, Relaxed);
            sleep(pause).await;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }

    /// Speaks over one connection until it breaks (an error) or the link is over.
    async fn run_connection(
        &self,
        lane: &Lane,
        stream: Box<dyn Stream>,
        alive_at: &mut Instant,
        pause: &mut Duration,
    ) -> Result<(), ProtocolError> {
        lane.begin_again();
        if lane.kind == Kind::Background
            && let Some(acknowledger) = &mut *self.acknowledger.lock().unwrap_or_else(PoisonError::into_inner)
        {
            let again = acknowledger.again(&self.image);
            again.map_err(|error| ProtocolError::Broken(std::io::Error::other(error)))?;
        }
        let (mut reader, mut writer) = split(stream);
        tokio::select! {
            outcome = self.receive(lane, &mut reader, alive_at, pause) => outcome,
            outcome = self.send(lane, &mut writer) => outcome,
        }
    }

    async fn receive<R>(
        &self,
        lane: &Lane,
        reader: &mut R,
        alive_at: &mut Instant,
        pause: &mut Duration,
    ) -> Result<(), ProtocolError>
    where
        R: AsyncRead + Unpin,
    {
        let (mut buffer, mut hot) = (Vec::new(), HotRanges::new());
        loop {
            let unresponsive = |_| ProtocolError::Broken(std::io::ErrorKind::TimedOut.into());
            let message =
                timeout(UNRESPONSIVE_MAX, read_message(reader, &mut buffer)).await.map_err(unresponsive)??;
            self.counters.received_bytes.fetch_add(buffer.len() as u64 + 4, Relaxed);
            (*alive_at, *pause) = (Instant::now(), RETRY_PAUSE_MIN);
            match message {
                Message::Content { id, payload } => lane.answer(id, Ok(payload)),
                Message::Failed { id, failure, reason } => lane.answer(id, Err((failure, words(&reason)))),
                Message::Hot { last, ranges } => {
                    let is_known = |(file, _): &(FileNumber, ByteRange)| (file.0 as usize) < self.image.files.len();
                    if hot.len() + ranges.len() > RANGES_MAX || !ranges.iter().all(is_known) {
                        return Err(ProtocolError::Malformed("hot ranges that the image has not"));
                    }
                    hot.extend(ranges);
                    if last {
                        self.hot.send_replace(Some(std::mem::take(&mut hot)));
                    }
                }
                Message::KeepAlive => {}
                Message::Refused { reason } => {
                    self.lose(&words(&reason));
                    return Ok(());
                }
                other => return Err(ProtocolError::Unexpected { got: other.name(), wanted: "content" }),
            }
            let unanswered = lane.unanswered_for();
            // It may have been away for a lease before.
            if unanswered > self.lease * 2 {
                self.lose(&format!("its host lives, and has not answered a read for {} s", unanswered.as_secs()));
                return Ok(());
            }
        }
    }

    async fn send<W>(&self, lane: &Lane, writer: &mut W) -> Result<(), ProtocolError>
    where
        W: AsyncWrite + Unpin,
    {
        let mut course = self.course.subscribe();
        let mut buffer = Vec::new();
        let mut last_sent_at = TokioInstant::now();
        let mut acknowledge_at = TokioInstant::now();
        let mut asked_for_hot = lane.kind != Kind::Background;
        loop {
            let mut messages: Vec<Message> = lane.take_unsent().into_iter().map(Message::Read).collect();
            let now = TokioInstant::now();
            if !asked_for_hot && self.hot_wanted.load(Relaxed) && self.hot.borrow().is_none() {
                asked_for_hot = true;
                messages.push(Message::HotWanted);
            }
            if lane.kind == Kind::Background && now >= acknowledge_at {
                messages.extend(self.acknowledgement());
                acknowledge_at = now + ACKNOWLEDGE_INTERVAL;
            }
            if messages.is_empty() && now >= last_sent_at + KEEP_ALIVE_INTERVAL {
                messages.push(Message::KeepAlive);
            }
            if self.lost.get().is_some() {
                // Nobody will read it: the source need not wait for the lease.
                if lane.kind == Kind::Demand {
                    write_message(writer, &Message::End { whole: false }, &mut buffer).await?;
                }
                return Ok(());
            }
            let course_now = *course.borrow_and_update();
            if let (Kind::Demand, Course::End { whole }) = (lane.kind, course_now) {
                messages.push(Message::End { whole });
            }
            for message in &messages {
                let length = write_message(writer, message, &mut buffer).await?;
                self.counters.sent_bytes.fetch_add(length as u64, Relaxed);
                last_sent_at = now;
            }
            if course_now != Course::Speak {
                // The other side reads what was said before it sees the end.
                let _ = timeout(UNRESPONSIVE_MAX, writer.shutdown()).await;
                return Ok(());
            }
            let keep_alive_at = last_sent_at + KEEP_ALIVE_INTERVAL;
            let wake_at = if lane.kind == Kind::Background { acknowledge_at.min(keep_alive_at) } else { keep_alive_at };
            tokio::select! {
                () = lane.work.notified() => {}
                () = sleep_until(wake_at) => {}
                _ = course.changed() => {}
            }
        }
    }

    fn acknowledgement(&self) -> Option<Message> {
        let acknowledger = self.acknowledger.lock().unwrap_or_else(PoisonError::into_inner);
        let ranges = acknowledger.as_ref()?.next();
        (!ranges.is_empty()).then_some(Message::Delivered(ranges))
    }
}
