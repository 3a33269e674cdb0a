//! Statements outside a transaction: reads at an epoch, updates whole inside the commit room.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::relay::{Ended, Hold, RelayError};
use super::request::{Request, put_own};
use super::simple::readable;
use super::unit::Outcome;
use super::work::Work;
use super::{Session, SessionEnd};
use crate::domain::Domain;
use crate::epoch::{Barrier, Demand, Epoch};
use crate::servers::{Health, Role, Server};
use crate::sql::PinReason;
use crate::wire::{ErrorFields, SqlError, sqlstate};

/// Tries of a read on different servers or epochs before the leader itself must answer it.
const EPOCH_TRIES_MAX: usize = 6;

/// Tries of an autocommit update that PostgreSQL refuses with 40001.
const UPDATE_TRIES_MAX: u32 = 5;

/// First pause before such a try; doubled each time.
const UPDATE_PAUSE: Duration = Duration::from_millis(1);

/// Half the first pause before a read on the leader is tried again that DDL has overtaken; doubled each time.
const DOOM_PAUSE: Duration = Duration::from_millis(5);

/// How long a reader waits for an epoch that is fresh enough before it reads on the leader.
const EPOCH_WAIT: Duration = Duration::from_secs(1);

/// The same while the leader is known to be gone, so that no gate can close.
const EPOCH_WAIT_WITHOUT_LEADER: Duration = Duration::from_millis(100);

/// How often snapshots are released for a command that waits for them.
const RELEASE_INTERVAL: Duration = Duration::from_millis(200);

/// How long a read waits for the server that its session has chosen, and how often it looks.
const CHOSEN_SERVER_WAIT: Duration = Duration::from_secs(2);
const CHOSEN_SERVER_LOOK: Duration = Duration::from_millis(20);

/// Why a read was not answered at an epoch.
#[derive(Debug)]
pub(super) enum NotAtEpoch {
    /// The leader shall answer it.
    AskLeader,
    /// The server that the session has chosen is not in the epoch; it may come back.
    ChosenServerIsOut,
    /// The client shall get this error.
    Error(SqlError),
}

/// While it lives, snapshots and idle readers' locks are released again and again.
pub(super) struct Releasing(tokio::task::JoinHandle<()>);

