//! Statements that the router carries out itself: the bounds of transactions, and what resets a session.

use std::time::Duration;

use super::outcome::Outcome;
use super::relay::{RelayError, first_value};
use super::transaction::Transaction;
use super::{Characteristics, Session, SessionEnd};
use crate::settings::is_on;
use crate::sql::{Action, DiscardTarget, Isolation, PinReason, TransactionModes};
use crate::wire::{Reply, SqlError, sqlstate};

/// How long DISCARD ALL waits for the session's own back end before that is closed all the same.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);

/// Refused by a server whose transaction has a snapshot.
const TO_ANOTHER_LEVEL_AND_BACK: &str =
    "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SET TRANSACTION ISOLATION LEVEL SERIALIZABLE";

const NO_TRANSACTION: &str = "there is no transaction in progress";
const NO_PREPARED_TRANSACTIONS: &str =
    "prepared transactions are not supported: one that outlives its session could commit across epochs";

impl Characteristics {
    fn with(mut self, modes: TransactionModes) -> Characteristics {
        self.isolation = modes.isolation.or(self.isolation);
        self.read_only = modes.read_only.unwrap_or(self.read_only);
        self.deferrable = modes.deferrable.unwrap_or(self.deferrable);
        self
    }
}

/// Whether the router carries the statement out itself.
pub(super) fn is_routers_own(action: &Action) -> bool {
    match action {
        Action::Begin(_)
        | Action::Commit { .. }
        | Action::Rollback { .. }
        | Action::PrepareTransaction
        | Action::EndPrepared
        | Action::SetTransaction(_)
        | Action::SetTransactionSnapshot
        | Action::SetCharacteristics(_)
        | Action::Set { .. }
        | Action::Reset { .. }
        | Action::ResetAll
        | Action::Discard(_)
        | Action::Deallocate(_) => true,
        Action::Show(name) => Session::shows(name),
        _ => false,
    }
}

impl Session {
    /// Carries out one of the router's own statements, up to its `CommandComplete`. `describes`: a result is preceded
    /// by its description (simple protocol).
    pub(super) async fn run_action(
        &mut self,
        action: &Action,
        text: &str,
        describes: bool,
    ) -> Result<Outcome, SessionEnd> {
        let failed = self.transaction.as_ref().is_some_and(|transaction| transaction.failed);
        let ends = matches!(action, Action::Commit { .. } | Action::Rollback { .. } | Action::PrepareTransaction);
        if failed && !ends {
            self.fail(SqlError::error(
                sqlstate::IN_FAILED_SQL_TRANSACTION,
                "current transaction is aborted, commands ignored until end of transaction block",
            ));
            return Ok(Outcome::Failed);
        }
        match action {
            Action::Begin(modes) => self.begin(*modes).await,
            Action::Commit { chain } => self.end(*chain, true).await,
            Action::Rollback { chain } => self.end(*chain, false).await,
            // As on a server whose transaction is none, or has failed: a ROLLBACK.
            Action::PrepareTransaction if self.transaction.is_none() || failed => self.end(false, false).await,
            // As COMMIT, but for its words.
            Action::PrepareTransaction if self.is_pipeline() => {
                self.client.output.warning(sqlstate::NO_ACTIVE_SQL_TRANSACTION, NO_TRANSACTION);
                let outcome = self.commit(false).await?;
                self.portals.clear();
                if outcome == Outcome::Done {
                    self.client.output.command_complete("ROLLBACK");
                }
                Ok(outcome)
            }
            Action::PrepareTransaction => {
                // On a server that prepares none it is over as well.
                self.roll_back(false).await?;
                self.portals.clear();
                Ok(self.refuse(NO_PREPARED_TRANSACTIONS))
            }
            Action::EndPrepared => Ok(self.refuse(NO_PREPARED_TRANSACTIONS)),
            Action::SetTransactionSnapshot => {
                Ok(self.refuse("SET TRANSACTION SNAPSHOT is not supported: the router chooses the epoch"))
            }
            Action::SetTransaction(modes) => self.set_transaction(*modes).await,
            Action::SetCharacteristics(modes) => self.set_characteristics(*modes).await,
            Action::Set { name, local, value } => self.set(name, *local, value.as_deref(), text).await,
            Action::Reset { name, form } => self.reset(name, *form, text).await,
            Action::ResetAll => self.reset_all().await,
            Action::Show(name) => {
                self.show(name, describes);
                Ok(Outcome::Done)
            }
            Action::Discard(target) => self.discard(*target, text).await,
            Action::Deallocate(name) => self.deallocate(name.as_deref(), text).await,
            _ => Ok(Outcome::Done),
        }
    }

    /// Whether the open transaction is that of a batch of the extended protocol.
    fn is_pipeline(&self) -> bool {
        self.in_extended_batch && self.transaction.as_ref().is_some_and(|transaction| transaction.implicit)
    }

    /// Whatever comes before the next Sync is one transaction, which begins here; whether that is so.
    pub(super) fn opens_pipeline(&mut self) -> bool {
        if self.in_extended_batch && self.transaction.is_none() {
            self.transaction = Some(Transaction::implicit(self));
        }
        self.is_pipeline()
    }

