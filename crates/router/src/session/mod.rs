//! A client's session: its messages in, answers out.
//!
//! ```text
//!            Query                      Parse Bind Describe Execute Close ... Sync
//!              |                                   |
//!          simple.rs                          extended.rs          split into statements and units of work
//!              \________________  _________________/
//!                               \/
//!     action.rs, setting.rs (BEGIN, SET, SHOW ...: the router's own)     unit.rs (what a server runs)
//!                                                                        /                     \
//!                                              outside a transaction                     inside: transaction.rs
//!                            epoch_read.rs (reads)   autocommit.rs (the leader)          and commit.rs
//!                                                                        \                     /
//!                                                                         relay.rs  (answers back)
//! ```

mod action;
mod autocommit;
mod batch_traits;
mod cancel;
mod client_statements;
mod commit;
mod concurrent_index;
mod ddl;
mod ddl_in_progress;
mod ending;
mod epoch_read;
mod epoch_transaction;
mod extended;
mod kept_statement;
mod login;
mod outcome;
mod own_setting;
mod presence;
mod registration;
mod relay;
mod request;
mod reset;
mod role;
mod served_by;
mod server_choice;
mod setting;
mod simple;
mod stand_in;
mod startup;
mod transaction;
mod unit;

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::sync::watch;
use tokio::time::Instant;

pub(crate) use cancel::{CancelKeys, CancelSlot, ClientStatus};
pub use login::serve;
pub use presence::GONE_CLIENT_BOUND;

use crate::backend::{Backend, Credentials, ServerProcess};
use crate::config::{Freshness, RouterSettings};
use crate::database::Database;
use crate::pool::PoolError;
use crate::prepared_text::PreparedText;
use crate::settings::Settings;
use crate::sql::{Isolation, PinReason, Statement};
use crate::state::RouterState;
use crate::wire::{Channel, ChannelError, ErrorFields, FrontendError, Reply, SqlError, sqlstate};
use cancel::process_id;
use client_statements::ClientStatements;
use presence::Presence;
use served_by::ServedBy;
use transaction::Transaction;

/// Portals a client may have at once before it is refused with 54000.
const PORTALS_MAX: usize = 10_000;
/// Bytes of a portal's name above which it is refused with 54000: the names of all are kept.
const PORTAL_NAME_BYTES_MAX: usize = 4096;

/// How long a session waits until it is known what has become of its last commit, and how often it looks.
const DOUBT_WAIT: Duration = Duration::from_secs(2);
const DOUBT_LOOK: Duration = Duration::from_millis(5);

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub enum SessionEnd {
    /// The client said goodbye.
    #[error("the client ended the session")]
    Terminated,
    /// The client is gone, or sent what is no message, or none that may come then.
    #[error("lost the client: {0}")]
    Client(#[from] ChannelError),
    /// The session cannot go on; the client has been told.
    #[error("ended by an error: {0}")]
    Fatal(SqlError),
}

/// Why a prepared statement must run on the session's own back end: what its Parse has made of it is to be had nowhere
/// else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    /// It can be parsed anywhere.
    Not,
    /// The settings of its Parse are known, but are not those of now.
    Settings,
    /// It was parsed at an instant, or under settings, that will not come again.
    Instant,
    /// The same, in a transaction that reads an epoch: with that its back end goes.
    InstantOfEpoch,
}

/// A statement that the client has prepared.
#[derive(Debug, Clone)]
struct ClientStatement {
    text: Arc<PreparedText>,
    /// None for an empty statement.
    statement: Option<Statement>,
    named: bool,
    /// Why it must run where it was parsed.
    kept: Kept,
    /// What it is again behind the transaction whose DDL it was parsed anew for.
    before_ddl: Option<Arc<PreparedText>>,
    /// The catalog's version when it was classified.
    classified_at: u64,
}

/// How long a client may say nothing; none: for ever.
#[derive(Debug, Clone, Copy)]
struct IdleLimits {
    outside_transaction: Option<Duration>,
    in_transaction: Option<Duration>,
}

impl IdleLimits {
    fn of(settings: &RouterSettings) -> IdleLimits {
        IdleLimits {
            outside_transaction: limit(settings.client_idle_s),
            in_transaction: limit(settings.idle_in_transaction_s),
        }
    }
}

