//! Transactions: begun lazily, placed by their first statement, committed inside the commit barrier.
//!
//! ```text
//!  BEGIN --> Nowhere --first statement--> AtEpoch (declared READ ONLY, a whitelisted read) --COMMIT--> done
//!                                     \-> OnLeader (all others, SERIALIZABLE) --COMMIT in the barrier--> done
//!  any --error--> failed --ROLLBACK or COMMIT--> rolled back
//! ```

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::batch_traits::BatchTraits;
use super::ddl_in_progress::{DdlInProgress, closed_by_ddl};
use super::epoch_read::InFlight;
use super::outcome::{Outcome, Unfit};
use super::relay::{Ended, Hold, RelayError};
use super::request::Request;
use super::served_by::ServedBy;
use super::{Characteristics, Session, SessionEnd};
use crate::backend::Backend;
use crate::epoch::{Epoch, LaterSnapshot};
use crate::serializable::SerializableTransaction;
use crate::settings::{Reach, Settings};
use crate::sql::Isolation;
use crate::wire::{ErrorFields, SqlError, sqlstate};

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
    /// It may have changed the schema: what is parsed in it is parsed by one that nobody else has, and that may be
    /// taken back.
    pub behind_ddl: bool,
    /// Its back end may have planned something under settings that end with it.
    pub stale_plans: bool,
    /// What it has run at its epoch, as long as that is SET and the like only.
    pub settings_so_far: Option<Vec<String>>,
    /// The names that SET and RESET have touched in it.
    pub touched_settings: BTreeSet<String>,
    /// The session's settings before it.
    pub settings_before: Arc<Settings>,
    /// The session's characteristics before it.
    pub characteristics_before: Characteristics,
    /// The session's isolation level behind it, where it has set another one for itself only.
    pub isolation_behind: Option<Option<Isolation>>,
    /// Where it runs.
    pub placement: Placement,
}

/// Where a transaction runs.
pub(super) enum Placement {
    /// Nothing was sent yet.
    Nowhere,
    /// Reads one epoch. `change_counter`: what had been changed that is not MVCC before it was taken.
    AtEpoch { backend: Box<Backend>, epoch: Arc<Epoch>, change_counter: u64, _in_flight: InFlight },
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
    /// What is known of its snapshot.
    pub snapshot: LaterSnapshot,
    pub serializable: SerializableTransaction,
    /// The settings of the back end if it commits.
    pub settings_there: Arc<Settings>,
    /// It was begun READ ONLY. It may be no more: whether it has written is the server's to say.
    pub begun_read_only: bool,
    /// It has run what may write. When it has not, the server is asked before its COMMIT.
    pub wrote: bool,
    /// It has run what may hide DDL, or DDL whose locks tell what it has changed.
    pub opaque: bool,
    /// It has run DDL that is no secret.
    pub has_ddl: bool,
    /// Epochs up to its commit are wrong afterwards.
    pub dooms: bool,
    pub ddl: Option<DdlInProgress>,
}

