//! Transactions: begun lazily, placed by their first statement, committed inside the room.
//!
//! ```text
//!  BEGIN --> Nowhere --first statement--> AtEpoch (declared READ ONLY, a whitelisted read) --COMMIT--> done
//!                                     \-> OnLeader (all others, SERIALIZABLE) --COMMIT in the room--> done
//!  any --error--> failed --ROLLBACK or COMMIT--> rolled back
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::epoch_read::{InFlight, NotAtEpoch, epoch_closed};
use super::relay::{Ended, Hold, RelayError, Relayed};
use super::request::{Request, put_own};
use super::served_by::ServedBy;
use super::unit::{Outcome, Unfit};
use super::work::Work;
use super::{Characteristics, Session, SessionEnd};
use crate::backend::Backend;
use crate::epoch::{Barrier, Dooming, Epoch};
use crate::settings::{FORGET_PLANS, Reach, Settings};
use crate::state::SerializableTransaction;
use crate::wire::{SqlError, sqlstate};

/// Tries to open a read-only transaction's epoch before the leader takes it.
const OPEN_TRIES_MAX: usize = 6;

/// A transaction that the client, or the router for it, has begun.
pub(super) struct Transaction {
    /// What it is.
    pub characteristics: Characteristics,
    /// Begun by the router around the statements of one message.
    pub implicit: bool,
    /// Only ROLLBACK can follow.
    pub failed: bool,
    /// Savepoints that are open.
    pub savepoints: usize,
    /// How far settings reach that hold inside it only, as far as the router does not know them.
    pub local_settings: Reach,
    /// Its back end may have planned something under settings that end with it.
    pub stale_plans: bool,
    /// The session's settings before it.
    pub settings_before: Arc<Settings>,
    /// The session's characteristics before it.
    pub characteristics_before: Characteristics,
    /// Where it runs.
    pub place: Place,
}

/// Where a transaction runs.
pub(super) enum Place {
    /// Nothing was sent yet.
    Nowhere,
    /// Reads one epoch.
    AtEpoch { backend: Box<Backend>, epoch: Arc<Epoch>, _in_flight: InFlight },
    /// Runs on the leader.
    OnLeader(Box<LeaderTransaction>),
    /// It read an epoch on a server that was removed from the router, and did not end in time.
    CutOff { server: String },
    /// Its server was lost.
    Lost,
}

pub(super) struct LeaderTransaction {
    pub backend: Backend,
    /// Not sent yet.
    pub begin: Option<String>,
    /// Commits that its snapshot holds at least.
    pub commits_at_snapshot: u64,
    pub serializable: SerializableTransaction,
    /// The settings of the back end if it commits.
    pub settings_there: Arc<Settings>,
    /// It was begun READ ONLY. It may be no more: whether it has written is the server's to say.
    pub begun_read_only: bool,
    /// It has run what may write. When it has not, the server is asked before its COMMIT.
    pub wrote: bool,
    pub opaque: bool,
    /// Epochs up to its commit are wrong afterwards.
    pub dooms: bool,
    /// Lives while a commit that dooms epochs is in flight. It stands before the barrier, and so is dropped before it:
    /// an epoch that was published behind the barrier is doomed before anybody can take it.
    pub dooming: Option<Dooming>,
    pub barrier: Option<Barrier>,
    /// What TRUNCATE and the like had committed when its snapshot was not yet taken.
    pub doom_mark: u64,
}

impl Transaction {
    fn new(session: &Session, characteristics: Characteristics, implicit: bool) -> Transaction {
        Transaction {
            characteristics,
            implicit,
            failed: false,
            savepoints: 0,
            local_settings: Reach::Nothing,
            stale_plans: false,
            settings_before: session.settings.clone(),
            characteristics_before: session.characteristics,
            place: Place::Nowhere,
        }
    }

    /// One that the client begins.
    pub(super) fn explicit(session: &Session, characteristics: Characteristics) -> Transaction {
        Transaction::new(session, characteristics, false)
    }

    /// One around the statements of a message.
    pub(super) fn implicit(session: &Session) -> Transaction {
        Transaction::new(session, session.characteristics, true)
    }

    /// Whether a statement was sent already.
    pub(super) fn has_started(&self) -> bool {
        !matches!(self.place, Place::Nowhere)
    }

    /// Whether it runs at an epoch.
    pub(super) fn reads_an_epoch(&self) -> bool {
        matches!(self.place, Place::AtEpoch { .. })
    }

