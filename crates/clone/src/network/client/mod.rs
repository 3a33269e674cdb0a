//! The clone's side: an [`Origin`] whose content is on another host.
//!
//! ```text
//!   Filling's threads ── read ─────────────> demand lane ─────┐
//!   Background        ── prefetch, unhurried ─> background lane ┼── one thread, two TLS connections ──> source's host
//!   Filling's bitmap  ── what is filled ──────> acknowledger ──┘
//! ```
//!
//! Two connections, so that what somebody waits for is never behind what nobody waits for; and the background has
//! little on its way at once, as both share the wire. A connection that breaks is made again, and what was not answered
//! is asked again; content that was damaged on its way, too.

mod acknowledge;
mod dial;
mod lane;
mod link;

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::time::timeout;

pub use self::dial::{Dial, Dialling, HostDialler, Stream, connect};

use self::acknowledge::Acknowledger;
use self::lane::{Answer, Lane};
use self::link::{Course, GreetingError, Link, greet};
use super::manifest::{self, Opening};
use super::protocol::{Lane as Kind, Message, ProtocolError, ReadFailure, SessionId, write_message};
use super::{LEASE, UNRESPONSIVE_MAX};
use crate::fill::SharedBitmap;
use crate::image::{FileNumber, Image};
use crate::plan::Plan;
use crate::{ByteRange, CloneError, Origin, OriginError};

/// A read travels in pieces of this length: many small ones keep the wire busy while each is checked and unpacked.
const PIECE_BYTES: usize = 64 << 10;
/// Bytes that the background has on their way at once: a piece that somebody waits for is behind no more than these on
/// the wire.
const BACKGROUND_WINDOW_BYTES: usize = 256 << 10;
/// Pieces of one read that somebody waits for, on their way at once.
const DEMAND_PIECES_MAX: usize = 16;
/// Content that arrives damaged so often, one time after another, is lost.
const DAMAGED_MAX: usize = 3;
/// An end is told within this, or left to the lease.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// What went over the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NetworkCounters {
    /// Bytes that came, inside TLS.
    pub received_bytes: u64,
    /// Bytes that went.
    pub sent_bytes: u64,
    /// Connections that broke and were made again, or tried.
    pub reconnects: u64,
    /// Pieces whose hash was wrong; they came again.
    pub damaged: u64,
}

/// The frozen content of an image on another host.
pub struct RemoteOrigin {
    link: Arc<Link>,
    /// Reads that somebody waits for: the background steps back while there are any.
    urgent: AtomicUsize,
    /// What the background brings ahead.
    ahead: Mutex<Ahead>,
    /// Told when something has been brought, or will not come.
    brought: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What nobody has asked for yet: who asks for it then takes it from here, so that it travels once.
#[derive(Debug, Default)]
struct Ahead {
    there: Option<Extent>,
    on_its_way: Option<(FileNumber, Range<u64>)>,
}

#[derive(Debug)]
struct Extent {
    file: FileNumber,
    offset_bytes: u64,
    content: Vec<u8>,
}

/// A piece of a read, on its way.
struct Piece<'a> {
    offset_bytes: u64,
    buffer: &'a mut [u8],
    answer: Receiver<Answer>,
}