impl Transaction {
    fn new(session: &Session, characteristics: Characteristics, implicit: bool) -> Transaction {
        Transaction {
            characteristics,
            implicit,
            failed: false,
            savepoints: 0,
            local_settings: Reach::Nothing,
            behind_ddl: false,
            stale_plans: false,
            settings_so_far: Some(Vec::new()),
            touched_settings: BTreeSet::new(),
            settings_before: session.settings.clone(),
            characteristics_before: session.characteristics,
            isolation_behind: None,
            placement: Placement::Nowhere,
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

    /// Whether savepoints may have taken back what SET and RESET have done, without the router's knowing.
    pub(super) fn hides_settings(&self) -> bool {
        self.savepoints > 0 && !self.touched_settings.is_empty()
    }

    /// Whether a statement was sent already.
    pub(super) fn has_started(&self) -> bool {
        !matches!(self.placement, Placement::Nowhere)
    }

    /// Whether it runs at an epoch.
    pub(super) fn reads_an_epoch(&self) -> bool {
        matches!(self.placement, Placement::AtEpoch { .. })
    }

    /// What settings its back end on the leader has if it commits.
    pub(super) fn note_settings_there(&mut self, settings: Arc<Settings>) {
        if let Placement::OnLeader(leader) = &mut self.placement {
            leader.settings_there = settings;
        }
    }

    /// Whether it runs on the leader.
    pub(super) fn is_on_leader(&self) -> bool {
        matches!(self.placement, Placement::OnLeader(_))
    }

    /// From here on it has settings of its own that reach so far.
    pub(super) fn note_local_settings(&mut self, reach: Reach) {
        self.local_settings = self.local_settings.max(reach);
        self.stale_plans |= reach != Reach::Nothing;
    }

    /// Its back end.
    pub(super) fn backend(&mut self) -> Option<&mut Backend> {
        match &mut self.placement {
            Placement::AtEpoch { backend, .. } => Some(backend),
            Placement::OnLeader(leader) => Some(&mut leader.backend),
            Placement::Nowhere | Placement::CutOff { .. } | Placement::Lost => None,
        }
    }

    /// Waits until it must leave the server on which it reads an epoch, because that one was removed from the router.
    pub(super) async fn must_leave(&self) {
        match &self.placement {
            Placement::AtEpoch { backend, .. } => backend.server.cut_off().await,
            _ => std::future::pending().await,
        }
    }

    /// Leaves that server at once.
    pub(super) fn leave(&mut self) {
        if let Placement::AtEpoch { backend, .. } = &self.placement {
            self.placement = Placement::CutOff { server: backend.server.name.clone() };
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
    pub(super) async fn run_in_transaction(
        &mut self,
        request: &Request,
        traits: &BatchTraits,
    ) -> Result<Outcome, SessionEnd> {
        let Some(mut transaction) = self.transaction.take() else { return Ok(Outcome::Failed) };
        let result = self.run_placed(&mut transaction, request, traits).await;
        self.transaction = Some(transaction);
        match result? {
            Ok(()) => Ok(Outcome::Done),
            Err(Reported::ByServer(code)) => {
                self.note_failure();
                self.failed_with = code;
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
        traits: &BatchTraits,
    ) -> Result<Result<(), Reported>, SessionEnd> {
        transaction.note_local_settings(traits.local_settings);
        match &transaction.placement {
            Placement::Lost => return Ok(Err(Reported::Here(aborted()))),
            Placement::CutOff { server } => {
                let error = cut_off(server);
                transaction.placement = Placement::Lost;
                return Ok(Err(Reported::Here(error)));
            }
            _ => {}
        }
        let must_stay = self.is_pinned() || self.has_kept_statements();
        let reads_an_epoch = transaction.characteristics.read_only && traits.reads_only && !must_stay;
        if !transaction.has_started() && reads_an_epoch {
            match self.open_epoch_transaction(transaction, request, traits).await? {
                Some(result) => return Ok(result),
                None => tracing::debug!(session = self.number, "a read-only transaction runs on the leader"),
            }
        }
        if !transaction.has_started()
            && let Err(error) = self.place_on_leader(transaction).await
        {
            return Ok(Err(Reported::Here(error)));
        }
        if transaction.reads_an_epoch()
            && let Err(reported) = self.leave_epoch_for(transaction, traits).await?
        {
            return Ok(Err(reported));
        }
        match &mut transaction.placement {
            Placement::AtEpoch { .. } => self.run_at_transaction_epoch(transaction, request, traits).await,
            _ => self.run_in_leader_transaction(transaction, request, traits).await,
        }
    }

    /// Places the transaction on the leader; BEGIN goes with its first statement.
    pub(super) async fn place_on_leader(&mut self, transaction: &mut Transaction) -> Result<(), SqlError> {
        let backend = self.take_leader().await.map_err(|error| error.to_sql())?;
        self.served_by = Some(ServedBy::Leader(backend.server.clone()));
        let characteristics = transaction.characteristics;
        let mode = if characteristics.read_only { " READ ONLY" } else { " READ WRITE" };
        let wait = if characteristics.deferrable { " DEFERRABLE" } else { "" };
        transaction.placement = Placement::OnLeader(Box::new(LeaderTransaction {
            serializable: self.router.serializable.begin(&backend.server),
            backend,
            begin: Some(format!("BEGIN ISOLATION LEVEL SERIALIZABLE{mode}{wait}")),
            snapshot: self.database.epochs.before_snapshot(&self.database.commit_barrier),
            settings_there: self.settings.clone(),
            begun_read_only: characteristics.read_only,
            wrote: false,
            opaque: false,
            has_ddl: false,
            dooms: false,
            ddl: None,
        }));
        Ok(())
    }

    async fn run_in_leader_transaction(
        &mut self,
        transaction: &mut Transaction,
        request: &Request,
        traits: &BatchTraits,
    ) -> Result<Result<(), Reported>, SessionEnd> {
        let savepoints = transaction.savepoints;
        transaction.behind_ddl |= traits.defines;
        let Placement::OnLeader(leader) = &mut transaction.placement else { return Ok(Err(Reported::Here(aborted()))) };
        if leader.serializable.may_be_forgotten() {
            return Ok(Err(Reported::Here(too_many_transactions())));
        }
        // A user's function may write although it is declared STABLE; PostgreSQL does not look further than one call.
        let may_write = traits.writes || traits.own_transaction || (traits.statements > 0 && !traits.reads_only);
        leader.wrote |= may_write && !transaction.characteristics.read_only;
        leader.opaque |= traits.opaque || traits.own_transaction;
        let _releasing = self.releasing_around(traits);
        leader.opaque |= traits.ddl.as_ref().is_some_and(|ddl| ddl.told_by_locks);
        if let Some(ddl) = traits.ddl.as_ref().filter(|ddl| !ddl.harmless) {
            leader.has_ddl = true;
            leader.dooms |= !ddl.told_by_locks;
            if leader.ddl.is_none() {
                leader.ddl = Some(DdlInProgress::begin(&self.database).await);
                self.release_readers().await;
            }
        }
        if leader.begin.is_some()
            && let Err(unfit) = self.give_settings(&mut leader.backend).await?
        {
            return self.leave_unfit_leader(transaction, unfit);
        }
        let mut begin = leader.begin.take();
        if let Some(begin) = begin.take_if(|_| traits.waits_for_client)
            && let Err(unfit) = self.prepare(&mut leader.backend, &begin).await?
        {
            return self.leave_unfit_leader(transaction, unfit);
        }
        let mut expected = VecDeque::new();
        request.encode_behind(begin.as_slice(), &mut leader.backend, &mut expected);
        let Ended { result, went_out, start, final_error, .. } =
            self.relay(&mut leader.backend, expected, Hold::Briefly).await;
        self.statement_ended();
        let relayed = match result {
            Ok(relayed) => relayed,
            Err(RelayError::Client(error)) => return Err(error.into()),
            Err(error) => {
                return self.lost_in_transaction(transaction, &error, final_error, (start, went_out));
            }
        };
        if let Some(fields) = relayed.own_error {
            self.take_back(start, went_out);
            return Ok(Err(Reported::Here(SqlError::from(fields))));
        }
        self.after_leader_statement(traits, relayed.error.is_none());
        if let Some(fields) = relayed.error {
            if self.leaves_unasked(savepoints, traits, leader.snapshot.change_counter) {
                self.take_back(start, went_out);
                return Ok(Err(Reported::Here(closed_by_ddl())));
            }
            return Ok(Err(Reported::ByServer(fields.code)));
        }
        match self.is_overtaken(leader, traits).await? {
            Ok(false) => Ok(Ok(())),
            Ok(true) => {
                self.take_back(start, went_out);
                Ok(Err(Reported::Here(closed_by_ddl())))
            }
            Err(error) => self.lost_in_transaction(transaction, &error, None, (start, went_out)),
        }
    }

    /// The transaction was not begun on the leader, and has failed.
    pub(super) fn leave_unfit_leader(
        &mut self,
        transaction: &mut Transaction,
        unfit: Unfit,
    ) -> Result<Result<(), Reported>, SessionEnd> {
        let placement = std::mem::replace(&mut transaction.placement, Placement::Lost);
        match placement {
            Placement::OnLeader(leader) if unfit.is_whole => {
                self.return_leader(leader.backend);
                transaction.placement = Placement::Nowhere;
            }
            _ if self.pinned.is_some() => {
                return Err(SessionEnd::Fatal(SqlError { severity: "FATAL", ..unfit.error }));
            }
            _ => {}
        }
        Ok(Err(Reported::Here(unfit.error)))
    }

    /// The leader was lost under a transaction that has not committed; its answer is taken back as by
    /// [`Session::take_back`].
    pub(super) fn lost_in_transaction(
        &mut self,
        transaction: &mut Transaction,
        error: &RelayError,
        final_error: Option<ErrorFields>,
        (start, went_out): (usize, bool),
    ) -> Result<Result<(), Reported>, SessionEnd> {
        transaction.placement = Placement::Lost;
        self.commits_seen = self.commits_seen.max(self.database.commit_barrier.commits_begun());
        self.take_back(start, went_out);
        let lost = self.server_lost(&self.database.servers.leader().name, error, final_error);
        if self.pinned.is_some() {
            return Err(SessionEnd::Fatal(SqlError { severity: "FATAL", ..lost }));
        }
        Ok(Err(Reported::Here(lost)))
    }

    /// Idle readers hold locks in their epoch's transaction; DDL must not wait for them.
    pub(super) async fn release_readers(&self) {
        for pool in self.database.readers.all().iter() {
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
pub(super) enum Reported {
    /// With this SQLSTATE.
    ByServer(String),
    Here(SqlError),
}