/// A setting in seconds, of which 0 is none.
fn limit(seconds: u64) -> Option<Duration> {
    (seconds > 0).then(|| Duration::from_secs(seconds))
}

/// What transactions are unless they say otherwise.
#[derive(Debug, Clone, Copy, Default)]
struct Characteristics {
    /// What the client asked for; it always gets SERIALIZABLE.
    isolation: Option<Isolation>,
    read_only: bool,
    deferrable: bool,
}

/// One client that is logged in.
pub struct Session {
    router: Arc<RouterState>,
    database: Arc<Database>,
    client: Channel,
    number: u64,
    _inside: registration::SessionRegistration,
    user: Arc<str>,
    credentials: Arc<Credentials>,
    settings: Arc<Settings>,
    settings_at_login: Arc<Settings>,
    characteristics: Characteristics,
    characteristics_at_login: Characteristics,
    freshness: Freshness,
    freshness_at_login: Freshness,
    /// Reads at epochs run on the server of this name only.
    server_choice: Option<Arc<str>>,
    server_choice_at_login: Option<Arc<str>>,
    /// Where its newest statement ran.
    served_by: Option<ServedBy>,
    statements: ClientStatements,
    portals: HashMap<Bytes, ClientStatement>,
    transaction: Option<Transaction>,
    /// The back end on the leader that holds state of this session.
    own_backend: Option<Backend>,
    pinned: Option<PinReason>,
    /// Statements that must run on the session's own back end, some of which may be gone.
    kept: Vec<Weak<PreparedText>>,
    /// Such a statement is in use: until the batch ends nobody may take the back end away.
    holds_backend: bool,
    /// The settings, and what of them reaches into statements.
    settings_of_statements: (Arc<Settings>, Arc<Settings>),
    /// The session's own back end has held its state: without that back end the session cannot go on.
    has_state_there: bool,
    /// The server process of a commit of which the client was told that its fate is unknown.
    in_doubt: Option<ServerProcess>,
    /// Commits that this session may have seen since it began; an epoch for it holds at least these.
    commits_seen: u64,
    /// Commits that its client may have been told of before.
    commits_before: u64,
    cancel: Arc<CancelSlot>,
    presence: Arc<Presence>,
    may_be_cancelled_late: bool,
    /// Something of the answer to what runs has gone out to the client: the rest of the output is what is left of it.
    went_out: bool,
    /// COPY has taken the client's `Sync`.
    took_sync: bool,
    /// The client was asked for the data of COPY in this batch: a `Sync` in front of that counts for nothing.
    began_copy: bool,
    /// A message of this batch follows what runs.
    is_followed: bool,
    /// Characters of the client's message before the statement that runs.
    behind: usize,
    /// What servers have told of notifications: no answer that is taken back takes them with it.
    notifications: BytesMut,
    /// Tells when server processes may have been ended on purpose.
    endings: watch::Receiver<u64>,
    /// Its own newest statement may end server processes.
    ends_processes: bool,
    /// Its server process was ended on purpose; the client is told so.
    ended_by: Option<SqlError>,
    stopping: watch::Receiver<bool>,
    idle: IdleLimits,
    skips_until_sync: bool,
    /// SQLSTATE of the newest error that the client was told.
    failed_with: String,
    /// How many `Parse` messages of the last unit have succeeded.
    parsed: usize,
    in_extended_batch: bool,
}

impl Session {
    /// Serves messages until the client goes.
    async fn run(mut self) -> SessionEnd {
        let ended = self.messages().await;
        match self.ended_by.take().map_or(ended, |error| Err(SessionEnd::Fatal(error))) {
            Ok(end) => end,
            Err(SessionEnd::Fatal(error)) => {
                error.encode(&mut self.client.output);
                // The client may be gone already; the session ends in any case.
                let _ = relay::flush(&mut self.client).await;
                SessionEnd::Fatal(error)
            }
            Err(SessionEnd::Client(error @ (ChannelError::Length { .. } | ChannelError::Unexpected(_)))) => {
                SqlError::fatal(sqlstate::PROTOCOL_VIOLATION, error.to_string()).encode(&mut self.client.output);
                let _ = relay::flush(&mut self.client).await;
                SessionEnd::Client(error)
            }
            Err(end) => end,
        }
    }