impl RemoteOrigin {
    /// Has the source frozen as `plan` says. Blocks for as long as that takes; not for use on a runtime's thread.
    ///
    /// # Errors
    /// [`CloneError::Network`], with the other side's own words when it refuses.
    pub fn open(dialler: Arc<dyn Dial>, plan: &Plan) -> Result<(RemoteOrigin, Opening), CloneError> {
        let runtime = runtime()?;
        let unusable = |reason: String| CloneError::Network { peer: dialler.peer(), reason };
        let plan = serde_json::to_vec(plan).map_err(|error| unusable(format!("the plan has no words: {error}")))?;
        let opened = runtime.block_on(async {
            let mut connected = greet(&*dialler, Kind::Demand, None).await?;
            let mut buffer = Vec::new();
            let open = Message::Open { plan };
            let asked = write_message(&mut connected.stream, &open, &mut buffer);
            let unresponsive = |_| ProtocolError::Broken(std::io::ErrorKind::TimedOut.into());
            timeout(UNRESPONSIVE_MAX, asked).await.map_err(unresponsive)??;
            let opening = manifest::receive(&mut connected.stream).await?;
            Ok((connected, opening))
        });
        let (connected, opening) = opened.map_err(|error| match error {
            GreetingError::Unreachable(error) => error,
            GreetingError::Protocol(error) => unusable(error.to_string()),
        })?;
        let image = Arc::new(opening.manifest.image.clone());
        let link = Link::new(dialler, connected.session, connected.lease, image);
        Ok((RemoteOrigin::start(link, runtime, Some(connected.stream)), opening))
    }

    /// Goes on with an image that another process of this host opened.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]; a source that cannot be reached shows when it is read.
    pub fn resume(dialler: Arc<dyn Dial>, session: SessionId, image: Arc<Image>) -> Result<RemoteOrigin, CloneError> {
        Ok(RemoteOrigin::start(Link::new(dialler, session, LEASE, image), runtime()?, None))
    }

    fn start(link: Link, runtime: Runtime, first: Option<Box<dyn Stream>>) -> RemoteOrigin {
        let link = Arc::new(link);
        let kept = Arc::clone(&link);
        let thread = std::thread::spawn(move || {
            let mut course = kept.course.subscribe();
            runtime.block_on(async {
                let connections =
                    async { tokio::join!(kept.keep(&kept.demand, first), kept.keep(&kept.background, None)) };
                tokio::select! {
                    _ = connections => {}
                    _ = course.wait_for(|course| *course == Course::Leave) => {}
                }
            });
        });
        RemoteOrigin {
            link,
            urgent: AtomicUsize::new(0),
            ahead: Mutex::default(),
            brought: Condvar::new(),
            thread: Mutex::new(Some(thread)),
        }
    }

    /// What a later process needs to go on.
    pub fn session(&self) -> SessionId {
        self.link.session
    }

