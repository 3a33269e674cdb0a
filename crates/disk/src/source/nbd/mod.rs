//! An export of an NBD server as a source: several connections, each with many requests under way, made again when
//! they are lost.
//!
//! Who reads waits for as long as it takes, unless [`NbdClientOptions::source_timeout`] bounds it: a guest whose disk's
//! source is away stands still and goes on when it is back, and never sees an error for it.

mod link;
mod negotiation;
mod reconnect;
#[cfg(test)]
mod tests;
mod url;

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use self::link::{Link, Outcome, Request};
use self::negotiation::Agreed;
use self::url::Url;
use super::{Extent, Remembered, Source, SourceError, TlsFiles};
use crate::SECTOR_BYTES;
use crate::nbd::protocol::allocation;
use crate::nbd::tls;

/// Pending at most so much at a time.
const READ_BYTES_MAX: u64 = 1 << 20;

/// States of at most so many bytes are asked for at a time.
const STATUS_BYTES_MAX: u64 = 1 << 30;

/// A server's error is believed when it came so many times: it may have been passing.
const FAILURES_MAX: u32 = 3;

/// Between two of them.
const FAILURE_PAUSE: Duration = Duration::from_millis(200);

/// An answer that lets wait for so long is trouble.
const TROUBLE_AFTER: Duration = Duration::from_secs(3);

/// How an export is read.
#[derive(Clone, Debug)]
pub struct NbdClientOptions {
    /// Certificates; needed for, and only used with, `nbds://`.
    pub tls: Option<TlsFiles>,
    /// Connections at most; more than one are made only when the server says that it can.
    pub connections: usize,
    /// How long the first connection may take.
    pub connect_timeout: Duration,
    /// How long a read may wait for the server; none is for ever.
    pub source_timeout: Option<Duration>,
    /// The account whose process must be behind a Unix socket; none: anybody's.
    pub account: Option<u32>,
}

impl Default for NbdClientOptions {
    fn default() -> NbdClientOptions {
        NbdClientOptions {
            tls: None,
            connections: 4,
            connect_timeout: Duration::from_secs(10),
            source_timeout: None,
            account: None,
        }
    }
}

/// What an export was when it was first seen: it must stay that.
#[derive(Clone, Debug)]
struct Known {
    size_bytes: u64,
    description: Option<String>,
}

#[derive(Default)]
struct State {
    links: Vec<Option<Arc<Link>>>,
    known: Option<Known>,
    can_multi_connect: bool,
    trouble: Option<String>,
    /// The server's own refusal, until a connection comes about.
    refusal: Option<String>,
    is_closed: bool,
}