    async fn messages(&mut self) -> Result<SessionEnd, SessionEnd> {
        loop {
            let frame = match self.client.buffered_frame()? {
                Some(frame) => frame,
                None => {
                    relay::flush(&mut self.client).await?;
                    self.cancel.end_work(&self.settings, self.transaction.is_some());
                    self.presence.set_listening(true);
                    let frame = self.next_frame().await;
                    self.presence.set_listening(false);
                    frame?
                }
            };
            if self.presence.is_gone() {
                return Err(SessionEnd::Client(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into()));
            }
            if self.has_state_there && self.own_backend.is_none() && self.transaction.is_none() {
                return Err(self.lost_own_backend());
            }
            if self.cancel.is_ended() {
                return Err(SessionEnd::Fatal(ending::terminated()));
            }
            if self.endings.has_changed().unwrap_or(false) {
                self.look_for_ending().await?;
            }
            self.cancel.begin_work();
            match frame.tag {
                b'X' => return Ok(SessionEnd::Terminated),
                b'S' => self.sync().await?,
                _ if self.skips_until_sync => {}
                b'Q' => self.simple_query(&frame).await?,
                b'P' | b'B' | b'D' | b'E' | b'C' | b'H' => self.extended_batch(frame).await?,
                // Left over from a COPY that has failed.
                b'd' | b'c' | b'f' => {}
                b'F' => self.function_call(frame).await?,
                tag => {
                    let text = format!("invalid frontend message type {tag}");
                    return Err(SessionEnd::Fatal(SqlError::fatal(sqlstate::PROTOCOL_VIOLATION, text)));
                }
            }
            // What was answered need not wait for what the client has said already.
            relay::flush_now(&mut self.client).await?;
            // Nobody need say anything more for it.
            if self.cancel.is_ended() {
                return Err(SessionEnd::Fatal(ending::terminated()));
            }
        }
    }

    /// The client's next message. Meanwhile notifications of its own back end are passed on, and a router that stops,
    /// the limit of its idleness, or who has ended its server process on purpose, ends the session.
    async fn next_frame(&mut self) -> Result<crate::wire::Frame, SessionEnd> {
        let (limit, idle_too_long) = match &self.transaction {
            Some(_) => (self.idle.in_transaction, sqlstate::IDLE_IN_TRANSACTION_TIMEOUT),
            None => (self.idle.outside_transaction, sqlstate::IDLE_SESSION_TIMEOUT),
        };
        let deadline = limit.map(|limit| Instant::now() + limit);
        loop {
            let too_long = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            let notified = async {
                match (&mut self.own_backend, &self.transaction) {
                    (Some(backend), None) => backend.channel.frame().await,
                    _ => std::future::pending().await,
                }
            };
            let cut_off = async {
                match &self.transaction {
                    Some(transaction) => transaction.must_leave().await,
                    None => std::future::pending().await,
                }
            };
            // An open transaction finds it out by what runs in it, if only its server process was ended.
            let endings = &mut self.endings;
            let ended = async { endings.changed().await.is_ok() };
            let stopping = &mut self.stopping;
            let stopped = async { stopping.wait_for(|stopping| *stopping).await.is_ok() };
            tokio::select! {
                biased;
                frame = self.client.frame() => return Ok(frame?),
                _ = stopped => {
                    let text = "terminating connection: the router is shutting down";
                    return Err(SessionEnd::Fatal(SqlError::fatal(sqlstate::ADMIN_SHUTDOWN, text)));
                }
                () = too_long => {
                    let which = if self.transaction.is_some() { "idle-in-transaction" } else { "idle-session" };
                    let text = format!("terminating connection due to {which} timeout");
                    return Err(SessionEnd::Fatal(SqlError::fatal(idle_too_long, text)));
                }
                true = ended => self.look_for_ending().await?,
                () = cut_off => self.transaction.iter_mut().for_each(Transaction::leave),
                frame = notified => {
                    let Ok(frame) = frame else {
                        return Err(self.lost_own_backend());
                    };
                    if frame.tag == b'E' {
                        let words = ErrorFields::parse(&frame.body());
                        self.own_backend = None;
                        return Err(SessionEnd::Fatal(SqlError::fatal(&words.code, words.message)));
                    }
                    if let Some(backend) = &self.own_backend {
                        self.client.output.extend_from_slice(&backend.told(frame).bytes);
                    }
                    relay::flush(&mut self.client).await?;
                }
            }
        }
    }

