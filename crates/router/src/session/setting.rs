//! SET.
//!
//! Most settings mean the same on every server, so they follow the session (see [`crate::settings`]). A few are the
//! router's own (`own_setting.rs`), and a few belong to the session's identity and pin it to its back end on the
//! leader.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use super::batch_traits::BatchTraits;
use super::epoch_read::InFlight;
use super::outcome::Outcome;
use super::relay::{Ended, Hold, RelayError, Relayed, first_bytes, first_value};
use super::request::{Request, put_own};
use super::transaction::{Placement, Transaction};
use super::{Session, SessionEnd};
use crate::backend::Backend;
use crate::pool::PoolError;
use crate::servers::Health;
use crate::settings::{FORGET_PLANS, Reach, Settings, is_readable_with, quote_identifier};
use crate::sql::{Action, Isolation, PinReason};
use crate::wire::{Reply, SqlError, sqlstate};

impl Session {
    pub(super) fn too_many_settings(&mut self) -> Outcome {
        self.fail(
            SqlError::error(sqlstate::PROGRAM_LIMIT_EXCEEDED, "too many settings are changed in this session")
                .hint("RESET those that are not needed any more."),
        );
        Outcome::Failed
    }

    /// SET.
    pub(super) async fn set(
        &mut self,
        name: &str,
        local: bool,
        value: Option<&str>,
        text: &str,
    ) -> Result<Outcome, SessionEnd> {
        if matches!(name, "onecopy.freshness" | "onecopy.server" | "onecopy.served_by") {
            return Ok(self.set_of_router(name, value, "SET"));
        }
        let reads_sql = matches!(name, "standard_conforming_strings" | "client_encoding");
        if reads_sql && value.is_none_or(|value| !is_readable_with(name, value)) {
            self.fail(
                SqlError::error(
                    sqlstate::FEATURE_NOT_SUPPORTED,
                    format!("this value of {name} is not supported: the router could misread SQL"),
                )
                .hint("Use standard_conforming_strings = on and client_encoding = UTF8."),
            );
            return Ok(Outcome::Failed);
        }
        if local && !self.begins_locally() {
            return Ok(Outcome::Done);
        }
        match name {
            "default_transaction_isolation" => {
                return Ok(match value.map(Isolation::from_setting) {
                    Some(None) => self.invalid_value(name, value.unwrap_or_default()),
                    level => {
                        self.set_isolation(local, level.flatten());
                        self.client.output.command_complete("SET");
                        Outcome::Done
                    }
                });
            }
            "transaction_read_only" if self.transaction.is_some() => return self.let_server_set_mode(text).await,
            "transaction_isolation" | "transaction_read_only" | "transaction_deferrable" => {
                self.client.output.command_complete("SET");
                return Ok(Outcome::Done);
            }
            "role" | "session_authorization" => return self.set_identity(text).await,
            // Its value cannot be read back, and is used up: it is its back end's.
            "seed" => {
                let pins = Some(PinReason::HiddenSetting);
                return self.run_text_with(text, BatchTraits { statements: 1, pins, ..BatchTraits::default() }).await;
            }
            _ => {}
        }
        if local {
            self.note_local(name);
            return self.run_text_in_transaction(text).await;
        }
        if !self.settings.has_room_for(name) {
            return Ok(self.too_many_settings());
        }
        self.set_and_follow(name, text, None).await
    }

    /// SET of the isolation level that the session's transactions ask for.
    pub(super) fn set_isolation(&mut self, local: bool, level: Option<Isolation>) {
        if let Some(transaction) = &mut self.transaction {
            let behind = transaction.isolation_behind.unwrap_or(self.characteristics.isolation);
            transaction.isolation_behind = local.then_some(behind);
        }
        self.characteristics.isolation = level;
    }

    /// Whether there is a transaction for SET LOCAL; the client is told when there is none.
    pub(super) fn begins_locally(&mut self) -> bool {
        if self.transaction.is_some() {
            return true;
        }
        let warning = "SET LOCAL can only be used in transaction blocks";
        self.client.output.warning(sqlstate::NO_ACTIVE_SQL_TRANSACTION, warning);
        let begins = self.opens_pipeline();
        if !begins {
            self.client.output.command_complete("SET");
        }
        begins
    }