    fn refuse(&mut self, message: &str) -> Outcome {
        self.fail(SqlError::error(sqlstate::FEATURE_NOT_SUPPORTED, message));
        Outcome::Failed
    }

    async fn begin(&mut self, modes: TransactionModes) -> Result<Outcome, SessionEnd> {
        match &mut self.transaction {
            Some(transaction) => {
                let was_implicit = std::mem::take(&mut transaction.implicit);
                if !was_implicit {
                    let warning = "there is already a transaction in progress";
                    self.client.output.warning(sqlstate::ACTIVE_SQL_TRANSACTION, warning);
                }
                // Its modes count all the same, as those of SET TRANSACTION.
                let start = self.client.output.len();
                if self.change_modes(modes).await? == Outcome::Failed {
                    if let Some(transaction) = &mut self.transaction {
                        transaction.implicit = was_implicit;
                    }
                    return Ok(Outcome::Failed);
                }
                self.client.output.truncate(start);
            }
            None => self.transaction = Some(Transaction::explicit(self, self.characteristics.with(modes))),
        }
        self.client.output.command_complete("BEGIN");
        Ok(Outcome::Done)
    }

    async fn end(&mut self, chain: bool, commits: bool) -> Result<Outcome, SessionEnd> {
        let tag = if commits { "COMMIT" } else { "ROLLBACK" };
        let Some(transaction) = self.transaction.as_ref().filter(|transaction| !transaction.implicit || !chain) else {
            if chain {
                let text = format!("{tag} AND CHAIN can only be used in transaction blocks");
                self.fail(SqlError::error(sqlstate::NO_ACTIVE_SQL_TRANSACTION, text));
                return Ok(Outcome::Failed);
            }
            self.client.output.warning(sqlstate::NO_ACTIVE_SQL_TRANSACTION, NO_TRANSACTION);
            self.client.output.command_complete(tag);
            return Ok(Outcome::Done);
        };
        if transaction.implicit {
            self.client.output.warning(sqlstate::NO_ACTIVE_SQL_TRANSACTION, NO_TRANSACTION);
        }
        // What comes of it is told, whoever the statements before it have ended.
        self.ends_processes &= transaction.implicit;
        let mut characteristics = transaction.characteristics;
        if chain
            && transaction.is_on_leader()
            && !transaction.failed
            && let Ok(relayed) = self.ask_in_transaction("SHOW transaction_read_only").await
        {
            // ROLLBACK TO may have taken the mode back.
            characteristics.read_only = first_value(relayed.own_rows.last()) == "on";
        }
        let outcome = if commits {
            self.commit(true).await?
        } else {
            self.roll_back(true).await?;
            Outcome::Done
        };
        self.portals.clear();
        if chain && outcome == Outcome::Done {
            self.transaction = Some(Transaction::explicit(self, characteristics));
        }
        Ok(outcome)
    }

    async fn set_transaction(&mut self, modes: TransactionModes) -> Result<Outcome, SessionEnd> {
        // That of a message of several statements is a block for it, and that of a pipeline is none.
        if self.transaction.is_none() || self.is_pipeline() {
            let warning = "SET TRANSACTION can only be used in transaction blocks";
            self.client.output.warning(sqlstate::NO_ACTIVE_SQL_TRANSACTION, warning);
        }
        if self.transaction.is_none() && !self.opens_pipeline() {
            self.client.output.command_complete("SET");
            return Ok(Outcome::Done);
        }
        self.change_modes(modes).await
    }

    /// Changes the modes of the open transaction, or lets the server say why that cannot be; answered as SET.
    async fn change_modes(&mut self, modes: TransactionModes) -> Result<Outcome, SessionEnd> {
        let Some(transaction) = &mut self.transaction else { return Ok(Outcome::Failed) };
        if !transaction.has_started() {
            transaction.characteristics = transaction.characteristics.with(modes);
            self.client.output.command_complete("SET");
            return Ok(Outcome::Done);
        }
        if modes.isolation.is_some()
            && modes.isolation != transaction.characteristics.isolation
            && let Err(error) = self.level_may_change().await?
        {
            self.fail(error);
            return Ok(Outcome::Failed);
        }
        // The level stays SERIALIZABLE whatever was asked for.
        let mut wanted = Vec::new();
        wanted.extend(modes.read_only.map(|on| if on { "READ ONLY" } else { "READ WRITE" }));
        wanted.extend(modes.deferrable.map(|on| if on { "DEFERRABLE" } else { "NOT DEFERRABLE" }));
        let outcome = if wanted.is_empty() {
            self.client.output.command_complete("SET");
            Outcome::Done
        } else {
            self.run_text_in_transaction(&format!("SET TRANSACTION {}", wanted.join(", "))).await?
        };
        if let (Outcome::Done, Some(transaction)) = (outcome, &mut self.transaction) {
            transaction.characteristics = transaction.characteristics.with(modes);
        }
        Ok(outcome)
    }

