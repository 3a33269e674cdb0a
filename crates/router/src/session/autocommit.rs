//! Units on the leader outside a transaction: updates whole inside the commit barrier, reads READ ONLY.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::batch_traits::BatchTraits;
use super::concurrent_index::ConcurrentIndex;
use super::ddl::OVERTAKEN_ON_LEADER;
use super::ddl_in_progress::{DdlInProgress, closed_by_ddl};
use super::outcome::{LEADER_TRIES_MAX, Outcome, RETRY_PAUSE, Unfit};
use super::relay::{Ended, Hold, RelayError};
use super::request::{Request, put_own};
use super::served_by::ServedBy;
use super::{Session, SessionEnd};
use crate::backend::{Backend, BackendError};
use crate::database::{Database, VacatedDatabase};
use crate::epoch::{CommitGuard, HeldUntilResolved, WatchGuard};
use crate::sql::PinReason;
use crate::wire::{ErrorFields, SqlError, sqlstate};

/// What must hold on the leader whatever code of users has set.
const KEPT_SETTINGS: &str = "SET default_transaction_isolation = serializable; SET standard_conforming_strings = on";

/// How often snapshots are released for a command that waits for them.
const RELEASE_INTERVAL: Duration = Duration::from_millis(200);

/// Half the first pause before a read on the leader is tried again that DDL has overtaken; doubled each time.
const DOOM_PAUSE: Duration = Duration::from_millis(5);

/// While it lives, snapshots and idle readers' locks are released again and again.
pub(super) struct Releasing(tokio::task::JoinHandle<()>);