    /// What settings its back end on the leader has if it commits.
    pub(super) fn note_settings_there(&mut self, settings: Arc<Settings>) {
        if let Place::OnLeader(leader) = &mut self.place {
            leader.settings_there = settings;
        }
    }

    /// Whether it runs on the leader.
    pub(super) fn is_on_leader(&self) -> bool {
        matches!(self.place, Place::OnLeader(_))
    }

    /// From here on it has settings of its own that reach so far.
    pub(super) fn note_local_settings(&mut self, reach: Reach) {
        self.local_settings = self.local_settings.max(reach);
        self.stale_plans |= reach != Reach::Nothing;
    }

    /// Its back end.
    pub(super) fn backend(&mut self) -> Option<&mut Backend> {
        match &mut self.place {
            Place::AtEpoch { backend, .. } => Some(backend),
            Place::OnLeader(leader) => Some(&mut leader.backend),
            Place::Nowhere | Place::CutOff { .. } | Place::Lost => None,
        }
    }

    /// Waits until it must leave the server on which it reads an epoch, because that one was removed from the router.
    pub(super) async fn must_leave(&self) {
        match &self.place {
            Place::AtEpoch { backend, .. } => backend.server.cut_off().await,
            _ => std::future::pending().await,
        }
    }

    /// Leaves that server at once.
    pub(super) fn leave(&mut self) {
        if let Place::AtEpoch { backend, .. } = &self.place {
            self.place = Place::CutOff { server: backend.server.name.clone() };
        }
    }
}

pub(super) fn aborted() -> SqlError {
    SqlError::error(
        sqlstate::IN_FAILED_SQL_TRANSACTION,
        "current transaction is aborted, commands ignored until end of transaction block",
    )
}

impl Session {
    /// Runs one unit inside the open transaction.
    pub(super) async fn run_in_transaction(&mut self, request: &Request, work: &Work) -> Result<Outcome, SessionEnd> {
        let Some(mut transaction) = self.transaction.take() else { return Ok(Outcome::Failed) };
        let result = self.run_placed(&mut transaction, request, work).await;
        self.transaction = Some(transaction);
        match result? {
            Ok(()) => Ok(Outcome::Done),
            Err(Reported::ByServer) => {
                self.note_failure();
                Ok(Outcome::Failed)
            }
            Err(Reported::Here(error)) => {
                self.fail(error);
                Ok(Outcome::Failed)
            }
        }
    }

    async fn run_placed(
        &mut self,
        transaction: &mut Transaction,
        request: &Request,
        work: &Work,
    ) -> Result<Result<(), Reported>, SessionEnd> {
        transaction.note_local_settings(work.local_settings);
        match &transaction.place {
            Place::Lost => return Ok(Err(Reported::Here(aborted()))),
            Place::CutOff { server } => {
                let error = cut_off(server);
                transaction.place = Place::Lost;
                return Ok(Err(Reported::Here(error)));
            }
            _ => {}
        }
        let must_stay = self.is_pinned() || self.has_kept_statements();
        let reads_an_epoch = transaction.characteristics.read_only && work.reads_only && !must_stay;
        if !transaction.has_started() && reads_an_epoch {
            match self.open_epoch_transaction(transaction, request, work).await? {
                Some(result) => return Ok(result),
                None => tracing::debug!(session = self.number, "a read-only transaction runs on the leader"),
            }
        }
        if !transaction.has_started()
            && let Err(error) = self.place_on_leader(transaction).await
        {
            return Ok(Err(Reported::Here(error)));
        }
        match &mut transaction.place {
            Place::AtEpoch { .. } => self.run_at_transaction_epoch(transaction, request, work).await,
            _ => self.run_in_leader_transaction(transaction, request, work).await,
        }
    }

