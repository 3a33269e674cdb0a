//! Carries a server's answers to the client.
//!
//! Answers are held back up to [`HELD_BYTES_MAX`], and for a second where more does not come, so that most statements
//! can be run again elsewhere without the client having seen anything of the first try. Notices are not: they tell how
//! far a statement is, and may come again.

use std::collections::{HashSet, VecDeque};
use std::task::Poll;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use tokio::time::Instant;

use super::request::Expected;
use crate::backend::{Backend, parameter_status};
use crate::servers::Server;
use crate::settings::is_readable_with;
use crate::wire::{Channel, ChannelError, ErrorFields, Frame, Reply, SqlError, in_whole_message, sqlstate};

mod copy;
mod outcome;
mod parts;

pub use outcome::{Ended, RelayError, Relayed};
pub(super) use outcome::{first_bytes, first_value};
pub(super) use parts::BATCH_BYTES_MAX;
pub use parts::FROM_CLIENT_IN_PARTS;
use parts::FROM_SERVER_IN_PARTS;

/// Bytes of an answer held back before the first of them go to the client.
pub const HELD_BYTES_MAX: usize = 32 * 1024;

/// And for so long, where more of the answer does not come; a server sends what fills 8 KiB.
const HELD_FOR_MAX: Duration = Duration::from_secs(1);

/// Bytes of an answer held back while its statement is in the commit barrier, where no client may be waited for.
pub const HELD_IN_BARRIER_BYTES_MAX: usize = 16 << 20;

/// How long a client may take nothing there, also one that is waited for everywhere else.
const STALL_IN_BARRIER_MAX: Duration = Duration::from_secs(60);

/// Bytes that COPY FROM STDIN, and what passes in parts, keep of either side for the other. While the one for a side is
/// full the other is not read, and is held up as it would be by one server.
const STREAM_BYTES_MAX: usize = 256 * 1024;

/// Whether answers may go out before the statement has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// As soon as there is much of them; notices at once.
    Briefly,
    /// As soon as there is much of them. It is likely that the statement runs again elsewhere: its notices wait, too.
    Tentatively,
    /// The same, however long it takes: at its end it is asked whether it was out of date, unless it has gone out.
    TentativelyToItsEnd,
    /// Only when there is very much of them: while the client is waited for, no gate can close. Notices at once.
    InCommitBarrier,
}

impl Hold {
    /// How long a client may take nothing, by the limit for clients; none: for ever.
    fn stall_max(self, limit: Option<Duration>) -> Option<Duration> {
        match self {
            // No gate closes meanwhile.
            Hold::InCommitBarrier => Some(limit.unwrap_or(STALL_IN_BARRIER_MAX).min(STALL_IN_BARRIER_MAX)),
            Hold::Briefly | Hold::Tentatively | Hold::TentativelyToItsEnd => limit,
        }
    }
}

/// Carries answers from `backend` to `client` until all that is `expected` is there.
pub struct Relay<'a> {
    client: &'a mut Channel,
    backend: &'a mut Backend,
    expected: VecDeque<Expected>,
    hold: Hold,
    start: usize,
    /// `Sync` was swallowed by COPY and must be sent again after it.
    extended: bool,
    /// The rest of the last request is still with the client.
    in_parts: bool,
    relayed: Relayed,
    went_out: bool,
    /// A statement of the client's has been answered in whole, which no notice of the next goes before.
    answered: bool,
    /// A notice could not be written: what ends the session for it finds that out, too.
    write_failed: bool,
    parsed: usize,
    took_sync: bool,
    began_copy: bool,
    /// A message of the client's batch follows that is not sent here.
    pub is_followed: bool,
    /// Characters of the client's message before this statement, from where the positions in its errors count.
    pub behind: usize,
    notifications: BytesMut,
    /// Rows, or what COPY copies out: what comes before them may be said again.
    holds_rows: bool,
    /// Since when they wait for more of the answer.
    held_since: Option<Instant>,
    /// The client's output is written beside everything else: nobody waits for it.
    streams: bool,
    /// The client has been told of an error that the server does not know of: what this one answers up to `Sync` is not
    /// for the client.
    refused: bool,
}

