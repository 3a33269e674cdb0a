//! COMMIT and ROLLBACK: inside the commit barrier, through the tripwire when an epoch has overtaken the transaction.

use bytes::Bytes;

use super::ddl::NotSent;
use super::ddl_in_progress::{Change, DdlInProgress};
use super::outcome::Outcome;
use super::relay::{RelayError, Relayed};
use super::transaction::{LeaderTransaction, Placement, aborted, cut_off, too_many_transactions};
use super::{Session, SessionEnd};
use crate::backend::Backend;
use crate::sql::PinReason;
use crate::wire::{ErrorFields, Reply, SqlError, sqlstate};

/// Whether the transaction has a number, as everything that writes has.
const HAS_WRITTEN: &str = "SELECT pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL";

const OVERTAKEN: &str =
    "could not serialize access: an epoch has overtaken this transaction, and it is READ ONLY by now";

impl Session {
    /// COMMIT. `answers`: the client gets a `CommandComplete`. Fails only when an error was reported.
    pub(super) async fn commit(&mut self, answers: bool) -> Result<Outcome, SessionEnd> {
        let Some(mut transaction) = self.transaction.take() else { return Ok(Outcome::Done) };
        if transaction.failed {
            self.transaction = Some(transaction);
            // No error: the client is told ROLLBACK.
            self.roll_back(answers).await?;
            return Ok(Outcome::Done);
        }
        match std::mem::replace(&mut transaction.placement, Placement::Lost) {
            Placement::Nowhere => {}
            Placement::AtEpoch { mut backend, .. } => {
                if transaction.hides_settings()
                    && let Err(error) = self.read_settings_back(&mut backend, &transaction).await?
                {
                    self.settings = transaction.settings_before;
                    self.characteristics = transaction.characteristics_before;
                    self.fail(error);
                    return Ok(Outcome::Failed);
                }
                backend.stale_plans |= transaction.stale_plans;
                self.give_back_reader(*backend);
            }
            Placement::OnLeader(leader) => {
                let committed = self.commit_on_leader(*leader).await?;
                // What a session holds outside of transactions has gone with its back end, whatever became of COMMIT.
                self.has_state_there |= self.pinned.is_some() && self.own_backend.is_none();
                match committed {
                    // A session whose settings savepoints may have taken back keeps its back end, which knows them.
                    Committed::Yes if transaction.hides_settings() || self.settings != transaction.settings_before => {
                        if let Some(mut backend) = self.own_backend.take() {
                            match self.read_settings_back(&mut backend, &transaction).await {
                                Ok(Ok(())) => self.own_backend = Some(backend),
                                Err(end) if self.ended_by.is_none() => return Err(end),
                                // Its client is told of the commit first, and with its next statement that its state
                                // is lost.
                                _ => self.pin(PinReason::HiddenSetting),
                            }
                        }
                    }
                    Committed::Yes => {}
                    Committed::RolledBack => {
                        self.settings = transaction.settings_before;
                        self.characteristics = transaction.characteristics_before;
                        if !answers {
                            self.fail(aborted());
                            return Ok(Outcome::Failed);
                        }
                        self.client.output.command_complete("ROLLBACK");
                        return Ok(Outcome::Done);
                    }
                    Committed::Error(error) => {
                        self.settings = transaction.settings_before;
                        self.characteristics = transaction.characteristics_before;
                        self.fail(error);
                        return Ok(Outcome::Failed);
                    }
                }
            }
            // All that it has read was right, and it has nothing to commit; only what savepoints have done to its
            // settings is not known any more.
            Placement::CutOff { .. } if transaction.savepoints == 0 || self.settings == transaction.settings_before => {
            }
            Placement::CutOff { server } => {
                self.settings = transaction.settings_before;
                self.characteristics = transaction.characteristics_before;
                self.fail(cut_off(&server));
                return Ok(Outcome::Failed);
            }
            Placement::Lost => {
                self.settings = transaction.settings_before;
                self.characteristics = transaction.characteristics_before;
                self.fail(aborted());
                return Ok(Outcome::Failed);
            }
        }
        if let Some(isolation) = transaction.isolation_behind {
            self.characteristics.isolation = isolation;
        }
        if answers {
            self.client.output.command_complete("COMMIT");
        }
        Ok(Outcome::Done)
    }