    /// Opens a read-only transaction at an epoch with its first unit; none when the leader must take it.
    async fn open_epoch_transaction(
        &mut self,
        transaction: &mut Transaction,
        request: &Request,
        work: &Work,
    ) -> Result<Option<Result<(), Reported>>, SessionEnd> {
        let demand = self.demand();
        let wait = Duration::from_millis(self.domain.settings.backend_wait_ms);
        let mut avoid = Vec::new();
        for _ in 0..OPEN_TRIES_MAX {
            let (epoch, server) = match self.choose(demand, &avoid).await {
                Ok(chosen) => chosen,
                Err(NotAtEpoch::AskLeader | NotAtEpoch::ChosenServerIsOut) => return Ok(None),
                Err(NotAtEpoch::Error(error)) => return Ok(Some(Err(Reported::Here(error)))),
            };
            let (Some(in_flight), Some(pool)) = (InFlight::on(&server), self.domain.readers.of(&server)) else {
                avoid.push(server.number);
                continue;
            };
            let Ok(mut backend) = pool.take(&self.credentials, &self.settings, wait).await else {
                avoid.push(server.number);
                continue;
            };
            if let Err(unfit) = self.give_settings(&mut backend).await? {
                if unfit.error.code == sqlstate::QUERY_CANCELED {
                    return Ok(Some(Err(Reported::Here(unfit.error))));
                }
                avoid.push(server.number);
                continue;
            }
            // The epoch is opened in a step of its own, so that the client's statement runs only if it is open.
            let mut expected = VecDeque::new();
            self.put_epoch(&mut backend, &epoch, true, &mut expected);
            let start = self.client.output.len();
            let Ended { result, .. } = self.relay(&mut backend, expected, Hold::Briefly).await;
            self.statement_ended();
            self.client.output.truncate(start);
            match result {
                Ok(relayed) if relayed.own_error.is_none() => {
                    self.served_by = Some(ServedBy::epoch(&epoch, &server));
                    transaction.place = Place::AtEpoch { backend: Box::new(backend), epoch, _in_flight: in_flight };
                    return self.run_at_transaction_epoch(transaction, request, work).await.map(Some);
                }
                Ok(_) => {}
                Err(RelayError::Client(error)) => return Err(error.into()),
                Err(_) => avoid.push(server.number),
            }
        }
        Ok(None)
    }

    async fn run_at_transaction_epoch(
        &mut self,
        transaction: &mut Transaction,
        request: &Request,
        work: &Work,
    ) -> Result<Result<(), Reported>, SessionEnd> {
        if work.pins.is_some() || work.opaque || work.barrier.is_some() || work.waits_for_client {
            return Ok(Err(Reported::Here(
                SqlError::error(
                    sqlstate::READ_ONLY_SQL_TRANSACTION,
                    "this statement cannot run in a read-only transaction that reads an epoch",
                )
                .hint("Run it first in its transaction, or begin the transaction without READ ONLY."),
            )));
        }
        let Place::AtEpoch { backend, epoch, .. } = &mut transaction.place else { return Ok(Ok(())) };
        let mut expected = VecDeque::new();
        if work.local_settings != Reach::Nothing {
            // A function that has settings of its own must not find what others have planned without them.
            put_own(backend, FORGET_PLANS, false, &mut expected);
        }
        request.encode(backend, &mut expected);
        let Ended { result, went_out, start, last_words, .. } = self.relay(backend, expected, Hold::Briefly).await;
        self.statement_ended();
        let server = backend.server.clone();
        let taken_back = if went_out { 0 } else { start };
        match result {
            Err(RelayError::Client(error)) => Err(error.into()),
            Err(error) => {
                transaction.place = Place::Lost;
                self.client.output.truncate(taken_back);
                Ok(Err(Reported::Here(self.server_lost(&server.name, &error, last_words))))
            }
            Ok(_) if epoch.is_doomed() => {
                self.client.output.truncate(taken_back);
                Ok(Err(Reported::Here(epoch_closed())))
            }
            Ok(Relayed { error: Some(_), .. }) => Ok(Err(Reported::ByServer)),
            Ok(_) => {
                server.reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                Ok(Ok(()))
            }
        }
    }

    /// Places the transaction on the leader; BEGIN goes with its first statement.
    async fn place_on_leader(&mut self, transaction: &mut Transaction) -> Result<(), SqlError> {
        let backend = self.take_leader().await.map_err(|error| error.to_sql())?;
        self.served_by = Some(ServedBy::Leader(backend.server.clone()));
        let characteristics = transaction.characteristics;
        let mode = if characteristics.read_only { " READ ONLY" } else { " READ WRITE" };
        let wait = if characteristics.deferrable { " DEFERRABLE" } else { "" };
        transaction.place = Place::OnLeader(Box::new(LeaderTransaction {
            serializable: self.router.serializable.begin(&backend.server),
            backend,
            begin: Some(format!("BEGIN ISOLATION LEVEL SERIALIZABLE{mode}{wait}")),
            commits_at_snapshot: self.domain.room.commits_done(),
            settings_there: self.settings.clone(),
            begun_read_only: characteristics.read_only,
            wrote: false,
            opaque: false,
            dooms: false,
            dooming: None,
            barrier: None,
            doom_mark: self.domain.epochs.doom_mark(),
        }));
        Ok(())
    }