struct Shared {
    url: Url,
    url_text: String,
    tls: Option<Arc<rustls::ClientConfig>>,
    account: Option<u32>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, reason: impl fmt::Display) -> SourceError {
        SourceError::new(self.url_text.clone(), reason)
    }

    /// Waits until a connection may dial; false when the client is closed. Connections other than the first wait until
    /// the server has said that it can have several.
    fn may_dial(&self, connection: usize) -> bool {
        let must_wait = |state: &mut State| !state.is_closed && connection > 0 && !state.can_multi_connect;
        let state = self.changed.wait_while(self.state(), must_wait).unwrap_or_else(PoisonError::into_inner);
        !state.is_closed
    }

    /// Why an export cannot be used, whatever else.
    fn mismatch(&self, agreed: &Agreed) -> Option<String> {
        let state = self.state();
        if !agreed.is_read_only {
            let remedy = "export it read only (qemu-nbd -r), or export a snapshot of it";
            return Some(format!("the export can be written to, and a base must never change: {remedy}"));
        }
        let known = state.known.as_ref()?;
        if known.size_bytes != agreed.size_bytes {
            return Some(format!("the export has {} bytes and had {}", agreed.size_bytes, known.size_bytes));
        }
        match (&known.description, &agreed.description) {
            (Some(was), now) if now.as_ref() != Some(was) => {
                Some(format!("the export was {was:?} and is {:?}", now.as_deref().unwrap_or("nothing known")))
            }
            _ => None,
        }
    }

    /// A connection is connected; false when the client was closed meanwhile.
    fn publish(&self, connection: usize, link: &Arc<Link>) -> bool {
        let mut state = self.state();
        if state.is_closed {
            return false;
        }
        let description = link.agreed.description.clone();
        let known = state.known.get_or_insert(Known { size_bytes: link.agreed.size_bytes, description: None });
        known.description = known.description.take().or(description);
        state.can_multi_connect = link.agreed.can_multi_connect;
        state.links[connection] = Some(Arc::clone(link));
        state.trouble = None;
        state.refusal = None;
        drop(state);
        self.changed.notify_all();
        true
    }

    fn withdraw(&self, connection: usize, error: &io::Error) {
        self.state().links[connection] = None;
        self.lost(connection, error);
    }

    fn lost(&self, connection: usize, error: &io::Error) {
        let mut state = self.state();
        // With another connection up, one that cannot be had is no trouble.
        if connection == 0 || state.links.iter().all(Option::is_none) {
            state.trouble = Some(error.to_string());
        }
    }

    fn refused(&self, reason: &str) {
        let mut state = self.state();
        if state.links.iter().all(Option::is_none) {
            state.trouble = Some(reason.to_owned());
            state.refusal = Some(reason.to_owned());
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits before the next attempt, less when the client is closed.
    fn rest(&self, pause: Duration) {
        let waited = self.changed.wait_timeout_while(self.state(), pause, |state| !state.is_closed);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// The connection with the least to do, as soon as there is one.
    fn link(&self, deadline: Option<Instant>) -> Result<Arc<Link>, SourceError> {
        let mut state = self.state();
        loop {
            if state.is_closed {
                return Err(self.error("closed"));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                // Also with a connection: one may come and break again and again.
                let why = state.trouble.clone().unwrap_or_else(|| "it does not answer in time".into());
                return Err(self.error(why));
            }
            if let Some(link) = state.links.iter().flatten().min_by_key(|link| link.load()) {
                return Ok(Arc::clone(link));
            }
            state = match left {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }
}

/// An export of an NBD server. Threads of its own keep the connections; they end when it is dropped or closed.
pub struct NbdClient {
    shared: Arc<Shared>,
    source_timeout: Option<Duration>,
    size_bytes: u64,
}

impl NbdClient {
    /// Connects and learns what the export is.
    ///
    /// # Errors
    /// The address or the certificates are no good, the server refuses, cannot be reached in time, or exports something
    /// that can be written to.
    pub fn connect(url: &str, options: NbdClientOptions) -> Result<NbdClient, SourceError> {
        let deadline = Instant::now() + options.connect_timeout;
        let mut client = NbdClient::start(url, options, None)?;
        let shared = Arc::clone(&client.shared);
        let mut state = shared.state();
        loop {
            if let Some(known) = &state.known {
                client.size_bytes = known.size_bytes;
                drop(state);
                return Ok(client);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let why = match (&state.refusal, &state.trouble) {
                (Some(refusal), _) => Some(refusal.clone()),
                (None, trouble) if left.is_zero() => {
                    Some(trouble.clone().unwrap_or_else(|| "it does not answer".into()))
                }
                _ => None,
            };
            if let Some(why) = why {
                drop(state);
                return Err(shared.error(why));
            }
            state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes an export that was seen before, without waiting for its server: it may be away.
    ///
    /// # Errors
    /// The address or the certificates are no good.
    pub fn resume(url: &str, options: NbdClientOptions, remembered: &Remembered) -> Result<NbdClient, SourceError> {
        let Remembered { size_bytes, identity } = remembered.clone();
        NbdClient::start(url, options, Some(Known { size_bytes, description: identity }))
    }

    fn start(url: &str, options: NbdClientOptions, known: Option<Known>) -> Result<NbdClient, SourceError> {
        let failed = |reason: String| SourceError::new(url, reason);
        let parsed = Url::parse(url).map_err(failed)?;
        let tls = match (&options.tls, parsed.is_encrypted) {
            (Some(files), true) => Some(tls::client(files).map_err(|error| failed(error.to_string()))?),
            (None, true) => return Err(failed("an encrypted connection needs certificates".into())),
            (Some(_), false) => return Err(failed("certificates are of no use without nbds://".into())),
            (None, false) => None,
        };
        let connections = options.connections.max(1);
        let size_bytes = known.as_ref().map_or(0, |known| known.size_bytes);
        let state = State { links: vec![None; connections], known, ..State::default() };
        let shared = Shared {
            url: parsed,
            url_text: url.to_owned(),
            tls,
            account: options.account,
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        let client = NbdClient { shared: Arc::new(shared), source_timeout: options.source_timeout, size_bytes };
        for connection in 0..connections {
            let shared = Arc::clone(&client.shared);
            let thread =
                thread::Builder::new().name("nbd-client".into()).spawn(move || reconnect::run(&shared, connection));
            thread.map_err(|error| failed(error.to_string()))?;
        }
        Ok(client)
    }

    /// Asks until there is an answer.
    fn ask(&self, request: &Request) -> Result<(Outcome, Arc<Link>), SourceError> {
        let deadline = self.source_timeout.map(|timeout| Instant::now() + timeout);
        let mut failures = 0;
        loop {
            let link = self.shared.link(deadline)?;
            match link.ask(request.clone(), deadline) {
                Some(Outcome::Broken) => {}
                Some(Outcome::Failed { errno, message }) => {
                    // A server that stops says so; another will be there.
                    failures += u32::from(errno != libc::ESHUTDOWN as u32);
                    if failures >= FAILURES_MAX {
                        let error = io::Error::from_raw_os_error(errno as i32);
                        return Err(self.shared.error(format!("the server answers {error} {message}")));
                    }
                    self.shared.rest(FAILURE_PAUSE);
                }
                Some(outcome) => return Ok((outcome, link)),
                None => {
                    let timeout = self.source_timeout.unwrap_or_default();
                    return Err(self.shared.error(format!("no answer within {} s", timeout.as_secs_f32())));
                }
            }
        }
    }

    /// The shortest and the longest request.
    fn limits(&self) -> (u64, u64) {
        let state = self.shared.state();
        let link = state.links.iter().flatten().next();
        // Not connected yet: what every server of disks can do.
        link.map_or((4096, READ_BYTES_MAX), |link| {
            let minimum_bytes = u64::from(link.agreed.minimum_bytes);
            (minimum_bytes, u64::from(link.agreed.maximum_bytes).min(READ_BYTES_MAX).max(minimum_bytes))
        })
    }

    /// The smallest range around this one that the server can be asked for.
    fn widened(&self, range: Range<u64>) -> Range<u64> {
        let (minimum_bytes, _) = self.limits();
        let end = range.end.next_multiple_of(minimum_bytes).min(self.size_bytes);
        range.start / minimum_bytes * minimum_bytes..end
    }

    fn read_some(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        let asked = self.widened(offset..offset + into.len() as u64);
        let from = (offset - asked.start) as usize;
        match self.ask(&Request::Read(asked))? {
            (Outcome::Data(data), _) => {
                into.copy_from_slice(&data[from..from + into.len()]);
                Ok(())
            }
            (outcome, _) => Err(self.shared.error(format!("a read was answered with {outcome:?}"))),
        }
    }

    /// States from the beginning of the range on.
    fn states(&self, range: Range<u64>) -> Result<Vec<(u32, u32)>, SourceError> {
        let whole = u32::try_from(range.end - range.start).unwrap_or(u32::MAX);
        let link = self.shared.link(self.source_timeout.map(|timeout| Instant::now() + timeout))?;
        if link.agreed.allocation_context.is_none() {
            return Ok(vec![(whole, 0)]);
        }
        match self.ask(&Request::Status(range)) {
            Ok((Outcome::States(states), _)) => Ok(states),
            Ok((outcome, _)) => Err(self.shared.error(format!("a request for states was answered with {outcome:?}"))),
            Err(error) => Err(error),
        }
    }
}

impl Source for NbdClient {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), SourceError> {
        let there = self.size_bytes.saturating_sub(offset).min(into.len() as u64) as usize;
        let (bytes, past_end) = into.split_at_mut(there);
        past_end.fill(0);
        let (minimum_bytes, maximum_bytes) = self.limits();
        // Parts end where the server's blocks do: else each would be widened beyond the longest request.
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let until = (at / minimum_bytes * minimum_bytes + maximum_bytes) / minimum_bytes * minimum_bytes;
            let (part, behind) = rest.split_at_mut(rest.len().min((until - at) as usize));
            self.read_some(at, part)?;
            at += part.len() as u64;
            rest = behind;
        }
        Ok(())
    }

    fn is_local(&self, _offset: u64, _length: u64) -> bool {
        false
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, SourceError> {
        let mut extents = Vec::new();
        let mut at = range.start;
        while at < range.end.min(self.size_bytes) {
            let asked = self.widened(at..range.end.min(self.size_bytes).min(at + STATUS_BYTES_MAX));
            let (mut end, begun_at) = (asked.start, at);
            for (length, state) in self.states(asked)? {
                end = end.saturating_add(u64::from(length));
                let until = end.min(range.end).max(at);
                extend(&mut extents, at..until, state & allocation::ZERO != 0);
                at = until;
            }
            if extents.len() as u64 > (at - range.start) / SECTOR_BYTES + 2 {
                return Err(self.shared.error("states of extents of less than a sector"));
            }
            if at == begun_at {
                return Err(self.shared.error("states of extents that do not cover what was asked for"));
            }
        }
        extend(&mut extents, at..range.end, true);
        Ok(extents)
    }

    fn trouble(&self) -> Option<String> {
        let state = self.shared.state();
        if state.links.iter().all(Option::is_none) {
            return Some(state.trouble.clone().unwrap_or_else(|| "not connected yet".into()));
        }
        let oldest = state.links.iter().flatten().filter_map(|link| link.oldest()).min()?;
        let waits = oldest.elapsed();
        (waits > TROUBLE_AFTER).then(|| format!("no answer for {} s", waits.as_secs()))
    }

    fn identity(&self) -> Option<String> {
        self.shared.state().known.as_ref()?.description.clone()
    }

    fn close(&self) {
        let mut state = self.shared.state();
        state.is_closed = true;
        for link in state.links.iter_mut().filter_map(Option::take) {
            // Its connection then tells those who wait.
            link.cut();
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    fn describe(&self) -> String {
        self.shared.url_text.clone()
    }
}

/// Appends an extent, unless it is empty or goes on with the last one.
fn extend(extents: &mut Vec<Extent>, range: Range<u64>, is_zero: bool) {
    match extents.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.is_zero == is_zero => last.range.end = range.end,
        _ => extents.push(Extent { range, is_zero }),
    }
}

impl Drop for NbdClient {
    fn drop(&mut self) {
        self.close();
    }
}