impl Releasing {
    fn start(database: Arc<Database>) -> Releasing {
        Releasing(tokio::spawn(async move {
            loop {
                database.epochs.ask_for_release();
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

/// What guards a statement that commits by itself while it runs.
enum CommitScope<'a> {
    /// In the commit barrier.
    InBarrier(CommitGuard<'a>),
    /// It would hold the commit barrier for long: what it does is in force until it has ended.
    Watched(WatchGuard<'a>),
    /// Others need not know of it.
    Outside,
}

impl Session {
    /// Runs a read on the leader, in a SERIALIZABLE transaction that is sent with it at once. It is READ ONLY there as
    /// well: what writes after all must commit in the commit barrier.
    pub(super) async fn read_on_leader(
        &mut self,
        request: &Request,
        traits: &BatchTraits,
    ) -> Result<Outcome, SessionEnd> {
        let mut pause = RETRY_PAUSE;
        for attempt in 1.. {
            let asked_at = Instant::now();
            let mut backend = match self.take_leader().await {
                Ok(backend) => backend,
                Err(error) => {
                    self.fail(error.to_sql());
                    return Ok(Outcome::Failed);
                }
            };
            let leader = backend.server.clone();
            self.served_by = Some(ServedBy::Leader(leader.clone()));
            let _transaction = self.router.serializable.begin(&leader);
            if let Err(unfit) = self.give_settings(&mut backend).await? {
                return Ok(self.leader_is_unfit(backend, unfit));
            }
            let mut expected = VecDeque::new();
            let change_counter = self.database.epochs.change_counter();
            // What acts beside the data is not run again because of DDL that may be about something else.
            let looks = attempt > 1 || !traits.reads_only || !self.database.epochs.snapshot_stands(change_counter);
            let begin = "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY".to_owned();
            request.encode_behind(&[begin], &mut backend, &mut expected);
            if looks {
                put_own(&mut backend, OVERTAKEN_ON_LEADER, false, &mut expected);
            }
            put_own(&mut backend, "COMMIT", false, &mut expected);
            let Ended { result, went_out, start, final_error, .. } =
                self.relay(&mut backend, expected, Hold::Tentatively).await;
            self.statement_ended();
            let relayed = match result {
                Ok(relayed) => relayed,
                Err(RelayError::Client(error)) => return Err(error.into()),
                Err(error) => {
                    self.take_back(start, went_out);
                    return self.leader_lost(traits, &error, final_error);
                }
            };
            self.commits_seen = self.commits_seen.max(self.database.commit_barrier.commits_begun());
            // Where the client's statement has failed, the look behind it has as well.
            let is_clean = |error: &ErrorFields| error.code == sqlstate::IN_FAILED_SQL_TRANSACTION;
            if relayed.own_error.as_ref().is_none_or(is_clean) || self.is_pinned() {
                self.return_leader(backend);
            }
            let is_overtaken = if looks {
                !relayed.own_rows.is_empty()
            } else {
                !self.database.epochs.snapshot_stands(change_counter)
            };
            let reported = relayed.error.is_some();
            let failed = relayed.error.or(relayed.own_error);
            match failed.as_ref().map(|fields| fields.code.as_str()) {
                None if is_overtaken => {
                    self.take_back(start, went_out);
                    if went_out || !traits.reads_only || attempt == LEADER_TRIES_MAX {
                        self.fail(closed_by_ddl());
                        return Ok(Outcome::Failed);
                    }
                    tokio::time::sleep(DOOM_PAUSE * 2_u32.pow(attempt)).await;
                }
                None => {
                    self.database.epochs.wait_times.note_leader_read(asked_at.elapsed());
                    leader.reads.fetch_add(1, Relaxed);
                    return Ok(Outcome::Done);
                }
                Some(sqlstate::READ_ONLY_SQL_TRANSACTION) if !went_out => {
                    self.take_back(start, false);
                    self.router.counters.read_retries.fetch_add(1, Relaxed);
                    let traits = BatchTraits { reads_only: false, writes: true, opaque: true, ..traits.clone() };
                    return self.run_wrapped(request, &traits).await;
                }
                Some(sqlstate::SERIALIZATION_FAILURE)
                    if !went_out && traits.reads_only && attempt < LEADER_TRIES_MAX =>
                {
                    self.take_back(start, false);
                    self.router.counters.read_retries.fetch_add(1, Relaxed);
                    // It would be refused again until the transaction has ended that stands in its way.
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
                Some(_) if reported => {
                    self.note_failure();
                    return Ok(Outcome::Failed);
                }
                Some(_) => {
                    self.take_back(start, went_out);
                    self.fail(failed.map(SqlError::from).unwrap_or_else(closed_by_ddl));
                    return Ok(Outcome::Failed);
                }
            }
        }
        unreachable!("the last try gives an outcome")
    }

    /// Runs one unit on the leader, SERIALIZABLE, in a transaction of the server's own.
    pub(super) async fn run_on_leader(
        &mut self,
        request: &Request,
        traits: &BatchTraits,
    ) -> Result<Outcome, SessionEnd> {
        let _releasing = self.releasing_around(traits);
        let _vacated = self.leave_database(traits).await;
        let mut pause = RETRY_PAUSE;
        for attempt in 1.. {
            // What leaves state has an effect although it fails: an advisory lock would be taken twice.
            let may_retry = attempt < LEADER_TRIES_MAX && !traits.commits_itself && traits.pins.is_none();
            match self.try_on_leader(request, traits, may_retry).await? {
                Some(outcome) => {
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

    /// For commands that wait for old snapshots or for readers' locks, but leave old epochs right. What is about
    /// another database waits for none of this one.
    pub(super) fn releasing_around(&self, traits: &BatchTraits) -> Option<Releasing> {
        let harmless = traits.ddl.as_ref().is_some_and(|ddl| ddl.harmless && ddl.database.is_none());
        harmless.then(|| Releasing::start(self.database.clone()))
    }

    /// For what needs a database that nobody is in: the router's own connections to it are closed.
    async fn leave_database(&self, traits: &BatchTraits) -> Option<VacatedDatabase> {
        let database = traits.ddl.as_ref()?.database.as_deref()?;
        if *database == *self.database.name {
            return self.database.vacate(&self.router.serializable);
        }
        self.router.close_database(database).await;
        None
    }

    /// What must stand until the statement has ended: for DDL that runs alone, and for CALL and DO, which may hide it
    /// and commit it at any time.
    async fn kept_around(&self, traits: &BatchTraits) -> Result<Option<HeldUntilResolved>, BackendError> {
        let ddl = traits.ddl.as_ref();
        let dooms = traits.commits_itself || ddl.is_some_and(|ddl| !ddl.harmless);
        let dooming = if dooms { Some(DdlInProgress::dooming(&self.database).await) } else { None };
        let index = match ddl.is_some_and(|ddl| ddl.indexes_concurrently) {
            true => Some(ConcurrentIndex::begin(&self.database).await?),
            false => None,
        };
        Ok((dooming.is_some() || index.is_some()).then(|| Box::new((dooming, index)) as HeldUntilResolved))
    }

    /// One try; none when it failed so that it may be tried again.
    async fn try_on_leader(
        &mut self,
        request: &Request,
        traits: &BatchTraits,
        may_retry: bool,
    ) -> Result<Option<Outcome>, SessionEnd> {
        let mut backend = match self.take_leader().await {
            Ok(backend) => backend,
            Err(error) => {
                self.fail(error.to_sql());
                return Ok(Some(Outcome::Failed));
            }
        };
        let mut fit = self.give_settings(&mut backend).await?;
        if fit.is_ok() && self.is_pinned() {
            // A function may have changed these on this back end.
            fit = self.prepare(&mut backend, KEPT_SETTINGS).await?;
        }
        if fit.is_ok() {
            fit = self.compare_results(&mut backend, request).await;
        }
        if let Err(unfit) = fit {
            return Ok(Some(self.leader_is_unfit(backend, unfit)));
        }
        let leader = backend.server.clone();
        self.served_by = Some(ServedBy::Leader(leader.clone()));
        let _update = self.router.serializable.begin(&leader);
        let database = self.database.clone();
        let kept = match self.kept_around(traits).await {
            Ok(kept) => kept,
            Err(error) => {
                self.return_leader(backend);
                self.fail(error.to_sql());
                return Ok(Some(Outcome::Failed));
            }
        };
        let alone = traits.ddl.as_ref().is_some_and(|ddl| ddl.alone);
        // It stays under way until it is known to have ended, whoever is lost meanwhile.
        let scope = if traits.writes && !alone {
            let mut commit = database.commit_barrier.enter(self.number, backend.process(), traits.fingerprint).await;
            // Whatever becomes of it, the session's next read shows it.
            self.commits_seen = commit.begun();
            if traits.must_be_wrapped(false, database.epochs.has_ddl_barrier()) {
                // DDL has begun while a gate was waited for.
                commit.resolve();
                self.return_leader(backend);
                return self.run_wrapped(request, traits).await.map(Some);
            }
            if let Some(kept) = kept {
                commit.keep(kept);
            }
            CommitScope::InBarrier(commit)
        } else if let Some(kept) = kept {
            CommitScope::Watched(database.commit_barrier.watch(backend.process(), kept))
        } else {
            CommitScope::Outside
        };
        let mut expected = VecDeque::new();
        request.encode(&mut backend, &mut expected);
        let start = self.client.output.len();
        let hold = if matches!(scope, CommitScope::InBarrier(_)) { Hold::InCommitBarrier } else { Hold::Briefly };
        let Ended { result, went_out, final_error, .. } = self.relay(&mut backend, expected, hold).await;
        self.statement_ended();
        let relayed = match result {
            Ok(relayed) => relayed,
            Err(RelayError::Client(error)) => return Err(error.into()),
            Err(error) => {
                if traits.writes {
                    self.in_doubt = Some(backend.process());
                }
                drop(scope);
                self.take_back(start, went_out);
                return self.leader_lost(traits, &error, final_error).map(Some);
            }
        };
        self.commits_seen = self.commits_seen.max(database.commit_barrier.commits_begun());
        match scope {
            CommitScope::InBarrier(commit) => self.commits_seen = commit.resolve(),
            CommitScope::Watched(watch) => watch.end(),
            CommitScope::Outside => {}
        }
        self.after_leader_statement(traits, relayed.error.is_none());
        self.return_leader(backend);
        let code = relayed.error.as_ref().map(|error| error.code.as_str());
        match code {
            None => Ok(Some(Outcome::Done)),
            Some(sqlstate::SERIALIZATION_FAILURE) if may_retry && !went_out => {
                self.take_back(start, false);
                Ok(None)
            }
            Some(_) => {
                self.note_failure();
                Ok(Some(Outcome::Failed))
            }
        }
    }

    /// Nothing of the client's has run on the leader; its back end is kept if it is as it was.
    fn leader_is_unfit(&mut self, backend: Backend, unfit: Unfit) -> Outcome {
        if unfit.is_whole {
            self.return_leader(backend);
        }
        self.fail(unfit.error);
        Outcome::Failed
    }

    /// Notes what a statement has left behind on the session's back end.
    pub(super) fn after_leader_statement(&mut self, traits: &BatchTraits, succeeded: bool) {
        let Some(reason) = traits.pins else { return };
        // A rollback takes neither of these back, and one of several statements may have left them.
        let outlives = matches!(reason, PinReason::AdvisoryLock | PinReason::PreparedStatement | PinReason::Handle);
        if succeeded || outlives && traits.statements > 1 {
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
        traits: &BatchTraits,
        error: &RelayError,
        final_error: Option<ErrorFields>,
    ) -> Result<Outcome, SessionEnd> {
        let name = &self.database.servers.leader().name;
        let sql_error = if traits.writes {
            SqlError::error(
                sqlstate::TRANSACTION_RESOLUTION_UNKNOWN,
                format!("lost {name} while it ran the statement: {error}; whether it committed is unknown"),
            )
            .hint("Look whether its effect is there before you run it again.")
        } else {
            self.server_lost(name, error, final_error)
        };
        if self.pinned.is_some() {
            return Err(SessionEnd::Fatal(SqlError { severity: "FATAL", ..sql_error }));
        }
        self.fail(sql_error);
        Ok(Outcome::Failed)
    }
}