    async fn commit_on_leader(&mut self, mut leader: LeaderTransaction) -> Result<Committed, SessionEnd> {
        if !leader.begun_read_only && leader.serializable.may_be_forgotten() {
            drop(leader);
            return Ok(Committed::Error(too_many_transactions()));
        }
        let change = match self.change_of(&mut leader).await? {
            Ok(change) => change,
            Err(NotSent::Refused(refusal)) => return self.refused(leader.backend, refusal).await,
            Err(NotSent::Lost(error)) => {
                return Ok(Committed::Error(self.server_lost(&leader.backend.server.name, &error, None)));
            }
        };
        let database = self.database.clone();
        let mut commit = if leader.wrote || change != Change::Nothing {
            database.commit_barrier.enter(self.number, leader.backend.process(), None).await
        } else {
            // What looks like reads may hide writes (functions, operators, casts of users), and what was begun READ
            // ONLY may be READ WRITE by now, or have been: the server knows.
            let uncounted = database.commit_barrier.enter_uncounted(self.number, leader.backend.process()).await;
            let relayed = match self.own_statement(&mut leader.backend, HAS_WRITTEN, false).await? {
                Ok(relayed) => relayed,
                Err(error) => {
                    uncounted.leave();
                    return self.committed(leader, Err(error), false).await;
                }
            };
            if let Some(fields) = relayed.own_error {
                uncounted.leave();
                return self.refused(leader.backend, SqlError::from(fields)).await;
            }
            let commit = if has_written(&relayed.own_rows) {
                uncounted.into_commit()
            } else {
                let relayed = self.own_statement(&mut leader.backend, "COMMIT", true).await?;
                uncounted.leave();
                self.commits_seen = self.commits_seen.max(database.commit_barrier.commits_begun());
                return self.committed(leader, relayed, false).await;
            };
            commit.expect("it is inside until it leaves")
        };
        // Whatever becomes of it, the session's next read shows it.
        self.commits_seen = commit.begun();
        if let Some(ddl) = DdlInProgress::of_commit(leader.ddl.take(), change, &database) {
            commit.keep(Box::new(ddl));
        }
        if leader.begun_read_only && leader.serializable.may_be_forgotten() {
            commit.resolve();
            drop(leader);
            return Ok(Committed::Error(too_many_transactions()));
        }
        let tripwire = database.epochs.needs_tripwire(leader.snapshot.commits) && !database.unsafe_without_tripwire;
        let sql = if tripwire { "INSERT INTO onecopy_router.tripwire VALUES (0); COMMIT" } else { "COMMIT" };
        let mut relayed = self.own_statement(&mut leader.backend, sql, true).await?;
        if let Ok(relayed) = &mut relayed {
            self.commits_seen = commit.resolve();
            if tripwire {
                let is_overtaken = relayed.own_error.as_mut().is_some_and(is_overtaken);
                database.epochs.statistics.note_tripwire(is_overtaken);
            }
        } else {
            self.in_doubt = Some(leader.backend.process());
        }
        self.committed(leader, relayed, true).await
    }

    /// The transaction cannot commit.
    async fn refused(&mut self, mut backend: Backend, refusal: SqlError) -> Result<Committed, SessionEnd> {
        if self.own_statement(&mut backend, "ROLLBACK", false).await?.is_ok() {
            self.return_leader(backend);
        }
        Ok(Committed::Error(refusal))
    }

    /// What came of a COMMIT.
    async fn committed(
        &mut self,
        mut leader: LeaderTransaction,
        relayed: Result<Relayed, RelayError>,
        wrote: bool,
    ) -> Result<Committed, SessionEnd> {
        let relayed = match relayed {
            Ok(relayed) => relayed,
            Err(error) if wrote => return Ok(Committed::Error(self.commit_unknown(&leader.backend, &error))),
            Err(error) => return Ok(Committed::Error(self.server_lost(&leader.backend.server.name, &error, None))),
        };
        // When the tripwire fails, COMMIT is skipped and the transaction is still there.
        let rolled_back =
            relayed.status == b'I' || self.own_statement(&mut leader.backend, "ROLLBACK", false).await?.is_ok();
        if rolled_back {
            if relayed.own_error.is_none() && !relayed.own_tag.starts_with(b"ROLLBACK") {
                leader.backend.settings = leader.settings_there;
            }
            self.return_leader(leader.backend);
        }
        Ok(came_of(relayed))
    }

    fn commit_unknown(&self, backend: &Backend, error: &RelayError) -> SqlError {
        SqlError::error(
            sqlstate::TRANSACTION_RESOLUTION_UNKNOWN,
            format!("lost {} while it committed: {error}; whether it did is unknown", backend.server.name),
        )
        .hint("Look whether the transaction's effect is there before you run it again.")
    }

    /// ROLLBACK. `answers`: the client gets a `CommandComplete`.
    pub(super) async fn roll_back(&mut self, answers: bool) -> Result<(), SessionEnd> {
        let Some(transaction) = self.transaction.take() else { return Ok(()) };
        self.settings = transaction.settings_before;
        self.characteristics = transaction.characteristics_before;
        match transaction.placement {
            Placement::Nowhere | Placement::CutOff { .. } | Placement::Lost => {}
            Placement::AtEpoch { mut backend, .. } => {
                backend.stale_plans |= transaction.stale_plans;
                self.give_back_reader(*backend);
            }
            // Its BEGIN was refused.
            Placement::OnLeader(leader) if !leader.backend.in_transaction => self.return_leader(leader.backend),
            Placement::OnLeader(mut leader) => {
                self.commits_seen = self.commits_seen.max(self.database.commit_barrier.commits_begun());
                let settings = self.settings.clone();
                match self.own_statement(&mut leader.backend, "ROLLBACK", true).await? {
                    Ok(relayed) if relayed.own_error.is_none() => {
                        leader.backend.settings = settings;
                        self.return_leader(leader.backend);
                    }
                    _ if self.pinned.is_some() => return Err(self.lost_own_backend()),
                    _ => {}
                }
            }
        }
        if answers {
            self.client.output.command_complete("ROLLBACK");
        }
        Ok(())
    }