impl Releasing {
    fn start(domain: Arc<Domain>) -> Releasing {
        Releasing(tokio::spawn(async move {
            loop {
                domain.epochs.ask_for_release();
                tokio::time::sleep(RELEASE_INTERVAL).await;
            }
        }))
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// One read in flight on a server.
pub(super) struct InFlight(Arc<Server>);

impl InFlight {
    pub(super) fn on(server: &Arc<Server>) -> InFlight {
        server.reads_in_flight.fetch_add(1, Relaxed);
        InFlight(server.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.reads_in_flight.fetch_sub(1, Relaxed);
    }
}

/// What to do after one try of a read.
enum Tried {
    Done(Outcome),
    Again { avoid: Option<usize> },
    AskLeader,
}

impl Session {
    /// The demand of a read that arrives now.
    pub(super) fn demand(&self) -> Demand {
        Demand::of(self.freshness, &self.domain.room, self.commits_seen)
    }

    /// An epoch that meets `demand`, or the reason why there is none.
    async fn take_epoch(&self, demand: Demand) -> Result<Arc<Epoch>, NotAtEpoch> {
        if self.domain.settings.unsafe_without_epochs {
            return Ok(Arc::new(Epoch::unsafe_fake(self.domain.servers.len())));
        }
        let leader_is_gone = matches!(self.domain.servers[0].health(), Health::Down | Health::Unresponsive);
        let wait = if leader_is_gone { EPOCH_WAIT_WITHOUT_LEADER } else { EPOCH_WAIT };
        match self.domain.epochs.take(demand, &self.domain.room, wait).await {
            Ok(epoch) => Ok(epoch),
            Err(_) if leader_is_gone => Err(NotAtEpoch::Error(
                SqlError::error(
                    sqlstate::CANNOT_CONNECT_NOW,
                    format!(
                        "no epoch is fresh enough for {} reads, and the leader is not there to make one",
                        self.freshness
                    ),
                )
                .hint(
                    "Try again when the leader is back, or allow older reads: SET onecopy.freshness = 'bounded:60000'.",
                ),
            )),
            Err(_) => Err(NotAtEpoch::AskLeader),
        }
    }

    /// An epoch that meets `demand` and a server to read it on; the session's chosen server is waited for.
    pub(super) async fn choose(
        &self,
        demand: Demand,
        avoid: &[usize],
    ) -> Result<(Arc<Epoch>, Arc<Server>), NotAtEpoch> {
        let deadline = Instant::now() + CHOSEN_SERVER_WAIT;
        loop {
            let epoch = self.take_epoch(demand).await?;
            match self.choose_server(&epoch, avoid) {
                Err(NotAtEpoch::ChosenServerIsOut) if Instant::now() < deadline => {
                    tokio::time::sleep(CHOSEN_SERVER_LOOK).await;
                }
                Err(NotAtEpoch::ChosenServerIsOut) => return Err(NotAtEpoch::Error(self.chosen_server_is_out())),
                Err(reason) => return Err(reason),
                Ok(server) => return Ok((epoch, server)),
            }
        }
    }

    fn chosen_server_is_out(&self) -> SqlError {
        let name = self.server_choice.map_or("", |index| &self.domain.servers[index].name);
        SqlError::error(sqlstate::CANNOT_CONNECT_NOW, format!("server {name:?} is not in the current epoch"))
            .hint("Try again, or RESET onecopy.server.")
    }

    /// The least busy server on which `epoch` is open.
    fn choose_server(&self, epoch: &Epoch, avoid: &[usize]) -> Result<Arc<Server>, NotAtEpoch> {
        let open = |server: &&Arc<Server>| {
            epoch.snapshots[server.index].is_some()
                && !avoid.contains(&server.index)
                && matches!(server.health(), Health::Up | Health::Unknown)
        };
        if let Some(index) = self.server_choice {
            return self.domain.servers.get(index).filter(open).cloned().ok_or(NotAtEpoch::ChosenServerIsOut);
        }
        let turn = self.router.turn.fetch_add(1, Relaxed);
        let count = self.domain.servers.len();
        let servers = (0..count).map(|step| &self.domain.servers[(turn + step) % count]);
        let load =
            |server: &&Arc<Server>| server.reads_in_flight.load(Relaxed) + server.updates_in_flight.load(Relaxed);
        servers.filter(open).min_by_key(load).cloned().ok_or(NotAtEpoch::AskLeader)
    }

    /// Whether the leader answers sooner than a gate could be closed for this read: it is no busier than the others.
    fn leader_is_better(&self, demand: Demand) -> bool {
        if self.server_choice.is_some()
            || self.domain.settings.unsafe_without_epochs
            || self.domain.epochs.is_ready(demand, &self.domain.room)
        {
            return false;
        }
        self.domain.epochs.note_reader();
        let load = |server: &Arc<Server>| server.reads_in_flight.load(Relaxed) + server.updates_in_flight.load(Relaxed);
        let servers = &self.domain.servers;
        let all: usize = servers.iter().map(load).sum();
        servers[0].health() == Health::Up && load(&servers[0]) * servers.len() <= all
    }

    /// Runs reads at an epoch on some server; on the leader when that cannot be.
    pub(super) async fn run_at_epoch(&mut self, request: &Request, work: &Work) -> Result<Outcome, SessionEnd> {
        if work.text.as_ref().is_some_and(|text| self.domain.is_remembered_update(&readable(text))) {
            return self.run_on_leader(request, &Work { reads_only: false, writes: true, ..work.clone() }).await;
        }
        let demand = self.demand();
        if self.leader_is_better(demand) {
            return self.read_on_leader(request, work).await;
        }
        let mut avoid = Vec::new();
        for _ in 0..EPOCH_TRIES_MAX {
            let (epoch, server) = match self.choose(demand, &avoid).await {
                Ok(chosen) => chosen,
                Err(NotAtEpoch::AskLeader | NotAtEpoch::ChosenServerIsOut) => break,
                Err(NotAtEpoch::Error(error)) => {
                    self.fail(error);
                    return Ok(Outcome::Failed);
                }
            };
            match self.try_at_epoch(request, work, &epoch, &server).await? {
                Tried::Done(outcome) => return Ok(outcome),
                Tried::Again { avoid: index } => avoid.extend(index),
                Tried::AskLeader => break,
            }
            self.router.counters.read_retries.fetch_add(1, Relaxed);
        }
        self.read_on_leader(request, work).await
    }

    async fn try_at_epoch(
        &mut self,
        request: &Request,
        work: &Work,
        epoch: &Arc<Epoch>,
        server: &Arc<Server>,
    ) -> Result<Tried, SessionEnd> {
        let _in_flight = InFlight::on(server);
        let wait = Duration::from_millis(self.domain.settings.backend_wait_ms);
        let pool = &self.domain.readers[server.index];
        let Ok(mut backend) = pool.take(&self.credentials, &self.settings, wait).await else {
            return Ok(Tried::Again { avoid: Some(server.index) });
        };
        let own_transaction = work.own_transaction || request.binds_named_portal();
        let mut expected = VecDeque::new();
        self.put_settings(&mut backend, &mut expected);
        self.put_epoch(&mut backend, epoch, own_transaction, &mut expected);
        request.encode(&mut backend, &mut expected);
        let start = self.client.output.len();
        let Ended { result, went_out, last_words, .. } = self.relay(&mut backend, expected, Hold::Briefly).await;
        self.statement_ended();
        let reusable = !std::mem::take(&mut self.may_be_cancelled_late);
        let relayed = match result {
            Ok(relayed) => relayed,
            Err(RelayError::Client(error)) => return Err(error.into()),
            Err(error) if went_out => {
                self.client.output.clear();
                self.fail(self.server_lost(&server.name, &error, last_words));
                return Ok(Tried::Done(Outcome::Failed));
            }
            Err(_) => {
                self.client.output.truncate(start);
                return Ok(Tried::Again { avoid: Some(server.index) });
            }
        };
        if own_transaction || relayed.status != b'T' {
            backend.epoch = None;
        }
        let failed_to_join = relayed.own_error.is_some();
        if reusable && !failed_to_join {
            self.domain.readers[server.index].give_back(&self.user, backend);
        }
        if failed_to_join && !went_out {
            self.client.output.truncate(start);
            return Ok(Tried::Again { avoid: None });
        }
        if epoch.is_doomed() {
            return Ok(self.read_was_doomed(start, went_out));
        }
        if let Some(error) = relayed.error {
            return Ok(self.read_failed(&error.code, work, server, start, went_out));
        }
        server.reads.fetch_add(1, Relaxed);
        Ok(Tried::Done(Outcome::Done))
    }

    /// DDL has committed while the read ran: what it saw is not believed.
    fn read_was_doomed(&mut self, start: usize, went_out: bool) -> Tried {
        if !went_out {
            self.client.output.truncate(start);
            return Tried::Again { avoid: None };
        }
        self.client.output.clear();
        self.fail(epoch_closed());
        Tried::Done(Outcome::Failed)
    }

    fn read_failed(&mut self, code: &str, work: &Work, server: &Server, start: usize, went_out: bool) -> Tried {
        let again = match code {
            // PostgreSQL says that it was a write after all.
            sqlstate::READ_ONLY_SQL_TRANSACTION => {
                if let Some(text) = &work.text {
                    self.domain.remember_update(&readable(text));
                }
                Some(Tried::AskLeader)
            }
            // Unlogged and temporary tables cannot be read on a standby.
            sqlstate::FEATURE_NOT_SUPPORTED if server.role == Role::Follower => Some(Tried::AskLeader),
            // A conflict with recovery, or a server that goes down.
            sqlstate::SERIALIZATION_FAILURE | "40P01" | "57P01" | "57P02" | "57P03" | "57P05" => {
                Some(Tried::Again { avoid: Some(server.index) })
            }
            _ => None,
        };
        match again {
            Some(again) if !went_out => {
                self.client.output.truncate(start);
                again
            }
            _ => {
                self.note_failure();
                Tried::Done(Outcome::Failed)
            }
        }
    }

    /// A server's error is in the client's output.
    pub(super) fn note_failure(&mut self) {
        if let Some(transaction) = &mut self.transaction {
            transaction.failed = true;
        }
        if self.in_extended_batch {
            self.skips_until_sync = true;
        }
    }

    /// Runs a read on the leader, in a SERIALIZABLE transaction that is sent with it at once. It is READ ONLY there as
    /// well: what writes after all must commit in the room.
    pub(super) async fn read_on_leader(&mut self, request: &Request, work: &Work) -> Result<Outcome, SessionEnd> {
        for attempt in 1.. {
            let mut backend = match self.take_leader().await {
                Ok(backend) => backend,
                Err(error) => {
                    self.fail(error.to_sql());
                    return Ok(Outcome::Failed);
                }
            };
            let leader = backend.server.clone();
            let _transaction = self.router.serializable.begin(&leader);
            let mut expected = VecDeque::new();
            self.put_settings(&mut backend, &mut expected);
            let doom_mark = self.domain.epochs.doom_mark();
            put_own(&mut backend, "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY", false, &mut expected);
            request.encode(&mut backend, &mut expected);
            put_own(&mut backend, "COMMIT", false, &mut expected);
            let Ended { result, went_out, start, last_words, .. } =
                self.relay(&mut backend, expected, Hold::Briefly).await;
            self.statement_ended();
            let taken_back = if went_out { 0 } else { start };
            let relayed = match result {
                Ok(relayed) => relayed,
                Err(RelayError::Client(error)) => return Err(error.into()),
                Err(error) => {
                    self.client.output.truncate(taken_back);
                    return self.leader_lost(work, &error, last_words);
                }
            };
            self.commits_seen = self.commits_seen.max(self.domain.room.commits_begun());
            if relayed.own_error.is_none() || self.pinned.is_some() {
                self.return_leader(backend);
            }
            let reported = relayed.error.is_some();
            let failed = relayed.error.or(relayed.own_error);
            match failed.as_ref().map(|fields| fields.code.as_str()) {
                None if !self.domain.epochs.leader_snapshot_stands(doom_mark) => {
                    self.client.output.truncate(taken_back);
                    if went_out || attempt == UPDATE_TRIES_MAX {
                        self.fail(epoch_closed());
                        return Ok(Outcome::Failed);
                    }
                    tokio::time::sleep(DOOM_PAUSE * 2_u32.pow(attempt)).await;
                }
                None => {
                    leader.reads.fetch_add(1, Relaxed);
                    return Ok(Outcome::Done);
                }
                Some(sqlstate::READ_ONLY_SQL_TRANSACTION) if !went_out => {
                    self.client.output.truncate(start);
                    let work = Work { reads_only: false, writes: true, opaque: true, ..work.clone() };
                    return self.run_wrapped(request, &work).await;
                }
                Some(sqlstate::SERIALIZATION_FAILURE) if !went_out && attempt < UPDATE_TRIES_MAX => {
                    self.client.output.truncate(start);
                    self.router.counters.read_retries.fetch_add(1, Relaxed);
                }
                Some(_) if reported => {
                    self.note_failure();
                    return Ok(Outcome::Failed);
                }
                Some(code) => {
                    let message = failed.as_ref().map(|fields| fields.message.clone()).unwrap_or_default();
                    let error = SqlError::error(code, message);
                    self.client.output.truncate(taken_back);
                    self.fail(error);
                    return Ok(Outcome::Failed);
                }
            }
        }
        unreachable!("the last try gives an outcome")
    }

    /// Runs one unit on the leader, SERIALIZABLE, in a transaction of the server's own.
    pub(super) async fn run_on_leader(&mut self, request: &Request, work: &Work) -> Result<Outcome, SessionEnd> {
        let _releasing = self.releasing_around(work);
        let _barrier = self.barrier_around(work).await;
        let mut pause = UPDATE_PAUSE;
        for attempt in 1.. {
            match self.try_on_leader(request, work, attempt < UPDATE_TRIES_MAX && !work.commits_itself).await? {
                Some(outcome) => {
                    if _barrier.is_some() {
                        self.domain.epochs.doom();
                        self.domain.catalog_changed();
                    }
                    return Ok(outcome);
                }
                None => {
                    self.router.counters.update_retries.fetch_add(1, Relaxed);
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
            }
        }
        unreachable!("the last try gives an outcome")
    }

    /// For commands that wait for old snapshots or for readers' locks, but leave old epochs right.
    pub(super) fn releasing_around(&self, work: &Work) -> Option<Releasing> {
        let harmless = work.barrier.as_ref().is_some_and(|barrier| barrier.harmless);
        harmless.then(|| Releasing::start(self.domain.clone()))
    }

    /// For DDL that runs alone, and for CALL and DO, which may hide it.
    async fn barrier_around(&mut self, work: &Work) -> Option<Barrier> {
        if let Some(database) = work.barrier.as_ref().and_then(|barrier| barrier.database.as_deref()) {
            self.router.close_domain(database).await;
        }
        if !work.commits_itself && work.barrier.as_ref().is_none_or(|barrier| barrier.harmless) {
            return None;
        }
        let barrier = self.domain.epochs.begin_barrier();
        if work.barrier.as_ref().is_none_or(|barrier| !barrier.harmless && !barrier.alone) {
            self.domain.epochs.doom();
        }
        Some(barrier)
    }

    /// One try; none when it failed so that it may be tried again.
    async fn try_on_leader(
        &mut self,
        request: &Request,
        work: &Work,
        may_retry: bool,
    ) -> Result<Option<Outcome>, SessionEnd> {
        let mut backend = match self.take_leader().await {
            Ok(backend) => backend,
            Err(error) => {
                self.fail(error.to_sql());
                return Ok(Some(Outcome::Failed));
            }
        };
        let leader = backend.server.clone();
        let _update = self.router.serializable.begin(&leader);
        let mut expected = VecDeque::new();
        self.put_settings(&mut backend, &mut expected);
        if self.pinned.is_some() {
            // A function may have changed the default of this back end.
            put_own(&mut backend, "SET default_transaction_isolation = serializable", false, &mut expected);
        }
        request.encode(&mut backend, &mut expected);
        let start = self.client.output.len();
        let domain = self.domain.clone();
        let alone = work.barrier.as_ref().is_some_and(|barrier| barrier.alone);
        let commit = if work.writes && !alone {
            Some(domain.room.enter(self.number, backend.process_id, work.fingerprint).await)
        } else {
            None
        };
        let hold = if commit.is_some() { Hold::InRoom } else { Hold::Briefly };
        let Ended { result, went_out, last_words, .. } = self.relay(&mut backend, expected, hold).await;
        self.statement_ended();
        let relayed = match result {
            Ok(relayed) => relayed,
            Err(RelayError::Client(error)) => return Err(error.into()),
            Err(error) => {
                // The room takes note that the commit may still happen.
                drop(commit);
                if went_out {
                    self.client.output.clear();
                } else {
                    self.client.output.truncate(start);
                }
                return self.leader_lost(work, &error, last_words).map(Some);
            }
        };
        self.commits_seen = match commit {
            Some(commit) => commit.settle(),
            None => self.commits_seen.max(domain.room.commits_begun()),
        };
        self.after_leader_statement(work, relayed.error.is_none());
        if relayed.own_error.is_none() {
            self.return_leader(backend);
        }
        let code = relayed.error.as_ref().map(|error| error.code.as_str());
        match code {
            None => Ok(Some(Outcome::Done)),
            Some(sqlstate::SERIALIZATION_FAILURE) if may_retry && !went_out => {
                self.client.output.truncate(start);
                Ok(None)
            }
            Some(_) => {
                self.note_failure();
                Ok(Some(Outcome::Failed))
            }
        }
    }

    /// Notes what a statement has left behind on the session's back end.
    pub(super) fn after_leader_statement(&mut self, work: &Work, succeeded: bool) {
        if succeeded && let Some(reason) = work.pins {
            self.pin(reason);
        }
    }

    pub(super) fn pin(&mut self, reason: PinReason) {
        if self.pinned.is_none() {
            tracing::debug!(session = self.number, ?reason, "pinned to the leader");
            self.pinned = Some(reason);
        }
    }

    /// The leader was lost under an autocommit statement.
    fn leader_lost(
        &mut self,
        work: &Work,
        error: &RelayError,
        last_words: Option<ErrorFields>,
    ) -> Result<Outcome, SessionEnd> {
        let name = &self.domain.servers[0].name;
        let sql_error = if work.writes {
            SqlError::error(
                sqlstate::TRANSACTION_RESOLUTION_UNKNOWN,
                format!("lost {name} while it ran the statement: {error}; whether it committed is unknown"),
            )
            .hint("Look whether its effect is there before you run it again.")
        } else {
            self.server_lost(name, error, last_words)
        };
        if self.pinned.is_some() {
            return Err(SessionEnd::Fatal(SqlError { severity: "FATAL", ..sql_error }));
        }
        self.fail(sql_error);
        Ok(Outcome::Failed)
    }
}

/// What a reader is told whose epoch DDL has ended.
pub(super) fn epoch_closed() -> SqlError {
    SqlError::error(sqlstate::SERIALIZATION_FAILURE, "the epoch of this read was closed by concurrent DDL")
        .hint("The transaction might succeed if retried.")
}