    async fn run_in_leader_transaction(
        &mut self,
        transaction: &mut Transaction,
        request: &Request,
        work: &Work,
    ) -> Result<Result<(), Reported>, SessionEnd> {
        let Place::OnLeader(leader) = &mut transaction.place else { return Ok(Err(Reported::Here(aborted()))) };
        if leader.serializable.may_be_forgotten() {
            return Ok(Err(Reported::Here(too_many_transactions())));
        }
        // A user's function may write although it is declared STABLE; PostgreSQL does not look further than one call.
        let may_write = work.writes || work.own_transaction || (work.statements > 0 && !work.reads_only);
        leader.wrote |= may_write && !transaction.characteristics.read_only;
        leader.opaque |= work.opaque || work.own_transaction;
        let _releasing = self.releasing_around(work);
        if work.barrier.as_ref().is_some_and(|barrier| !barrier.harmless) && leader.barrier.is_none() {
            leader.barrier = Some(self.domain.epochs.begin_barrier());
            leader.dooms = true;
            self.release_readers().await;
        }
        if leader.begin.is_some()
            && let Err(unfit) = self.give_settings(&mut leader.backend).await?
        {
            return self.leave_unfit_leader(transaction, unfit);
        }
        let mut expected = VecDeque::new();
        if let Some(begin) = leader.begin.take() {
            put_own(&mut leader.backend, &begin, false, &mut expected);
        }
        request.encode(&mut leader.backend, &mut expected);
        let Ended { result, went_out, start, last_words, .. } =
            self.relay(&mut leader.backend, expected, Hold::Briefly).await;
        self.statement_ended();
        let relayed = match result {
            Ok(relayed) => relayed,
            Err(RelayError::Client(error)) => return Err(error.into()),
            Err(error) => {
                let name = leader.backend.server.name.clone();
                transaction.place = Place::Lost;
                self.commits_seen = self.commits_seen.max(self.domain.room.commits_begun());
                self.client.output.truncate(if went_out { 0 } else { start });
                let lost = self.server_lost(&name, &error, last_words);
                if self.pinned.is_some() {
                    return Err(SessionEnd::Fatal(SqlError { severity: "FATAL", ..lost }));
                }
                return Ok(Err(Reported::Here(lost)));
            }
        };
        self.after_leader_statement(work, relayed.error.is_none());
        if let Some(fields) = relayed.own_error {
            self.client.output.truncate(if went_out { 0 } else { start });
            return Ok(Err(Reported::Here(SqlError::error(&fields.code, fields.message))));
        }
        let stands = work.barrier.is_some() || self.domain.epochs.leader_snapshot_stands(leader.doom_mark);
        if relayed.error.is_none() && !stands {
            self.client.output.truncate(if went_out { 0 } else { start });
            return Ok(Err(Reported::Here(epoch_closed())));
        }
        match relayed.error {
            Some(_) => Ok(Err(Reported::ByServer)),
            None => Ok(Ok(())),
        }
    }

    /// The transaction was not begun on the leader, and has failed.
    fn leave_unfit_leader(
        &mut self,
        transaction: &mut Transaction,
        unfit: Unfit,
    ) -> Result<Result<(), Reported>, SessionEnd> {
        let place = std::mem::replace(&mut transaction.place, Place::Lost);
        match place {
            Place::OnLeader(leader) if unfit.is_whole => {
                self.return_leader(leader.backend);
                transaction.place = Place::Nowhere;
            }
            _ if self.pinned.is_some() => {
                return Err(SessionEnd::Fatal(SqlError { severity: "FATAL", ..unfit.error }));
            }
            _ => {}
        }
        Ok(Err(Reported::Here(unfit.error)))
    }

    /// Idle readers hold locks in their epoch's transaction; DDL must not wait for them.
    pub(super) async fn release_readers(&self) {
        for pool in self.domain.readers.all().iter() {
            let _ = tokio::time::timeout(Duration::from_millis(100), pool.sweep(None)).await;
        }
    }
}

/// What a transaction is told whose server was removed.
pub(super) fn cut_off(server: &str) -> SqlError {
    SqlError::error(
        sqlstate::ADMIN_SHUTDOWN,
        format!("server {server:?}, on which this transaction reads, was removed from the router"),
    )
    .hint("The transaction is rolled back; run it again.")
}

pub(super) fn too_many_transactions() -> SqlError {
    SqlError::error(
        sqlstate::SERIALIZATION_FAILURE,
        "could not serialize access: too many transactions have run since this one began for PostgreSQL to remember \
         what it read",
    )
    .hint("The transaction might succeed if retried. Keep update transactions short.")
}

/// Who has told the client of an error.
enum Reported {
    ByServer,
    Here(SqlError),
}