    /// Why a statement about a setting, or a prepared statement, is not understood: names and values are kept in UTF-8.
    pub(super) fn unreadable_value(&self, action: &Action, sql: &[u8]) -> Option<SqlError> {
        let has_name = matches!(action, Action::Set { .. } | Action::Reset { .. } | Action::Deallocate(_));
        if !has_name || sql.is_ascii() {
            return None;
        }
        if !self.settings.reads_utf8() {
            let message = "letters beyond ASCII are not supported in this statement while client_encoding is not UTF8";
            return Some(SqlError::error(sqlstate::FEATURE_NOT_SUPPORTED, message).hint("SET client_encoding = UTF8."));
        }
        let is_valid = std::str::from_utf8(sql).is_ok();
        let message = "invalid byte sequence for encoding \"UTF8\"";
        (!is_valid).then(|| SqlError::error(sqlstate::CHARACTER_NOT_IN_REPERTOIRE, message))
    }

    pub(super) fn note_local(&mut self, name: &str) {
        if let Some(transaction) = &mut self.transaction {
            transaction.note_local_settings(Reach::of(name));
        }
    }

    /// Runs SET where it is checked, reads the effective value back, unless it is known, and lets it follow the
    /// session.
    pub(super) async fn set_and_follow(
        &mut self,
        name: &str,
        text: &str,
        known: Option<String>,
    ) -> Result<Outcome, SessionEnd> {
        // Takes no snapshot: the first query of a transaction does, maybe after it has locked something.
        let read_back = format!("SHOW {}", name.split('.').map(quote_identifier).collect::<Vec<_>>().join("."));
        if self.transaction.is_some() {
            return self.set_in_transaction(name, text, &read_back, known).await;
        }
        let (mut backend, reader) = match self.any_backend().await {
            Ok(taken) => taken,
            Err(error) => {
                self.fail(error);
                return Ok(Outcome::Failed);
            }
        };
        if let Err(unfit) = self.give_settings(&mut backend).await? {
            if unfit.is_whole {
                self.give_back_any(backend, reader);
            }
            self.fail(unfit.error);
            return Ok(Outcome::Failed);
        }
        let mut expected = VecDeque::new();
        if backend.in_transaction {
            put_own(&mut backend, "ROLLBACK", false, &mut expected);
            backend.epoch = None;
        }
        Request::simple(text.to_owned().into()).encode(&mut backend, &mut expected);
        put_own(&mut backend, &read_back, false, &mut expected);
        if reader.is_some() {
            put_own(&mut backend, FORGET_PLANS, false, &mut expected);
        }
        let Ended { result, start, .. } = self.relay(&mut backend, expected, Hold::InCommitBarrier).await;
        self.statement_ended();
        let relayed = match result {
            Ok(relayed) => relayed,
            Err(RelayError::Client(error)) => return Err(error.into()),
            Err(error) => {
                self.fail(self.server_lost(&backend.server.name, &error, None));
                return Ok(Outcome::Failed);
            }
        };
        if relayed.error.is_some() {
            self.give_back_any(backend, reader);
            self.note_failure();
            return Ok(Outcome::Failed);
        }
        let value = match effective(relayed, known) {
            Ok(value) => value,
            Err(error) => {
                // It is set there, and nobody knows to what: that back end is closed.
                self.client.output.truncate(start);
                self.fail(error);
                return Ok(Outcome::Failed);
            }
        };
        self.note_transaction_default(name, &value);
        // There is room for it.
        let _ = self.settings.set(name, value);
        backend.settings = self.settings.clone();
        self.give_back_any(backend, reader);
        Ok(Outcome::Done)
    }

    async fn set_in_transaction(
        &mut self,
        name: &str,
        text: &str,
        read_back: &str,
        known: Option<String>,
    ) -> Result<Outcome, SessionEnd> {
        let start = self.client.output.len();
        if self.run_text_in_transaction(text).await? == Outcome::Failed {
            return Ok(Outcome::Failed);
        }
        self.note_touched([name.to_owned()]);
        let error = match self.ask_in_transaction(read_back).await {
            Ok(relayed) => match effective(relayed, known) {
                Ok(value) => {
                    self.note_transaction_default(name, &value);
                    // There is room for it.
                    let _ = self.settings.set(name, value);
                    self.note_settings_there(self.settings.clone());
                    return Ok(Outcome::Done);
                }
                Err(error) => error,
            },
            Err(RelayError::Client(error)) => return Err(error.into()),
            Err(error) => self.server_lost("the server", &error, None),
        };
        self.client.output.truncate(start);
        self.fail(error);
        Ok(Outcome::Failed)
    }

