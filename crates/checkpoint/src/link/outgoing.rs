//! The direction in which bytes go.

use std::io::{self, IoSlice, Write};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::frame::{DATA_BYTES_MAX, HEAD_BYTES, Kind, head};
use super::{LinkError, Pace, Session};

/// Signs of life that a side may get that reads nothing: 38 KiB, which any connection takes, in twenty minutes.
const UNREAD_HEARTBEATS_MAX: u32 = 1200;

/// Who writes frames: whole ones, by several threads at once.
pub(super) struct Outgoing<W> {
    session: Session,
    pace: Arc<Pace>,
    inner: Arc<Mutex<Inner<W>>>,
}

struct Inner<W> {
    to: W,
    /// Since when the other side has no sign of life from this one.
    silent_since: Instant,
    /// How many more it gets of those that say nothing else.
    heartbeats_left: u32,
    /// A frame was not written to its end: nothing can follow.
    is_broken: bool,
}

impl<W> Clone for Outgoing<W> {
    fn clone(&self) -> Outgoing<W> {
        Outgoing { session: self.session, pace: self.pace.clone(), inner: self.inner.clone() }
    }
}

impl<W: Write> Outgoing<W> {
    pub(super) fn new(to: W, session: Session, pace: Arc<Pace>) -> Outgoing<W> {
        let inner = Inner { to, silent_since: Instant::now(), heartbeats_left: u32::MAX, is_broken: false };
        Outgoing { session, pace, inner: Arc::new(Mutex::new(inner)) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner<W>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn frame(&self, kind: Kind, epoch: u64, payload: &[u8]) -> Result<(), LinkError> {
        self.inner().frame(&head(kind, self.session, epoch, payload), payload)
    }

    /// The other side begins to send, and reads nothing meanwhile: no more signs of life go than a connection takes
    /// that nobody reads. Behind those it finds out by itself when this side takes nothing any more.
    pub(super) fn limit_heartbeats(&self) {
        self.inner().heartbeats_left = UNREAD_HEARTBEATS_MAX;
    }

    /// The other side has sent all, and reads.
    pub(super) fn unlimit_heartbeats(&self) {
        self.inner().heartbeats_left = u32::MAX;
    }

    /// The bytes of an epoch, at the pace that is allowed.
    pub(super) fn data(&self, epoch: u64) -> Data<'_, W> {
        Data { outgoing: self, epoch, buffer: Vec::with_capacity(DATA_BYTES_MAX), bytes: 0, waited: Duration::ZERO }
    }
}

impl<W: Write> Inner<W> {
    fn frame(&mut self, head: &[u8; HEAD_BYTES], payload: &[u8]) -> Result<(), LinkError> {
        if self.is_broken {
            return Err(LinkError::Connection(io::ErrorKind::BrokenPipe.into()));
        }
        self.is_broken = true;
        write_both(&mut self.to, head, payload)?;
        self.to.flush()?;
        (self.is_broken, self.silent_since) = (false, Instant::now());
        Ok(())
    }
}

/// With one call, where it takes all.
fn write_both(to: &mut impl Write, head: &[u8], payload: &[u8]) -> io::Result<()> {
    let mut slices = &mut [IoSlice::new(head), IoSlice::new(payload)][..];
    while !slices.is_empty() {
        match to.write_vectored(slices) {
            Ok(0) if slices.iter().all(|slice| slice.is_empty()) => return Ok(()),
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut slices, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// An epoch being written.
pub(super) struct Data<'a, W> {
    outgoing: &'a Outgoing<W>,
    epoch: u64,
    buffer: Vec<u8>,
    /// Bytes that went, and how long they waited for the pace and the connection.
    pub(super) bytes: u64,
    pub(super) waited: Duration,
}

impl<W: Write> Write for Data<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let step = self.outgoing.pace.step_bytes(DATA_BYTES_MAX);
        if self.buffer.len() >= step {
            self.flush()?;
        }
        let taken = bytes.len().min(step - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        // The pace counts what goes over the network, but for what carries it.
        self.outgoing.pace.wait(HEAD_BYTES + self.buffer.len());
        self.outgoing.frame(Kind::Data, self.epoch, &self.buffer)?;
        self.waited += begun.elapsed();
        self.bytes += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

/// A thread that says that this side lives, until this is dropped.
pub struct Beating {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Beating {
    /// Says so when nothing else was said for `every`.
    pub(super) fn begin<W: Write + Send + 'static>(outgoing: Outgoing<W>, every: Duration) -> io::Result<Beating> {
        let (stop, stopped) = channel::<()>();
        let beat = move || {
            let mut pause = every;
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(pause) {
                let mut inner = outgoing.inner();
                let silent = inner.silent_since.elapsed();
                pause = every.saturating_sub(silent);
                if pause.is_zero() && inner.heartbeats_left == 0 {
                    pause = every;
                } else if pause.is_zero() {
                    inner.heartbeats_left -= u32::from(inner.heartbeats_left < u32::MAX);
                    // Who writes or reads next finds what is wrong.
                    if inner.frame(&head(Kind::Heartbeat, outgoing.session, 0, &[]), &[]).is_err() {
                        return;
                    }
                    pause = every;
                }
            }
        };
        let thread = std::thread::Builder::new().name("link-heartbeat".to_owned()).spawn(beat)?;
        Ok(Beating { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Beating {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It has nothing to say of how it ended.
            let _ = thread.join();
        }
    }
}