    fn lost_own_backend(&mut self) -> SessionEnd {
        self.own_backend = None;
        SessionEnd::Fatal(
            SqlError::fatal(sqlstate::ADMIN_SHUTDOWN, "the server process that holds this session's state has ended")
                .hint("Connect again."),
        )
    }

    /// Reports an error; an open transaction has failed with it.
    fn fail(&mut self, error: SqlError) {
        error.encode(&mut self.client.output);
        self.failed_with = error.code;
        if let Some(transaction) = &mut self.transaction {
            transaction.failed = true;
        }
        if self.in_extended_batch {
            self.skips_until_sync = true;
        }
    }

    /// `ReadyForQuery`.
    fn ready(&mut self) {
        let status = match &self.transaction {
            None => b'I',
            Some(transaction) if transaction.failed => b'E',
            Some(_) => b'T',
        };
        let notifications = self.notifications.split();
        self.client.output.extend_from_slice(&notifications);
        self.client.output.ready_for_query(status);
    }

    fn malformed(error: FrontendError) -> SessionEnd {
        SessionEnd::Fatal(SqlError::fatal(sqlstate::PROTOCOL_VIOLATION, error.to_string()))
    }

    /// Whether the session's last commit may still happen.
    fn is_in_doubt(&self) -> bool {
        self.in_doubt.is_some_and(|process| self.database.commit_barrier.in_doubt().contains(&process))
    }

    /// A back end on the leader for this session. Nothing runs there before it is known what has become of the
    /// session's last commit: a client that looks whether it is there must find what will be.
    async fn take_leader(&mut self) -> Result<Backend, PoolError> {
        let deadline = tokio::time::Instant::now() + DOUBT_WAIT;
        while self.is_in_doubt() {
            if tokio::time::Instant::now() > deadline {
                return Err(PoolError::InDoubt);
            }
            tokio::time::sleep(DOUBT_LOOK).await;
        }
        self.in_doubt = None;
        if let Some(backend) = self.own_backend.take() {
            return Ok(backend);
        }
        if self.has_state_there && self.pinned.is_some() {
            return Err(PoolError::StateLost);
        }
        let wait = self.database.backend_wait();
        let mut backend = self.database.leader.take(self.number, &self.credentials, wait).await?;
        let session = process_id(self.number);
        if std::mem::replace(&mut backend.session, session) != session {
            backend.server.note_session(backend.process_id, session);
        }
        Ok(backend)
    }

    /// Keeps a back end on the leader for this session's next transaction.
    fn return_leader(&mut self, backend: Backend) {
        // A cancel request that is still on its way must not hit another session.
        let is_hit = std::mem::take(&mut self.may_be_cancelled_late);
        if self.is_pinned() {
            self.own_backend = Some(backend);
            self.has_state_there = true;
            return;
        }
        self.has_state_there = false;
        if !is_hit {
            self.database.leader.park(self.number, backend);
        }
    }

    /// Whether the session must stay on its back end on the leader.
    fn is_pinned(&self) -> bool {
        self.pinned.is_some() || self.holds_backend
    }

    /// Gives the back end back that was held for a statement, outside transactions.
    fn release(&mut self) {
        if self.transaction.is_some() || !std::mem::take(&mut self.holds_backend) || self.pinned.is_some() {
            return;
        }
        if std::mem::take(&mut self.has_state_there)
            && let Some(backend) = self.own_backend.take()
        {
            self.return_leader(backend);
        }
    }

    /// What of the session's settings reaches into statements.
    fn settings_of_statements(&mut self) -> Arc<Settings> {
        let (of, cached) = &mut self.settings_of_statements;
        if !Arc::ptr_eq(of, &self.settings) {
            let current = self.settings.of_statements();
            *of = self.settings.clone();
            if **cached != current {
                *cached = Arc::new(current);
            }
        }
        cached.clone()
    }

    /// Notes that a statement ended.
    fn statement_ended(&mut self) {
        self.presence.note_end();
    }

    fn count(&self, reads: bool) {
        let counter = if reads { &self.router.counters.reads } else { &self.router.counters.updates };
        counter.fetch_add(1, Relaxed);
    }
}