    /// Whether the transaction has no snapshot yet, or what the server says otherwise.
    async fn level_may_change(&mut self) -> Result<Result<(), SqlError>, SessionEnd> {
        if !self.transaction.as_ref().is_some_and(Transaction::is_on_leader) {
            let refusal = "SET TRANSACTION ISOLATION LEVEL must be called before any query";
            return Ok(Err(SqlError::error(sqlstate::ACTIVE_SQL_TRANSACTION, refusal)));
        }
        match self.ask_in_transaction(TO_ANOTHER_LEVEL_AND_BACK).await {
            Ok(relayed) => Ok(relayed.own_error.map_or(Ok(()), |fields| Err(SqlError::from(fields)))),
            Err(RelayError::Client(error)) => Err(error.into()),
            Err(error) => Ok(Err(self.server_lost("the server", &error, None))),
        }
    }

    async fn set_characteristics(&mut self, modes: TransactionModes) -> Result<Outcome, SessionEnd> {
        if let Some(read_only) = modes.read_only {
            // Statements outside transactions must be refused by the server as well.
            let value = if read_only { "on" } else { "off" };
            if self.transaction.is_some() {
                self.set_characteristics_to(modes);
                let name = "default_transaction_read_only";
                return self.set(name, false, Some(value), &format!("SET {name} TO {value}")).await;
            }
            if !self.settings.set("default_transaction_read_only", value.to_owned()) {
                return Ok(self.too_many_settings());
            }
        }
        self.set_characteristics_to(modes);
        self.client.output.command_complete("SET");
        Ok(Outcome::Done)
    }

    fn set_characteristics_to(&mut self, modes: TransactionModes) {
        if modes.isolation.is_some() {
            self.set_isolation(false, modes.isolation);
        }
        self.characteristics = self.characteristics.with(modes);
    }

    /// What a setting means for the session.
    pub(super) fn note_transaction_default(&mut self, name: &str, value: &str) {
        match name {
            "default_transaction_read_only" => self.characteristics.read_only = is_on(value),
            "default_transaction_deferrable" => self.characteristics.deferrable = is_on(value),
            // What is made without a schema may be temporary then, and is looked for there first.
            "search_path" if names_temporary_schema(value) => self.pin(PinReason::TemporaryObject),
            _ => {}
        }
    }

    /// The isolation level that the session, or its transaction, has asked for.
    pub(super) fn isolation_asked(&self, of_transaction: bool) -> Isolation {
        let of_session = self.characteristics.isolation;
        let asked = match &self.transaction {
            Some(transaction) if of_transaction => transaction.characteristics.isolation,
            _ => of_session,
        };
        asked.unwrap_or(Isolation::Serializable)
    }

    async fn discard(&mut self, target: DiscardTarget, text: &str) -> Result<Outcome, SessionEnd> {
        if target == DiscardTarget::All {
            if self.transaction.is_some() {
                self.fail(SqlError::error(
                    sqlstate::ACTIVE_SQL_TRANSACTION,
                    "DISCARD ALL cannot run inside a transaction block",
                ));
                return Ok(Outcome::Failed);
            }
            // All state that a server holds for this session goes with its back end.
            if let Some(mut backend) = self.own_backend.take() {
                // Its locks must be gone when the client is answered; closing alone takes effect some time later.
                let _ = tokio::time::timeout(DISCARD_TIMEOUT, backend.rows("DISCARD ALL")).await;
            }
            self.database.leader.forget(self.number);
            self.pinned = None;
            self.kept.clear();
            self.has_state_there = false;
            self.statements.clear();
            self.portals.clear();
            self.forget_settings();
            // As after a log-in: a pool gives the connection to somebody else now.
            (self.commits_before, self.commits_seen) = (self.database.commit_barrier.commits_begun(), 0);
            self.client.output.command_complete("DISCARD ALL");
            return Ok(Outcome::Done);
        }
        let outcome = self.run_text_on_leader(text).await?;
        if outcome == Outcome::Done && target == DiscardTarget::Plans {
            tracing::trace!("plans of this session's back end are discarded; those of shared readers are not");
        }
        Ok(outcome)
    }

    async fn deallocate(&mut self, name: Option<&str>, text: &str) -> Result<Outcome, SessionEnd> {
        match name {
            Some(name) if self.statements.remove(name.as_bytes()).is_some() => {
                self.client.output.command_complete("DEALLOCATE");
                Ok(Outcome::Done)
            }
            Some(_) => self.run_text_on_leader(text).await,
            None => {
                self.statements.clear();
                let backend = self.transaction.as_mut().and_then(Transaction::backend).or(self.own_backend.as_mut());
                // A session that has prepared by PREPARE is pinned.
                if let Some(backend) = backend.filter(|_| self.pinned.is_some()) {
                    backend.prepared.clear();
                    return self.run_text_on_leader(text).await;
                }
                self.client.output.command_complete("DEALLOCATE ALL");
                Ok(Outcome::Done)
            }
        }
    }
}

/// Whether a `search_path` names the session's schema of temporary relations.
fn names_temporary_schema(search_path: &str) -> bool {
    search_path.split(',').any(|name| name.trim().trim_matches('"').starts_with("pg_temp"))
}