    pub(super) fn give_back_reader(&mut self, mut backend: Backend) {
        if std::mem::take(&mut self.may_be_cancelled_late) {
            return;
        }
        // What SET has changed there is gone with the rollback before its next use; its record is that of before.
        backend.epoch = None;
        self.database.readers.give_back(backend);
    }
}

#[derive(Debug)]
enum Committed {
    Yes,
    RolledBack,
    Error(SqlError),
}

/// Whether a transaction must commit as one that has written, by the answer to [`HAS_WRITTEN`]: as long as the server
/// does not deny it, it has.
fn has_written(rows: &[Bytes]) -> bool {
    rows.last().is_none_or(|row| !row.ends_with(b"f"))
}

/// Whether a COMMIT through the tripwire failed because an epoch has overtaken it. One that has written before it was
/// made READ ONLY can touch the tripwire no more: for its client that is the same.
fn is_overtaken(error: &mut ErrorFields) -> bool {
    if error.code == sqlstate::READ_ONLY_SQL_TRANSACTION {
        sqlstate::SERIALIZATION_FAILURE.clone_into(&mut error.code);
        OVERTAKEN.clone_into(&mut error.message);
    }
    error.code == sqlstate::SERIALIZATION_FAILURE
}

/// What came of a COMMIT that was answered.
fn came_of(relayed: Relayed) -> Committed {
    match relayed.own_error {
        Some(fields) => {
            let error = SqlError::from(fields);
            let may_succeed = error.code.starts_with(sqlstate::TRANSACTION_ROLLBACK_CLASS) && !error.has_hint();
            Committed::Error(if may_succeed { error.hint("The transaction might succeed if retried.") } else { error })
        }
        None if relayed.own_tag.starts_with(b"ROLLBACK") => Committed::RolledBack,
        None => Committed::Yes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: &str) -> ErrorFields {
        ErrorFields { code: code.into(), message: "m".into(), ..ErrorFields::default() }
    }

    /// Only a transaction of which the server says that it has no number commits as one that has written nothing: any
    /// other answer, and none, takes it through the commit barrier as a commit.
    #[test]
    fn what_is_not_known_to_have_written_nothing_has_written() {
        let row = |value: &'static [u8]| Bytes::from_static(value);
        let (yes, no, null) = (row(b"\0\x01\0\0\0\x01t"), row(b"\0\x01\0\0\0\x01f"), row(b"\0\x01\xff\xff\xff\xff"));
        for (rows, written) in [
            (vec![], true),
            (vec![yes.clone()], true),
            (vec![null], true),
            (vec![row(b"")], true),
            (vec![no.clone()], false),
            (vec![no, yes], true),
        ] {
            assert_eq!(has_written(&rows), written, "{rows:?}");
        }
    }

    /// Whoever an epoch has overtaken gets 40001, also when a transaction that is READ ONLY by now is kept off the
    /// tripwire.
    #[test]
    fn who_was_overtaken_gets_40001_and_other_errors_stay_what_they_are() {
        for code in ["40001", "25006"] {
            let mut fields = error(code);
            assert!(is_overtaken(&mut fields), "{code}");
            assert_eq!(fields.code, "40001");
            assert_eq!(fields.message == OVERTAKEN, code == "25006");
        }
        for code in ["23505", "40P01", "42P01", "57014"] {
            let mut fields = error(code);
            assert!(!is_overtaken(&mut fields), "{code}");
            assert_eq!((&*fields.code, &*fields.message), (code, "m"));
        }
    }

    /// A COMMIT is acknowledged only when the server has said COMMIT: PostgreSQL answers that of a failed transaction
    /// with ROLLBACK, without an error.
    #[test]
    fn only_a_commit_that_was_answered_by_commit_has_committed() {
        let answered = |tag: &'static [u8], own_error| {
            came_of(Relayed { own_tag: Bytes::from_static(tag), own_error, ..Relayed::default() })
        };
        assert!(matches!(answered(b"COMMIT\0", None), Committed::Yes));
        assert!(matches!(answered(b"ROLLBACK\0", None), Committed::RolledBack));
        for tag in [&b"COMMIT\0"[..], b"ROLLBACK\0", b"INSERT 0 1\0", b""] {
            let came_of = answered(tag, Some(error("40001")));
            assert!(matches!(&came_of, Committed::Error(error) if error.code == "40001"), "{came_of:?}");
        }
    }
}
