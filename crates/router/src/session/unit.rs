//! Runs one unit of work where it belongs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;

use super::batch_traits::BatchTraits;
use super::ending::terminated;
use super::outcome::{LEADER_TRIES_MAX, Outcome, RETRY_PAUSE, Unfit};
use super::relay::{Ended, HELD_BYTES_MAX, Hold, Relay, RelayError, Relayed};
use super::request::{Expected, Request, put_own};
use super::transaction::Transaction;
use super::{Session, SessionEnd};
use crate::backend::Backend;
use crate::epoch::Epoch;
use crate::settings::{FORGET_PLANS, Reach, Settings};
use crate::topology::Role;
use crate::wire::{ErrorFields, SqlError, sqlstate};

impl Session {
    /// Runs `request`; its answers, or one error, are in the client's output afterwards.
    pub(super) async fn run_unit(&mut self, mut request: Request, traits: BatchTraits) -> Result<Outcome, SessionEnd> {
        if !request.needs_server() {
            for item in &request.items {
                if let super::request::Item::Answer(bytes) = item {
                    self.client.output.extend_from_slice(bytes);
                }
            }
            return Ok(Outcome::Done);
        }
        if self.cancel.is_ended() {
            return Err(SessionEnd::Fatal(terminated()));
        }
        if self.cancel.take_wanted() {
            self.fail(SqlError::error(sqlstate::QUERY_CANCELED, "canceling statement due to user request"));
            return Ok(Outcome::Failed);
        }
        self.count(traits.reads_only);
        let _ending = self.ending_around(&traits);
        let stand_ins = self.put_stand_ins(&mut request, traits.text.as_ref()).await;
        let start = self.client.output.len();
        self.went_out = false;
        let outcome = self.run_where_it_belongs(&request, &traits).await;
        for stand_in in stand_ins.into_iter().filter(|_| matches!(outcome, Ok(Outcome::Done))) {
            stand_in.pass_on().await;
        }
        // What is done is told, unless it was that; behind half a message nothing can be said.
        let is_done = matches!(outcome, Ok(Outcome::Done)) && self.transaction.is_none() && !self.ends_processes;
        if self.cancel.is_ended() && !is_done && !matches!(outcome, Err(SessionEnd::Client(_))) {
            self.take_back(start, self.went_out);
            return Err(SessionEnd::Fatal(terminated()));
        }
        outcome
    }

    async fn run_where_it_belongs(&mut self, request: &Request, traits: &BatchTraits) -> Result<Outcome, SessionEnd> {
        if self.transaction.is_some() {
            return self.run_in_transaction(request, traits).await;
        }
        let is_long = traits.fingerprint.is_some_and(|statement| self.database.is_remembered_long(statement));
        if traits.must_be_wrapped(is_long, self.database.epochs.has_ddl_barrier()) {
            let start = self.client.output.len();
            let outcome = self.run_wrapped(request, traits).await?;
            let is_refused = outcome == Outcome::Failed
                && !self.went_out
                && self.failed_with == sqlstate::ACTIVE_SQL_TRANSACTION
                && is_prevented(&self.client.output[start..]);
            let Some(alone) = traits.alone().filter(|_| is_refused) else { return Ok(outcome) };
            self.take_back(start, false);
            self.skips_until_sync = false;
            return self.run_on_leader(request, &alone).await;
        }
        if traits.reads_only && !traits.within_transaction && !self.is_pinned() {
            return self.run_at_epoch(request, traits).await;
        }
        if traits.only_looks && traits.statements > 0 {
            return self.read_on_leader(request, traits).await;
        }
        self.run_on_leader(request, traits).await
    }