    /// From now on the source is told what is filled, so that it need not keep it.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn acknowledge(&self, filled: &SharedBitmap) -> Result<(), CloneError> {
        let copy = filled.as_fd().try_clone_to_owned().map_err(CloneError::kernel("copy a descriptor"))?;
        let acknowledger = Acknowledger::new(&self.link.image, SharedBitmap::open(copy)?)?;
        *self.link.acknowledger.lock().unwrap_or_else(PoisonError::into_inner) = Some(acknowledger);
        Ok(())
    }

    /// What the source uses most, hottest first; waits until it has told.
    pub async fn hot_ranges(&self) -> Vec<(FileNumber, ByteRange)> {
        let mut hot = self.link.hot.subscribe();
        self.link.hot_wanted.store(true, Relaxed);
        self.link.background.work.notify_one();
        let told = hot.wait_for(Option::is_some).await.map(|hot| hot.clone());
        told.ok().flatten().unwrap_or_default()
    }

    /// What went over the network so far.
    pub fn counters(&self) -> NetworkCounters {
        let counters = &self.link.counters;
        NetworkCounters {
            received_bytes: counters.received_bytes.load(Relaxed),
            sent_bytes: counters.sent_bytes.load(Relaxed),
            reconnects: counters.reconnects.load(Relaxed),
            damaged: counters.damaged.load(Relaxed),
        }
    }

    /// Why nothing more can be read.
    pub fn lost(&self) -> Option<&str> {
        self.link.lost.get().map(String::as_str)
    }

    /// Nobody waits for what is read any more: the clone is given up, maybe because the source's host answers nothing.
    pub fn let_readers_go(&self, reason: &str) {
        for lane in [&self.link.demand, &self.link.background] {
            lane.close(reason);
        }
    }

    /// The image is not needed any more, because the clone is `whole` or given up: the source is told. When it cannot
    /// be told, it finds out when the lease is over.
    pub fn end(&self, whole: bool) {
        self.link.course.send_replace(Course::End { whole });
        self.join(END_TIMEOUT);
    }

    /// Waits for the connections' end.
    fn join(&self, patience: Duration) {
        let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let until = std::time::Instant::now() + patience;
        while !thread.is_finished() && std::time::Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.link.course.send_replace(Course::Leave);
        if thread.is_finished() && thread.join().is_err() {
            tracing::error!("the network's thread has panicked");
        }
    }

    /// Reads over `lane` in pieces, of which as many as `window` says are on their way.
    fn fetch(
        &self,
        lane: &Lane,
        file: FileNumber,
        offset_bytes: u64,
        buffer: &mut [u8],
        window: impl Fn() -> usize,
    ) -> Result<(), OriginError> {
        let mut waiting = VecDeque::new();
        let mut rest = buffer.chunks_mut(PIECE_BYTES).zip((offset_bytes..).step_by(PIECE_BYTES));
        loop {
            while waiting.len() < window().max(1)
                && let Some((buffer, offset_bytes)) = rest.next()
            {
                let answer = lane.ask(file, offset_bytes, piece_length(buffer));
                waiting.push_back(Piece { offset_bytes, buffer, answer });
            }
            match waiting.pop_front() {
                Some(piece) => self.receive(lane, file, piece)?,
                None => return Ok(()),
            }
        }
    }

    fn receive(&self, lane: &Lane, file: FileNumber, piece: Piece<'_>) -> Result<(), OriginError> {
        let mut answer = piece.answer;
        for _ in 0..DAMAGED_MAX {
            // Whoever holds the sender answers before it goes.
            let gone = |_| Err((ReadFailure::Lost, "the network's thread is gone".to_owned()));
            match answer.recv().unwrap_or_else(gone) {
                Ok(payload) => match payload.unpack(piece.buffer) {
                    Ok(()) => return Ok(()),
                    Err(error) => {
                        tracing::warn!(file = file.0, offset_bytes = piece.offset_bytes, %error, "asked again");
                        self.link.counters.damaged.fetch_add(1, Relaxed);
                        answer = lane.ask(file, piece.offset_bytes, piece_length(piece.buffer));
                    }
                },
                Err((ReadFailure::Io, reason)) => return Err(OriginError::Io(std::io::Error::other(reason))),
                Err((ReadFailure::Lost, reason)) => return Err(OriginError::Lost(reason)),
            }
        }
        Err(OriginError::Lost(format!("content of file {} was damaged {DAMAGED_MAX} times on its way", file.0)))
    }

    /// When what the clone needs is lost, all is.
    fn noted(&self, outcome: Result<(), OriginError>) -> Result<(), OriginError> {
        outcome.map_err(|error| match error {
            OriginError::Lost(reason) => {
                self.link.lose(&reason);
                OriginError::Lost(self.lost().unwrap_or(&reason).to_owned())
            }
            error => error,
        })
    }

    fn fetch_in_background(&self, file: FileNumber, offset: u64, buffer: &mut [u8]) -> Result<(), OriginError> {
        let window = || if self.urgent.load(Relaxed) > 0 { 1 } else { BACKGROUND_WINDOW_BYTES / PIECE_BYTES };
        self.fetch(&self.link.background, file, offset, buffer, window)
    }

    /// What was brought ahead, if that is it.
    fn take_ahead(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> bool {
        self.lock_ahead().there.as_ref().is_some_and(|there| there.copy_to(file, offset_bytes, buffer))
    }

    /// The same for who can wait: asked for again, it would arrive behind what is on its way.
    fn wait_ahead(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> bool {
        let end = offset_bytes + buffer.len() as u64;
        let comes = |ahead: &mut Ahead| {
            let on_its_way = ahead.on_its_way.as_ref();
            on_its_way.is_some_and(|(of, bytes)| *of == file && bytes.start <= offset_bytes && end <= bytes.end)
        };
        let ahead = self.brought.wait_while(self.lock_ahead(), comes).unwrap_or_else(PoisonError::into_inner);
        ahead.there.as_ref().is_some_and(|there| there.copy_to(file, offset_bytes, buffer))
    }

    fn lock_ahead(&self) -> MutexGuard<'_, Ahead> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Extent {
    /// Fills all of `buffer`, if all of it is here.
    fn copy_to(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> bool {
        let start = offset_bytes.checked_sub(self.offset_bytes).filter(|_| self.file == file);
        let start = start.and_then(|start| usize::try_from(start).ok());
        let part = start.and_then(|start| self.content.get(start..start.checked_add(buffer.len())?));
        part.inspect(|part| buffer.copy_from_slice(part)).is_some()
    }
}

impl Origin for RemoteOrigin {
    fn read(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), OriginError> {
        if self.wait_ahead(file, offset_bytes, buffer) {
            return Ok(());
        }
        self.urgent.fetch_add(1, AcqRel);
        let outcome = self.fetch(&self.link.demand, file, offset_bytes, buffer, || DEMAND_PIECES_MAX);
        self.urgent.fetch_sub(1, AcqRel);
        self.noted(outcome)
    }

    fn read_now(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<bool, OriginError> {
        Ok(self.take_ahead(file, offset_bytes, buffer))
    }

    fn read_unhurried(&self, file: FileNumber, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), OriginError> {
        if self.take_ahead(file, offset_bytes, buffer) {
            return Ok(());
        }
        self.noted(self.fetch_in_background(file, offset_bytes, buffer))
    }

    /// Before the range is claimed: who needs a part of it meanwhile gets that as soon as it is there.
    fn prefetch(&self, file: FileNumber, offset_bytes: u64, length_bytes: u64) {
        let length = usize::try_from(length_bytes).unwrap_or(usize::MAX).min(BACKGROUND_WINDOW_BYTES);
        self.lock_ahead().on_its_way = Some((file, offset_bytes..offset_bytes + length as u64));
        let mut content = vec![0; length];
        let outcome = self.fetch_in_background(file, offset_bytes, &mut content);
        let mut ahead = self.lock_ahead();
        ahead.on_its_way = None;
        // Nothing is lost by a failure: what was filled and delivered meanwhile is not kept any more, else who reads it
        // finds the error again.
        if outcome.is_ok() {
            ahead.there = Some(Extent { file, offset_bytes, content });
        }
        drop(ahead);
        self.brought.notify_all();
    }
}

impl Drop for RemoteOrigin {
    /// The image stays for the lease: another process may go on with it.
    fn drop(&mut self) {
        self.link.course.send_if_modified(|course| {
            let speaks = *course == Course::Speak;
            if speaks {
                *course = Course::Leave;
            }
            speaks
        });
        self.join(UNRESPONSIVE_MAX);
    }
}

impl std::fmt::Debug for RemoteOrigin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteOrigin").field("session", &self.link.session).field("lost", &self.lost()).finish()
    }
}

impl Link {
    fn new(dialler: Arc<dyn Dial>, session: SessionId, lease: Duration, image: Arc<Image>) -> Link {
        Link {
            dialler,
            session,
            lease,
            image,
            demand: Lane::new(Kind::Demand),
            background: Lane::new(Kind::Background),
            counters: link::Counters::default(),
            acknowledger: Mutex::new(None),
            hot_wanted: AtomicBool::new(false),
            hot: watch::Sender::new(None),
            lost: OnceLock::new(),
            course: watch::Sender::new(Course::Speak),
        }
    }
}

fn piece_length(buffer: &[u8]) -> u32 {
    u32::try_from(buffer.len()).expect("a piece is at most 64 KiB")
}

fn runtime() -> Result<Runtime, CloneError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(CloneError::kernel("wait for a network"))
}

#[cfg(test)]
mod tests;
