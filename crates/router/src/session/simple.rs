//! The simple protocol: one message, any number of statements.

use std::sync::Arc;

use bytes::Bytes;

use super::action::is_routers_own;
use super::batch_traits::BatchTraits;
use super::outcome::Outcome;
use super::request::{Item, Request};
use super::transaction::Transaction;
use super::{Session, SessionEnd};
use crate::settings::Reach;
pub(super) use crate::sql::readable;
use crate::sql::{Action, ParseError, PinReason, Statement};
use crate::wire::{Frame, SqlError, begin_message, end_message, sql_of_query, sqlstate};

/// A `Parse` message's count of parameter types: none is given.
const NO_TYPES: &[u8] = &[0, 0];

impl Session {
    /// A `Query` message, up to `ReadyForQuery`.
    pub(super) async fn simple_query(&mut self, frame: &Frame) -> Result<(), SessionEnd> {
        let sql = sql_of_query(frame).map_err(Session::malformed)?;
        let text = readable(&sql);
        let start = self.begin_simple();
        // A simple query destroys the unnamed statement and portal.
        self.statements.remove(&b""[..]);
        if self.transaction.is_none() {
            self.portals.clear();
        }
        match self.database.catalog.classify(&sql).await {
            Ok(statements) if statements.is_empty() => {
                let start = begin_message(&mut self.client.output, b'I');
                end_message(&mut self.client.output, start);
            }
            Ok(statements) if statements.len() == 1 => {
                self.run_statement(&statements[0], &text, sql.clone()).await?;
            }
            Ok(statements) => self.run_statements(&statements, &text, &sql).await?,
            Err(error) => self.run_unreadable(error, sql.clone()).await?,
        }
        self.end_simple(start).await
    }

    /// Where the answer begins in the client's output.
    fn begin_simple(&mut self) -> usize {
        (self.in_extended_batch, self.went_out) = (false, false);
        self.client.output.len()
    }

    /// Ends what messages of the extended protocol have begun, as their `Sync` would, and says that the session is
    /// ready.
    async fn end_simple(&mut self, start: usize) -> Result<(), SessionEnd> {
        if let Some(transaction) = self.transaction.as_ref().filter(|transaction| transaction.implicit) {
            let outcome = if transaction.failed { Outcome::Failed } else { Outcome::Done };
            self.end_implicit_and_tell(outcome, start).await?;
        }
        if self.transaction.is_none() {
            self.portals.clear();
        }
        self.release();
        self.ready();
        Ok(())
    }

    /// A `FunctionCall` message, up to `ReadyForQuery`. libpq and pgjdbc read and write large objects by it.
    pub(super) async fn function_call(&mut self, frame: Frame) -> Result<(), SessionEnd> {
        let start = self.begin_simple();
        if !self.is_barred(&Action::UNKNOWN) {
            let traits = traits_of_call(&frame);
            self.run_unit(Request::function(frame), traits).await?;
        }
        self.end_simple(start).await
    }

    /// One statement; `sql` are the bytes to send.
    async fn run_statement(&mut self, statement: &Statement, text: &str, sql: Bytes) -> Result<Outcome, SessionEnd> {
        if is_routers_own(&statement.action) {
            if let Some(error) = self.unreadable_value(&statement.action, &sql) {
                self.fail(error);
                return Ok(Outcome::Failed);
            }
            return self.run_action(&statement.action, text, true).await;
        }
        if self.is_barred(&statement.action) {
            return Ok(Outcome::Failed);
        }
        if let Some(error) = self.without_block(&statement.action) {
            self.fail(error);
            return Ok(Outcome::Failed);
        }
        let traits = BatchTraits::of(statement, text, &sql);
        let outcome = self.run_unit(Request::simple(sql), traits).await?;
        self.note_savepoint(&statement.action, outcome);
        Ok(outcome)
    }

    /// Whether the open transaction has failed and allows the statement no more; the client is told.
    pub(super) fn is_barred(&mut self, action: &Action) -> bool {
        let failed = self.transaction.as_ref().is_some_and(|transaction| transaction.failed);
        if !failed || matches!(action, Action::RollbackTo(_)) {
            return false;
        }
        self.fail(SqlError::error(
            sqlstate::IN_FAILED_SQL_TRANSACTION,
            "current transaction is aborted, commands ignored until end of transaction block",
        ));
        true
    }

    /// Why a statement about savepoints cannot run: the transaction that one message makes of its statements has none.
    pub(super) fn without_block(&self, action: &Action) -> Option<SqlError> {
        let name = match action {
            Action::Savepoint(_) => "SAVEPOINT",
            Action::RollbackTo(_) => "ROLLBACK TO SAVEPOINT",
            Action::Release(_) => "RELEASE SAVEPOINT",
            _ => return None,
        };
        let is_block = self.transaction.as_ref().is_some_and(|transaction| !transaction.implicit);
        let why = || format!("{name} can only be used in transaction blocks");
        (!is_block).then(|| SqlError::error(sqlstate::NO_ACTIVE_SQL_TRANSACTION, why()))
    }