    /// Runs a lone statement inside a transaction of the router's own, and again when it was refused with 40001 and
    /// cannot have had an effect.
    pub(super) async fn run_wrapped(&mut self, request: &Request, traits: &BatchTraits) -> Result<Outcome, SessionEnd> {
        let start = self.client.output.len();
        let mut pause = RETRY_PAUSE;
        for attempt in 1.. {
            self.failed_with.clear();
            self.transaction = Some(Transaction::implicit(self));
            let outcome = self.run_in_transaction(request, traits).await?;
            let outcome = if request.is_extended() {
                self.end_implicit(outcome).await?
            } else {
                self.end_implicit_and_tell(outcome, start).await?
            };
            let refused = outcome == Outcome::Failed && self.failed_with == sqlstate::SERIALIZATION_FAILURE;
            if !refused || self.went_out || !traits.leaves_nothing_behind() || attempt == LEADER_TRIES_MAX {
                return Ok(outcome);
            }
            self.take_back(start, false);
            self.skips_until_sync = false;
            self.router.counters.update_retries.fetch_add(1, Relaxed);
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        unreachable!("the last try gives an outcome")
    }

    /// Commits or rolls back a transaction of the router's own.
    pub(super) async fn end_implicit(&mut self, outcome: Outcome) -> Result<Outcome, SessionEnd> {
        if outcome == Outcome::Done {
            self.commit(false).await
        } else {
            self.roll_back(false).await?;
            Ok(Outcome::Failed)
        }
    }

    /// The same in the simple protocol, where PostgreSQL says that the last statement is complete only behind its
    /// commit. `start`: where the answer to that one begins in the client's output.
    pub(super) async fn end_implicit_and_tell(
        &mut self,
        outcome: Outcome,
        start: usize,
    ) -> Result<Outcome, SessionEnd> {
        let start = if self.went_out { 0 } else { start };
        let answer = self.client.output.get(start..).filter(|_| outcome == Outcome::Done);
        let complete = answer.and_then(last_complete).map(|offset| self.client.output.split_off(start + offset));
        let ended = self.end_implicit(outcome).await?;
        if let Some(complete) = complete.filter(|_| ended == Outcome::Done) {
            self.client.output.extend_from_slice(&complete);
        }
        Ok(ended)
    }

    /// Sends what is encoded and carries the answers back.
    pub(super) async fn relay(&mut self, backend: &mut Backend, expected: VecDeque<Expected>, hold: Hold) -> Ended {
        self.cancel.begin(backend.cancel_key());
        // The router's own statements around a unit prepare nothing for the client.
        let prepares = expected
            .iter()
            .any(|expected| matches!(expected, Expected::Parse { visible: true, .. } | Expected::ParseAnswer));
        let tells = |expected: &Expected| {
            matches!(expected, Expected::Simple | Expected::Execute | Expected::Own { heard: true })
        };
        let tells = expected.iter().any(tells);
        let endings = backend.server.endings();
        let mut relay = Relay::new(&mut self.client, backend, expected, hold);
        relay.is_followed = self.is_followed;
        relay.behind = self.behind;
        let mut ended = relay.run().await;
        self.may_be_cancelled_late |= !self.cancel.end().await;
        self.went_out |= ended.went_out;
        if ended.result.is_ok() {
            backend.endings = endings;
        }
        self.took_sync |= ended.took_sync;
        self.began_copy |= ended.began_copy;
        self.notifications.extend_from_slice(&ended.notifications);
        if self.notifications.len() > HELD_BYTES_MAX {
            let notifications = self.notifications.split();
            self.client.output.extend_from_slice(&notifications);
        }
        let lost_client = matches!(ended.result, Err(RelayError::Client(_)));
        let is_done = tells
            && !self.ends_processes
            && !backend.in_transaction
            && ended.result.as_ref().is_ok_and(Relayed::has_succeeded);
        if let Some(error) = self.ended_on_purpose(backend, &ended).filter(|_| !lost_client && !is_done) {
            self.take_back(ended.start, ended.went_out);
            self.ended_by = Some(error);
            // As when the client is lost: nothing is tried again, and nothing else is told.
            let is_over = std::io::Error::from(std::io::ErrorKind::ConnectionAborted);
            ended.result = Err(RelayError::Client(is_over.into()));
        }
        if prepares {
            self.parsed = ended.parsed;
        }
        ended
    }

    /// Takes back what stands behind `start` in the client's output, with the preparations that it tells of; or, where
    /// something has gone out since, all that has not.
    pub(super) fn take_back(&mut self, start: usize, went_out: bool) {
        self.client.output.truncate(if went_out { 0 } else { start });
        if !went_out {
            self.parsed = 0;
        }
    }

    /// Gives `backend` this session's settings. It is a step of its own: what the client has said is sent only to a
    /// server that has them, since a server that refuses one would run the next message all the same.
    pub(super) async fn give_settings(&mut self, backend: &mut Backend) -> Result<Result<(), Unfit>, SessionEnd> {
        if backend.settings == self.settings && !backend.stale_plans {
            return Ok(Ok(()));
        }
        let Some(change) = switch(backend, &self.settings) else { return Ok(Ok(())) };
        let end = if backend.in_transaction { "ROLLBACK; " } else { "" };
        backend.epoch = None;
        let prepared = self.prepare(backend, &format!("{end}{change}")).await?;
        if prepared.is_ok() {
            backend.settings = self.settings.clone();
            backend.stale_plans = false;
        }
        Ok(prepared.map_err(|unfit| Unfit {
            error: unfit.error.hint("The session's settings cannot be given to the server; RESET ALL takes them back."),
            ..unfit
        }))
    }

    /// Runs `sql`, without which nothing of the client's may run on `backend`.
    pub(super) async fn prepare(&mut self, backend: &mut Backend, sql: &str) -> Result<Result<(), Unfit>, SessionEnd> {
        if backend.server.role == Role::Leader {
            // PostgreSQL counts it as well.
            self.router.serializable.note_short();
        }
        let mut expected = VecDeque::new();
        put_own(backend, sql, false, &mut expected);
        let Ended { result, final_error, .. } = self.relay(backend, expected, Hold::InCommitBarrier).await;
        self.statement_ended();
        Ok(match result {
            Ok(Relayed { own_error: None, .. }) => Ok(()),
            Ok(Relayed { own_error: Some(fields), .. }) => Err(Unfit { error: SqlError::from(fields), is_whole: true }),
            Err(RelayError::Client(error)) => return Err(error.into()),
            Err(error) => {
                let error = self.server_lost(&backend.server.name, &error, final_error);
                Err(Unfit { error, is_whole: false })
            }
        })
    }

    /// The statements that open `epoch` on `backend`, which takes it for open from now on; none if it has it open and
    /// may share it.
    pub(super) fn opening_of(&self, epoch: &Arc<Epoch>, backend: &mut Backend, own_transaction: bool) -> Vec<String> {
        if backend.in_transaction && backend.epoch == Some(epoch.id) && !own_transaction {
            return vec![];
        }
        let end = backend.in_transaction.then(|| "ROLLBACK".to_owned());
        let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY".to_owned();
        let snapshot = match (epoch.snapshot_on(&backend.server), self.database.unsafe_without_epochs) {
            (Some(snapshot), false) => Some(format!("SET TRANSACTION SNAPSHOT '{snapshot}'")),
            _ => None,
        };
        backend.in_transaction = true;
        backend.epoch = Some(epoch.id);
        end.into_iter().chain([begin]).chain(snapshot).collect()
    }

    /// What a client is told when the server was lost under its statement; the server's own last words if it had any.
    pub(super) fn server_lost(&self, server: &str, error: &RelayError, final_error: Option<ErrorFields>) -> SqlError {
        if let RelayError::Unreadable { .. } = error {
            let refused = SqlError::error(sqlstate::FEATURE_NOT_SUPPORTED, error.to_string());
            return refused.hint("The server process on which it was set is closed, and its transaction rolled back.");
        }
        match final_error {
            Some(fields) if fields.severity != "ERROR" => {
                SqlError::error(&fields.code, format!("{server} ended the connection: {}", fields.message))
            }
            _ => {
                SqlError::error(sqlstate::ADMIN_SHUTDOWN, format!("lost {server} while it ran the statement: {error}"))
            }
        }
        .hint("The transaction is rolled back; run it again.")
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
}

/// Whether PostgreSQL itself has refused a statement because it is in a transaction, before it did anything. The name
/// of its function is the only word of that that is not translated.
fn is_prevented(messages: &[u8]) -> bool {
    let mut rest = messages;
    while let Some((&tag, after)) = rest.split_first() {
        let Some(length) = after.first_chunk::<4>() else { return false };
        let Some((message, behind)) = after.split_at_checked(u32::from_be_bytes(*length) as usize) else {
            return false;
        };
        let body = message.get(4..).unwrap_or_default();
        let is_it = |(kind, value): &(u8, Bytes)| *kind == b'R' && value == "PreventInTransactionBlock";
        if tag == b'E' && ErrorFields::parse(&Bytes::copy_from_slice(body)).others.iter().any(is_it) {
            return true;
        }
        rest = behind;
    }
    false
}

/// Where among these whole messages the last `CommandComplete` or `EmptyQueryResponse` begins.
fn last_complete(messages: &[u8]) -> Option<usize> {
    let mut last = None;
    let mut offset = 0;
    while let Some((&tag, rest)) = messages.get(offset..).and_then(<[u8]>::split_first) {
        if matches!(tag, b'C' | b'I') {
            last = Some(offset);
        }
        let Some(length) = rest.first_chunk::<4>() else { break };
        offset += 1 + u32::from_be_bytes(*length) as usize;
    }
    last
}

/// The statement that gives `backend` these settings, and has it forget what it has planned under others: functions
/// keep the values of constants as well, and the next session must not get those of the last.
pub(super) fn switch(backend: &Backend, settings: &Arc<Settings>) -> Option<String> {
    let stale = backend.stale_plans || backend.settings.difference(settings) != Reach::Nothing;
    let change = backend.settings.change_to(settings);
    let forget = stale.then(|| FORGET_PLANS.to_owned());
    let statements: Vec<String> = change.into_iter().chain(forget).collect();
    (!statements.is_empty()).then(|| statements.join("; "))
}