    /// The open transaction, if there is one, changes these settings. ROLLBACK TO may take them back without our
    /// knowing to which value.
    pub(super) fn note_touched(&mut self, names: impl IntoIterator<Item = String>) {
        if let Some(transaction) = &mut self.transaction {
            transaction.touched_settings.extend(names);
        }
        if self.transaction.as_ref().is_some_and(|transaction| transaction.savepoints > 0 && transaction.is_on_leader())
        {
            self.pin(PinReason::HiddenSetting);
        }
    }

    /// Runs a statement of the router's own in the open transaction, which is lost where it is not answered.
    pub(super) async fn ask_in_transaction(&mut self, sql: &str) -> Result<Relayed, RelayError> {
        let Some(mut transaction) = self.transaction.take() else { return Ok(Relayed::default()) };
        let mut expected = VecDeque::new();
        let result = match transaction.backend() {
            Some(backend) => {
                put_own(backend, sql, false, &mut expected);
                self.relay(backend, expected, Hold::InCommitBarrier).await.result
            }
            None => Ok(Relayed::default()),
        };
        self.statement_ended();
        if result.is_err() {
            transaction.placement = Placement::Lost;
            self.commits_seen = self.commits_seen.max(self.database.commit_barrier.commits_begun());
            // Of a session that keeps its back end the next message learns that its state is lost.
            self.has_state_there |= self.pinned.is_some();
        }
        self.transaction = Some(transaction);
        result
    }

    /// Ends `transaction` on `backend`, and learns what its savepoints have left of the session's settings. After an
    /// error they are not known.
    pub(super) async fn read_settings_back(
        &mut self,
        backend: &mut Backend,
        transaction: &Transaction,
    ) -> Result<Result<(), SqlError>, SessionEnd> {
        // What was reset may be set again.
        let touched = transaction.touched_settings.iter().map(String::as_str);
        let names: BTreeSet<String> = self.settings.names().chain(touched).map(str::to_owned).collect();
        let mut expected = VecDeque::new();
        put_own(backend, "COMMIT", false, &mut expected);
        for name in &names {
            // In whichever encoding the client's is now.
            let name = self.settings.quoted(name);
            let value = format!("pg_catalog.convert_to(pg_catalog.current_setting({name}, true), 'UTF8')");
            put_own(backend, &format!("SELECT pg_catalog.encode({value}, 'hex')"), false, &mut expected);
        }
        let Ended { result, .. } = self.relay(backend, expected, Hold::InCommitBarrier).await;
        self.statement_ended();
        match result {
            Ok(relayed @ Relayed { own_error: None, .. }) => {
                for (name, row) in names.iter().zip(&relayed.own_rows) {
                    let value = text_of_hex(&first_value(Some(row)));
                    self.note_transaction_default(name, &value);
                    // Where there is no room for it, it stays what the server has by itself.
                    let _ = self.settings.set(name, value);
                }
                backend.settings = self.settings.clone();
                Ok(Ok(()))
            }
            Ok(Relayed { own_error: Some(fields), .. }) => Ok(Err(SqlError::from(fields))),
            Err(RelayError::Client(error)) => Err(error.into()),
            Err(error) => Ok(Err(self.server_lost(&backend.server.name, &error, None))),
        }
    }

    /// A back end outside any transaction of this session: the leader's, or a reader while the leader is gone.
    pub(super) async fn any_backend(&mut self) -> Result<(Backend, Option<InFlight>), SqlError> {
        if self.is_pinned() || self.own_backend.is_some() || self.database.servers.leader().health() == Health::Up {
            match self.take_leader().await {
                Ok(backend) => {
                    // What is asked there about a setting is a serializable transaction as well.
                    self.router.serializable.note_short();
                    return Ok((backend, None));
                }
                Err(error @ PoolError::StateLost) => return Err(error.to_sql()),
                Err(error) if self.database.servers.current().followers.is_empty() => return Err(error.to_sql()),
                Err(_) => {}
            }
        }
        let wait = self.database.backend_wait();
        let mut last = SqlError::error(sqlstate::CANNOT_CONNECT_NOW, "no server is there");
        for pool in self.database.readers.all().iter().rev().filter(|pool| pool.server.has_caught_up()) {
            let Some(in_flight) = InFlight::on(&pool.server) else { continue };
            match pool.take(&self.credentials, &self.settings, wait).await {
                Ok(backend) => return Ok((backend, Some(in_flight))),
                Err(error) => last = error.to_sql(),
            }
        }
        Err(last)
    }