    /// Keeps count of savepoints; ROLLBACK TO makes a failed transaction whole again.
    pub(super) fn note_savepoint(&mut self, action: &Action, outcome: Outcome) {
        let (Some(transaction), Outcome::Done) = (&mut self.transaction, outcome) else { return };
        match action {
            Action::Savepoint(_) => transaction.savepoints += 1,
            Action::RollbackTo(_) => transaction.failed = false,
            _ => {}
        }
    }

    /// Several statements of one message: one transaction, unless they say otherwise themselves.
    async fn run_statements(
        &mut self,
        statements: &Arc<[Statement]>,
        text: &str,
        sql: &Bytes,
    ) -> Result<(), SessionEnd> {
        let reads_only = statements.iter().all(|statement| statement.action.is_read());
        let mut start = self.client.output.len();
        let (mut counted, mut behind) = (0, 0);
        for statement in statements.iter() {
            (start, self.went_out) = (self.client.output.len(), false);
            if self.transaction.is_none() && !matches!(statement.action, Action::Begin(_)) {
                let mut transaction = Transaction::implicit(self);
                transaction.characteristics.read_only |= reads_only;
                self.transaction = Some(transaction);
            }
            let range = statement.range.clone();
            behind += text[counted..range.start].chars().count();
            (counted, self.behind) = (range.start, behind);
            let outcome = self.run_statement(statement, &text[range.clone()], sql.slice(range)).await?;
            self.behind = 0;
            if outcome == Outcome::Failed {
                break;
            }
        }
        if let Some(transaction) = self.transaction.as_ref().filter(|transaction| transaction.implicit) {
            let outcome = if transaction.failed { Outcome::Failed } else { Outcome::Done };
            self.end_implicit_and_tell(outcome, start).await?;
        }
        Ok(())
    }

    /// Asks a server what it makes of a statement, without running it.
    pub(super) fn parses(&mut self, sql: Bytes) -> Request {
        let settings = self.settings_of_statements();
        let text = self.database.catalog.prepared_texts().shared(
            self.user.clone(),
            sql,
            Bytes::from_static(NO_TYPES),
            settings,
        );
        Request { items: vec![Item::Parse { text, named: false }] }
    }

    /// A message that the parser refuses: the leader's own parser gives PostgreSQL's answer, and nothing runs. What
    /// that one accepts is refused all the same, because what it would do is unknown.
    async fn run_unreadable(&mut self, error: ParseError, sql: Bytes) -> Result<(), SessionEnd> {
        if !matches!(error, ParseError::Refused(_) | ParseError::Location { .. }) {
            self.fail(unread(&error));
            return Ok(());
        }
        let has_started = self.transaction.as_ref().is_some_and(Transaction::has_started);
        if !has_started && self.is_barred(&Action::UNKNOWN) {
            return Ok(());
        }
        let request = self.parses(sql);
        let start = self.client.output.len();
        // In a failed transaction, too, what is wrong with its words comes first: its server knows.
        if self.run_unit(request, BatchTraits::default()).await? == Outcome::Done {
            self.client.output.truncate(start);
            if self.is_barred(&Action::UNKNOWN) {
                return Ok(());
            }
            let reason = match error {
                ParseError::Refused(reason) => reason,
                error => error.to_string(),
            };
            self.fail(
                SqlError::error(
                    sqlstate::FEATURE_NOT_SUPPORTED,
                    format!("the router cannot read this statement: {reason}"),
                )
                .hint("Write it as PostgreSQL 18 and older understand it."),
            );
        }
        Ok(())
    }
}

/// The numbers of PostgreSQL's functions of large objects (pg_proc.dat): they write at most, and what they open is
/// closed with the transaction.
const LARGE_OBJECT_FUNCTIONS: [u32; 13] = [715, 952, 953, 954, 955, 956, 957, 958, 964, 1004, 3170, 3171, 3172];

/// What a called function does is known of those only; any other may do all that users' code may.
fn traits_of_call(frame: &Frame) -> BatchTraits {
    let body = frame.body();
    let number = body.first_chunk::<4>().map(|bytes| u32::from_be_bytes(*bytes));
    let traits = BatchTraits { writes: true, opaque: true, statements: 1, ..BatchTraits::default() };
    if number.is_some_and(|number| LARGE_OBJECT_FUNCTIONS.contains(&number)) {
        return traits;
    }
    BatchTraits { pins: Some(PinReason::UserCode), local_settings: Reach::Names, ..traits }
}

/// What a client is told whose message is more than the router reads.
pub(super) fn unread(error: &ParseError) -> SqlError {
    SqlError::error(sqlstate::PROGRAM_LIMIT_EXCEEDED, error.to_string())
}