impl<'a> Relay<'a> {
    /// A relay whose requests are encoded already. `start` is where this answer begins in the client's output.
    pub fn new(
        client: &'a mut Channel,
        backend: &'a mut Backend,
        expected: VecDeque<Expected>,
        hold: Hold,
    ) -> Relay<'a> {
        let start = client.output.len();
        let extended = expected.iter().any(|expected| matches!(expected, Expected::Execute));
        let in_parts = expected.iter().any(|expected| matches!(expected, Expected::Bind { in_parts: true }));
        Relay {
            client,
            backend,
            expected,
            hold,
            start,
            extended,
            in_parts,
            relayed: Relayed::default(),
            went_out: false,
            answered: false,
            write_failed: false,
            parsed: 0,
            took_sync: false,
            began_copy: false,
            is_followed: false,
            behind: 0,
            notifications: BytesMut::new(),
            holds_rows: false,
            held_since: None,
            streams: false,
            refused: false,
        }
    }

    /// Runs to the end.
    pub async fn run(mut self) -> Ended {
        let result = self.answers().await;
        self.backend.channel.in_parts = &[];
        let relayed = std::mem::take(&mut self.relayed);
        let final_error = relayed.error.clone().or_else(|| relayed.own_error.clone());
        let result = result.map(|()| relayed);
        Ended {
            result,
            went_out: self.went_out,
            start: self.start,
            final_error,
            parsed: self.parsed,
            took_sync: self.took_sync,
            began_copy: self.began_copy,
            notifications: self.notifications,
        }
    }

    async fn answers(&mut self) -> Result<(), RelayError> {
        if self.in_parts {
            self.finish_request().await?;
        }
        loop {
            self.give_own_answers();
            let Some(expected) = self.expected.front() else { return self.flush_server().await };
            let is_clients = matches!(expected, Expected::Simple | Expected::Execute);
            self.backend.channel.in_parts = if is_clients { FROM_SERVER_IN_PARTS } else { &[] };
            match self.backend.channel.buffered_frame().map_err(RelayError::Server)? {
                Some(frame) => self.take(frame).await?,
                None => self.wait().await?,
            }
        }
    }

    fn give_own_answers(&mut self) {
        while let Some(Expected::Answer(_) | Expected::ParseAnswer) = self.expected.front() {
            match self.expected.pop_front() {
                _ if self.refused => {}
                Some(Expected::Answer(bytes)) => self.client.output.put_slice(&bytes),
                _ => {
                    self.parsed += 1;
                    self.client.output.message(b'1', b"");
                }
            }
        }
    }

    /// Waits until the server has said something, or taken something of what it is sent.
    async fn wait(&mut self) -> Result<(), RelayError> {
        let server = self.backend.server.clone();
        let is_held = self.may_go_out();
        let go_out_at = is_held.then(|| *self.held_since.get_or_insert_with(Instant::now) + HELD_FOR_MAX);
        if go_out_at.is_some_and(|at| Instant::now() >= at) {
            return self.flush_client().await;
        }
        let held_too_long = tokio::time::sleep_until(go_out_at.unwrap_or_else(Instant::now));
        tokio::select! {
            biased;
            moved = self.backend.channel.exchange_some() => moved.map_err(|error| RelayError::Server(error.into())),
            // Were the relay to end here, nobody would hear what has become of the statement, perhaps of a commit.
            written = self.client.flush_before(), if self.client.has_before() && !self.write_failed => {
                self.write_failed = written.is_err();
                Ok(())
            }
            error = given_up(&server) => Err(error),
            // What comes slowly is not waited for to its end.
            () = held_too_long, if is_held => Ok(()),
        }
    }

    /// Whether what is held of this answer may go out before its end.
    fn may_go_out(&self) -> bool {
        // Behind a simple statement's own answer nothing goes out before its transaction is known to have committed;
        // and in the middle of a message nothing could be said any more.
        let is_complete = self.answered && !self.extended;
        let goes = self.holds_rows && !is_complete && !self.streams && !self.write_failed;
        goes && matches!(self.hold, Hold::Briefly | Hold::Tentatively) && self.backend.channel.rest() == 0
    }

    async fn flush_server(&mut self) -> Result<(), RelayError> {
        let server = self.backend.server.clone();
        tokio::select! {
            biased;
            flushed = self.backend.channel.flush() => flushed.map_err(|error| RelayError::Server(error.into())),
            error = given_up(&server) => Err(error),
        }
    }

    async fn take(&mut self, frame: Frame) -> Result<(), RelayError> {
        match frame.tag {
            b'N' | b'S' | b'A' => {
                self.note_parameter(&frame)?;
                let own = matches!(
                    self.expected.front(),
                    Some(Expected::Own { heard: false } | Expected::Guard | Expected::Parse { visible: false, .. })
                );
                if frame.tag == b'N' {
                    // What was refused runs on there, and would not with PostgreSQL.
                    if !own && !self.refused {
                        self.give_notice(&in_whole_message(frame, self.behind)).await?;
                    }
                } else if frame.tag == b'A' {
                    let frame = self.backend.told(frame);
                    self.give_notification(&frame).await?;
                } else if !own {
                    self.give(&frame).await?;
                }
                return Ok(());
            }
            b'E' => return self.take_error(frame).await,
            b'G' => return self.copy_in(frame).await,
            _ => {}
        }
        let Some(expected) = self.expected.front() else { return Ok(()) };
        let (visible, ends) = match (expected, frame.tag) {
            (Expected::Own { .. }, b'D') => {
                self.relayed.own_rows.push(frame.body());
                (false, false)
            }
            (Expected::Own { .. }, b'C') => {
                self.relayed.own_tag = frame.body();
                (false, false)
            }
            (Expected::Own { .. } | Expected::Simple | Expected::Sync, b'Z') => {
                self.refused = false;
                self.note_status(&frame);
                (false, true)
            }
            (Expected::Guard, b'3') => (false, true),
            (Expected::Own { .. } | Expected::Guard, _) => (false, false),
            (Expected::Parse { visible, .. }, b'1') => {
                self.parsed += usize::from(*visible && !self.refused);
                (*visible, true)
            }
            (Expected::Evicted { .. }, b'3') => (false, true),
            (Expected::Bind { .. }, b'2') | (Expected::Close, b'3') => (true, true),
            (Expected::CompareResult { text }, b'T' | b'n') => {
                if !text.has_result(&frame) {
                    self.refuse();
                }
                (false, true)
            }
            (Expected::CompareResult { .. }, _) => (false, false),
            (Expected::DescribeStatement { text } | Expected::DescribePortal { text }, b'T' | b'n') => {
                if let Some(text) = text.as_ref().filter(|_| !self.refused) {
                    text.note_result(&frame);
                }
                (true, true)
            }
            (Expected::Execute, b'C' | b's' | b'I') => (true, true),
            _ => (true, false),
        };
        if visible && !self.refused {
            self.answered |= matches!(frame.tag, b'C' | b's' | b'I');
            self.holds_rows |= matches!(frame.tag, b'D' | b'd');
            self.give(&frame).await?;
            self.give_rest().await?;
        }
        if ends {
            self.expected.pop_front();
        }
        Ok(())
    }

    /// The client gets PostgreSQL's error for a statement whose result is another now.
    fn refuse(&mut self) {
        let mut bytes = BytesMut::new();
        outdated().encode(&mut bytes);
        let frame = Frame::whole(b'E', bytes.freeze());
        self.client.output.put_slice(&frame.bytes);
        self.relayed.error.get_or_insert(ErrorFields::parse(&frame.body()));
        (self.refused, self.answered) = (true, true);
    }

    /// The server reports a setting, behind whatever has changed it and before it takes another message.
    fn note_parameter(&mut self, frame: &Frame) -> Result<(), RelayError> {
        match parameter_status(frame) {
            Some((name, value)) if !is_readable_with(&name, &value) => Err(RelayError::Unreadable { name, value }),
            Some((name, value)) => {
                self.backend.note_parameter(name, value);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn note_status(&mut self, frame: &Frame) {
        self.relayed.status = frame.bytes.get(5).copied().unwrap_or(b'I');
        self.backend.in_transaction = self.relayed.status != b'I';
    }

    async fn take_error(&mut self, frame: Frame) -> Result<(), RelayError> {
        let fields = ErrorFields::parse(&frame.body());
        if matches!(self.expected.front(), Some(Expected::Own { .. })) {
            self.relayed.own_error.get_or_insert(fields);
            return Ok(());
        }
        if matches!(self.expected.front(), Some(Expected::Guard)) {
            self.relayed.own_error.get_or_insert(fields);
            self.skip_to_sync();
            return Ok(());
        }
        self.answered = true;
        let frame = in_whole_message(frame, self.behind);
        if matches!(self.expected.front(), Some(Expected::Simple)) {
            self.relayed.error.get_or_insert(fields);
            return self.give(&frame).await;
        }
        self.skip_to_sync();
        self.relayed.error.get_or_insert(fields);
        if self.refused { Ok(()) } else { self.give(&frame).await }
    }

    /// After an error in the extended protocol the server skips everything up to `Sync`.
    fn skip_to_sync(&mut self) {
        // What comes first tells whether the server has it.
        let mut decided = HashSet::new();
        while let Some(expected) = self.expected.front() {
            match expected {
                Expected::Sync | Expected::Own { .. } => break,
                Expected::Parse { named: true, number, .. } if decided.insert(*number) => {
                    self.backend.prepared.remove(*number);
                }
                Expected::Parse { named: true, .. } => {}
                Expected::Parse { .. } => self.backend.prepared.unnamed = None,
                // Its Close was skipped: the server has it still.
                Expected::Evicted { number } if decided.insert(*number) => self.backend.prepared.restore(*number),
                _ => {}
            }
            self.expected.pop_front();
        }
    }

    async fn give(&mut self, frame: &Frame) -> Result<(), RelayError> {
        self.give_bytes(&frame.bytes).await
    }

    async fn give_bytes(&mut self, bytes: &Bytes) -> Result<(), RelayError> {
        if self.streams {
            self.client.put(bytes);
            return Ok(());
        }
        let held = self.client.unwritten().saturating_sub(self.start) + bytes.len();
        if held <= self.held_bytes_max() {
            self.client.output.put_slice(bytes);
            self.client.note_buffered();
            return Ok(());
        }
        self.client.put(bytes);
        self.flush_client().await
    }

    fn held_bytes_max(&self) -> usize {
        match self.hold {
            Hold::InCommitBarrier => HELD_IN_BARRIER_BYTES_MAX,
            Hold::Briefly | Hold::Tentatively | Hold::TentativelyToItsEnd => HELD_BYTES_MAX,
        }
    }

    /// A notice goes out before what is held back of its statement's answer, if there is nothing else there: what is
    /// left of an earlier one may be the end of a message. A client that takes none is waited for as for other answers.
    async fn give_notice(&mut self, frame: &Frame) -> Result<(), RelayError> {
        let is_tentative = matches!(self.hold, Hold::Tentatively | Hold::TentativelyToItsEnd);
        let goes_first = self.start == 0 && !self.went_out && !self.answered && !is_tentative && !self.write_failed;
        if goes_first && self.client.unwritten() + frame.bytes.len() <= self.held_bytes_max() {
            self.client.put_before(&frame.bytes);
            return Ok(());
        }
        self.give(frame).await?;
        // Behind a simple statement's own answer nothing goes out before its transaction is known to have committed.
        let is_complete = self.answered && matches!(self.expected.front(), Some(Expected::Simple));
        if self.went_out && !self.streams && !is_complete && self.hold == Hold::Briefly {
            return self.flush_client().await;
        }
        Ok(())
    }

    /// A notification comes with the end of the answer, as PostgreSQL sends it between transactions; many of them go
    /// out at once.
    async fn give_notification(&mut self, frame: &Frame) -> Result<(), RelayError> {
        if self.notifications.len() + frame.bytes.len() <= self.held_bytes_max() {
            self.notifications.extend_from_slice(&frame.bytes);
            return Ok(());
        }
        let before = self.notifications.split().freeze();
        self.give_bytes(&before).await?;
        self.give(frame).await?;
        self.flush_client().await
    }

    async fn flush_client(&mut self) -> Result<(), RelayError> {
        (self.went_out, self.holds_rows, self.held_since) = (true, false, None);
        self.start = 0;
        let stall_max = self.hold.stall_max(self.client.stall_max);
        flush_within(self.client, stall_max).await.map_err(RelayError::Client)
    }

    /// Moves something in one direction or the other, whatever the rest of them waits for. `listens`: the client has
    /// something to say.
    async fn flow(&mut self, listens: bool) -> Result<(), RelayError> {
        let server = self.backend.server.clone();
        let (client, channel) = (&mut *self.client, &mut self.backend.channel);
        let unwritten = client.unwritten();
        let stalled = stall(client.stall_max);
        // The server has had all that there is, and waits with what it holds.
        let speaks_in_part = listens && client.rest() > 0 && channel.unwritten() == 0;
        let moved = std::future::poll_fn(|context| {
            let reads_client = listens && channel.unwritten() < STREAM_BYTES_MAX;
            let reads_server = client.unwritten() < STREAM_BYTES_MAX;
            let from_server = channel.poll_flow(context, reads_server);
            let from_client = client.poll_flow(context, reads_client);
            match (from_server, from_client) {
                (Poll::Ready(Err(error)), _) => Poll::Ready(Err(RelayError::Server(error.into()))),
                (_, Poll::Ready(Err(error))) => Poll::Ready(Err(RelayError::Client(error.into()))),
                (Poll::Pending, Poll::Pending) => Poll::Pending,
                _ => Poll::Ready(Ok(())),
            }
        });
        tokio::select! {
            biased;
            error = given_up(&server) => Err(error),
            moved = moved => moved,
            () = stalled, if unwritten > 0 || speaks_in_part => {
                let reason = if unwritten > 0 { does_not_read() } else { speaks_in_part_only() };
                Err(RelayError::Client(reason))
            }
        }
    }
}

/// What PostgreSQL says when a prepared statement's result is another than when it was prepared (`plancache.c`).
pub fn outdated() -> SqlError {
    SqlError::error(sqlstate::FEATURE_NOT_SUPPORTED, "cached plan must not change result type")
}

/// Writes the client's output; a client that takes nothing is given up.
pub async fn flush(client: &mut Channel) -> Result<(), ChannelError> {
    let stall_max = client.stall_max;
    flush_within(client, stall_max).await
}

async fn flush_within(client: &mut Channel, stall_max: Option<Duration>) -> Result<(), ChannelError> {
    while client.unwritten() > 0 {
        let stalled = stall(stall_max);
        tokio::select! {
            biased;
            written = client.flush_some() => written?,
            () = stalled => return Err(does_not_read()),
        }
    }
    Ok(())
}

/// A client's stall that is too long; none ever is without a limit.
async fn stall(limit: Option<Duration>) {
    match limit {
        Some(limit) => tokio::time::sleep(limit).await,
        None => std::future::pending().await,
    }
}

/// Writes what the client takes at once.
pub async fn flush_now(client: &mut Channel) -> Result<(), ChannelError> {
    while client.unwritten() > 0 {
        tokio::select! {
            biased;
            result = client.flush_some() => result?,
            () = std::future::ready(()) => return Ok(()),
        }
    }
    Ok(())
}

fn does_not_read() -> ChannelError {
    std::io::Error::new(std::io::ErrorKind::TimedOut, "the client does not read").into()
}

fn speaks_in_part_only() -> ChannelError {
    std::io::Error::new(std::io::ErrorKind::TimedOut, "the client sends a part of a message and no more").into()
}

/// Waits until nothing is to be expected of `server` any more.
async fn given_up(server: &Server) -> RelayError {
    server.unresponsive().await;
    if server.is_removed() { RelayError::Removed } else { RelayError::Unresponsive }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec: A2
    #[test]
    fn in_the_commit_barrier_no_client_is_waited_for_without_end() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        for (limit, in_barrier) in [(None, 60), (seconds(0), 0), (seconds(5), 5), (seconds(600), 60)] {
            assert_eq!(Hold::InCommitBarrier.stall_max(limit), seconds(in_barrier));
            assert_eq!(Hold::Briefly.stall_max(limit), limit);
        }
    }
}