    fn give_back_any(&mut self, backend: Backend, reader: Option<InFlight>) {
        if reader.is_some() {
            if !std::mem::take(&mut self.may_be_cancelled_late) {
                self.database.readers.give_back(backend);
            }
        } else {
            self.return_leader(backend);
        }
    }

    /// SET ROLE and SET SESSION AUTHORIZATION: who the session is, on its back end on the leader only.
    pub(super) async fn set_identity(&mut self, text: &str) -> Result<Outcome, SessionEnd> {
        if self.transaction.as_ref().is_some_and(Transaction::reads_an_epoch) {
            self.fail(
                SqlError::error(
                    sqlstate::FEATURE_NOT_SUPPORTED,
                    "a transaction that reads an epoch cannot change its role",
                )
                .hint("Change it before the transaction, or begin the transaction without READ ONLY."),
            );
            return Ok(Outcome::Failed);
        }
        // First of all, so that the back end is kept from then on.
        let pinned_before = self.pinned;
        self.pin(PinReason::Identity);
        let outcome = self.run_text_on_leader(text).await?;
        if outcome == Outcome::Failed && self.transaction.is_none() {
            self.pinned = pinned_before;
        }
        Ok(outcome)
    }

    /// Changes `transaction_read_only` in words that the router does not read: the server knows what they mean.
    pub(super) async fn let_server_set_mode(&mut self, text: &str) -> Result<Outcome, SessionEnd> {
        let outcome = self.run_text_on_leader(text).await?;
        if let (Outcome::Done, Some(transaction)) = (outcome, &mut self.transaction) {
            // From here on it counts as one that writes.
            transaction.characteristics.read_only = false;
        }
        Ok(outcome)
    }

    /// The back end of the open transaction has these settings if it commits.
    pub(super) fn note_settings_there(&mut self, settings: Arc<Settings>) {
        if let Some(transaction) = &mut self.transaction {
            transaction.note_settings_there(settings);
        }
    }

    /// Runs one statement of the client's as it is in the open transaction.
    pub(super) async fn run_text_in_transaction(&mut self, text: &str) -> Result<Outcome, SessionEnd> {
        if let Some(transaction) = &mut self.transaction {
            transaction.stale_plans = true;
        }
        let traits =
            BatchTraits { reads_only: true, statements: 1, setting: Some(text.to_owned()), ..BatchTraits::default() };
        self.run_in_transaction(&Request::simple(text.to_owned().into()), &traits).await
    }

    /// Runs one statement of the client's as it is on the leader.
    pub(super) async fn run_text_on_leader(&mut self, text: &str) -> Result<Outcome, SessionEnd> {
        self.run_text_with(text, BatchTraits { statements: 1, ..BatchTraits::default() }).await
    }

    async fn run_text_with(&mut self, text: &str, traits: BatchTraits) -> Result<Outcome, SessionEnd> {
        let request = Request::simple(text.to_owned().into());
        match &self.transaction {
            Some(_) => self.run_in_transaction(&request, &traits).await,
            None => self.run_on_leader(&request, &traits).await,
        }
    }
}

/// What a setting is now, as it was `known` or read back; an error where it cannot be kept.
fn effective(read_back: Relayed, known: Option<String>) -> Result<String, SqlError> {
    if let Some(fields) = read_back.own_error {
        return Err(SqlError::from(fields));
    }
    let text = || String::from_utf8(first_bytes(read_back.own_rows.last()).to_vec());
    known.map_or_else(text, Ok).map_err(|_| {
        let message = "the value has letters beyond ASCII, and client_encoding is not UTF8: it cannot be kept";
        SqlError::error(sqlstate::FEATURE_NOT_SUPPORTED, message).hint("SET client_encoding = UTF8 before.")
    })
}

/// Of digits that the server wrote.
fn text_of_hex(digits: &str) -> String {
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = digits.as_bytes().chunks(2).map(byte).collect();
    String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
}
