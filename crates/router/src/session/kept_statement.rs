//! Prepared statements that mean what they meant at their Parse.
//!
//! PostgreSQL makes values of constants, and finds the objects behind names, when a statement is parsed. So a text is
//! shared among sessions whose settings agree, and a back end parses it under those. What a Parse has made of a text
//! for one client alone - of 'now', or under settings that have changed since or that nobody knows - is to be had on
//! one back end only: it is prepared there under a name of its own. That is the session's back end on the leader, which
//! the session has until others need it: then the statement is prepared there again if its settings are known, and else
//! does not exist any more (26000).

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use super::batch_traits::BatchTraits;
use super::extended::Piece;
use super::outcome::Unfit;
use super::relay::{Ended, Hold, RelayError};
use super::request::{Item, Request, put_named, put_own, put_sync};
use super::transaction::Transaction;
use super::{ClientStatement, Kept, Session};
use crate::backend::Backend;
use crate::prepared_text::PreparedText;
use crate::settings::{Reach, has_constants};
use crate::sql::Statement;
use crate::wire::{Parse, SqlError, sqlstate};

impl Session {
    /// The text of a statement that the client parses now, after `before`, and whether its back end is kept for it.
    pub(super) fn text_of(
        &mut self,
        parse: Parse,
        statement: &Statement,
        before: &BatchTraits,
    ) -> (Arc<PreparedText>, Kept) {
        let settings = self.settings_of_statements();
        let local = self.local_settings(before);
        let keeps = statement.names_instant
            || match local {
                Reach::Nothing | Reach::Plans => false,
                Reach::Constants => has_constants(&parse.sql),
                Reach::Names => true,
            };
        let has_own = self.has_own_settings(before);
        // Behind an error the server refuses it, which it must be asked for.
        let has_failed = self.transaction.as_ref().is_some_and(|transaction| transaction.failed);
        let behind_ddl = has_failed || self.is_behind_ddl(before);
        let mut texts = self.database.catalog.prepared_texts();
        let (user, Parse { sql, types, .. }) = (self.user.clone(), parse);
        if !keeps && !has_own && behind_ddl {
            return (texts.behind_ddl(user, sql, types, settings), Kept::Not);
        }
        if !keeps && !has_own && local == Reach::Nothing {
            return (texts.shared(user, sql, types, settings), Kept::Not);
        }
        let text = texts.private(user, sql, types, settings);
        drop(texts);
        if !keeps {
            return (text, Kept::Not);
        }
        self.keep(&text);
        let at_epoch = self.transaction.as_ref().is_some_and(Transaction::reads_an_epoch);
        (text, if at_epoch { Kept::InstantOfEpoch } else { Kept::Instant })
    }

    /// Whether what is parsed now may mean something else to others: behind DDL that is not committed.
    fn is_behind_ddl(&self, before: &BatchTraits) -> bool {
        before.defines || self.transaction.as_ref().is_some_and(|transaction| transaction.behind_ddl)
    }

    /// How far settings reach that only the open transaction has, with what is to run in it before.
    fn local_settings(&self, before: &BatchTraits) -> Reach {
        let open = self.transaction.as_ref().map_or(Reach::Nothing, |transaction| transaction.local_settings);
        open.max(before.local_settings)
    }

    /// Whether the session's back end may have settings that the router does not know.
    fn has_own_settings(&self, before: &BatchTraits) -> bool {
        self.pinned.is_some() || before.pins.is_some()
    }

    fn keep(&mut self, text: &Arc<PreparedText>) {
        // As many are alive as the client has statements and portals at the most.
        self.kept.retain(|text| text.strong_count() > 0);
        self.kept.push(Arc::downgrade(text));
        self.holds_backend = true;
    }

    /// Whether the client has statements that must run on the session's own back end.
    pub(super) fn has_kept_statements(&self) -> bool {
        self.kept.iter().any(|text| text.strong_count() > 0)
    }

    /// Makes sure that the client's statement of this name is used as its Parse has made it, now that the settings may
    /// be others.
    pub(super) async fn keep_meaning(
        &mut self,
        name: &Bytes,
        statement: &mut ClientStatement,
        piece: &Piece,
    ) -> Result<(), SqlError> {
        if statement.is_routers_own() {
            return Ok(());
        }
        let behind_ddl = self.is_behind_ddl(&piece.traits);
        self.go_back_before_ddl(name, statement, behind_ddl);
        let local = self.local_settings(&piece.traits);
        let has_own = self.has_own_settings(&piece.traits);
        let now = self.settings_of_statements();
        let text = statement.text.clone();
        if text.private && !text.own_result {
            if statement.kept != Kept::Not {
                if parses(piece, statement) {
                    return Ok(());
                }
                return self.find_kept(name, statement).await;
            }
            if has_own || local != Reach::Nothing {
                return Ok(());
            }
        }
        let difference =
            if Arc::ptr_eq(&text.settings, &now) { Reach::Nothing } else { text.settings.difference(&now) };
        let is_as_it_was = difference == Reach::Nothing;
        let is_known = !has_own && local < Reach::Constants;
        let is_left = difference == Reach::Names || difference == Reach::Constants && has_constants(&text.sql);
        if is_known && !is_left {
            let anew = if behind_ddl {
                let mut is_there =
                    || statement.before_ddl.is_some() || self.has_there(statement) || parses(piece, statement);
                if is_as_it_was && is_there() {
                    return Ok(());
                }
                // What is made of it there others must not find.
                self.database.catalog.prepared_texts().copy_behind_ddl(&text, now)
            } else if is_as_it_was && !text.private {
                return Ok(());
            } else {
                self.database.catalog.prepared_texts().under(&text, &now)
            };
            if !Arc::ptr_eq(&anew, &text) {
                statement.named |= anew.private && !anew.own_result;
                statement.text = anew;
                if behind_ddl {
                    statement.before_ddl.get_or_insert(text);
                }
                self.statements.insert(name.clone(), statement.clone());
            }
            return Ok(());
        }
        if !is_known && is_as_it_was && (self.has_prepared(text.number) || parses(piece, statement)) {
            return Ok(());
        }
        let text = self.database.catalog.prepared_texts().private_copy(&text);
        self.keep(&text);
        self.parse_as_then(&text).await?;
        *statement = ClientStatement { text, named: true, kept: Kept::Settings, before_ddl: None, ..statement.clone() };
        self.statements.insert(name.clone(), statement.clone());
        Ok(())
    }

    /// What a statement was before the DDL of a transaction it is again behind that, unless its client has been told of
    /// another result since; and for the next try when it had another one there: a savepoint may have taken that back.
    fn go_back_before_ddl(&mut self, name: &Bytes, statement: &mut ClientStatement, behind_ddl: bool) {
        let Some(before) = &statement.before_ddl else { return };
        if !behind_ddl {
            let before = before.clone();
            statement.before_ddl = None;
            if statement.text.knows_no_more_than(&before) {
                statement.text = before;
            }
        } else if statement.text.is_outdated() {
            let settings = statement.text.settings.clone();
            statement.text = self.database.catalog.prepared_texts().copy_behind_ddl(before, settings);
        } else {
            return;
        }
        self.statements.insert(name.clone(), statement.clone());
    }

    /// Whether the back end of the transaction has a statement as the client has it, named or not; it shall not give
    /// way now.
    fn has_there(&mut self, statement: &ClientStatement) -> bool {
        let backend = self.transaction.as_mut().and_then(|transaction| transaction.backend());
        let Some(backend) = backend.or(self.own_backend.as_mut()) else { return false };
        let number = statement.text.number;
        backend.prepared.touch(number) || !statement.named && backend.prepared.unnamed == Some(number)
    }

    /// Makes sure, before anything of `request` runs on `backend` and commits by itself, that its statements have the
    /// results there that the client knows. What runs otherwise is refused by its answer.
    pub(super) async fn compare_results(&mut self, backend: &mut Backend, request: &Request) -> Result<(), Unfit> {
        for item in &request.items {
            if let Item::Bind { text, .. } = item
                && text.is_described()
                && !backend.prepared.has(text.number)
            {
                self.parse_between(backend, text, "BEGIN", "ROLLBACK").await?;
            }
        }
        Ok(())
    }

    /// Makes sure that the session is on the back end that has this statement.
    async fn find_kept(&mut self, name: &Bytes, statement: &ClientStatement) -> Result<(), SqlError> {
        self.holds_backend = true;
        let is_placed = self.transaction.as_ref().is_some_and(Transaction::has_started);
        if !is_placed {
            let backend = self.take_leader().await.map_err(|error| error.to_sql())?;
            self.return_leader(backend);
        }
        match statement.kept {
            _ if self.has_prepared(statement.text.number) => Ok(()),
            Kept::Settings => self.parse_as_then(&statement.text).await,
            Kept::Not | Kept::InstantOfEpoch => Ok(()),
            Kept::Instant => {
                let name = String::from_utf8_lossy(name);
                let text = format!("prepared statement \"{name}\" does not exist");
                Err(SqlError::error(sqlstate::INVALID_SQL_STATEMENT_NAME, text)
                    .hint("Others needed the server process that had it: there are too few (leader_backends_max)."))
            }
        }
    }

    /// Whether the back end that the session must use has this statement.
    fn has_prepared(&mut self, number: u64) -> bool {
        let backend = self.transaction.as_mut().and_then(|transaction| transaction.backend());
        backend.or(self.own_backend.as_mut()).is_some_and(|backend| backend.prepared.has(number))
    }

    /// Parses `text` on the back end that the session must use, under the settings of the client's Parse.
    async fn parse_as_then(&mut self, text: &Arc<PreparedText>) -> Result<(), SqlError> {
        if let Some(mut transaction) = self.transaction.take_if(|transaction| transaction.has_started()) {
            let result = match transaction.backend() {
                Some(backend) => {
                    let enter = "SAVEPOINT onecopy_parse";
                    let leave = "ROLLBACK TO SAVEPOINT onecopy_parse; RELEASE SAVEPOINT onecopy_parse";
                    self.parse_between(backend, text, enter, leave).await.map_err(|unfit| unfit.error)
                }
                // It is lost; what is to run in it says so.
                None => Ok(()),
            };
            self.transaction = Some(transaction);
            return result;
        }
        let mut backend = self.take_leader().await.map_err(|error| error.to_sql())?;
        let result = self.parse_between(&mut backend, text, "BEGIN", "ROLLBACK").await;
        if !result.as_ref().is_err_and(|unfit| !unfit.is_whole) {
            self.return_leader(backend);
        }
        result.map_err(|unfit| unfit.error)
    }

    async fn parse_between(
        &mut self,
        backend: &mut Backend,
        text: &Arc<PreparedText>,
        enter: &str,
        leave: &str,
    ) -> Result<(), Unfit> {
        let lost = |error| Unfit { error, is_whole: false };
        let start = self.client.output.len();
        if !backend.in_transaction {
            match self.give_settings(backend).await {
                Ok(Ok(())) => {}
                Ok(Err(unfit)) => return Err(unfit),
                Err(end) => return Err(lost(SqlError::error("08006", end.to_string()))),
            }
        }
        let settings = text.settings.for_a_moment(&self.settings_of_statements());
        let entered = self.prepare(backend, &format!("{enter}; {settings}")).await;
        match entered.unwrap_or_else(|end| Err(lost(SqlError::error("08006", end.to_string())))) {
            Ok(()) => {}
            Err(unfit) if unfit.is_whole => {
                let left = self.prepare(backend, leave).await;
                return Err(Unfit { is_whole: matches!(left, Ok(Ok(()))), ..unfit });
            }
            Err(unfit) => return Err(unfit),
        }
        let mut expected = VecDeque::new();
        put_named(backend, text, false, &mut expected);
        put_sync(backend, &mut expected);
        put_own(backend, leave, false, &mut expected);
        let Ended { result, .. } = self.relay(backend, expected, Hold::InCommitBarrier).await;
        self.statement_ended();
        self.client.output.truncate(start);
        match result {
            Ok(relayed) => match relayed.error.or(relayed.own_error) {
                Some(fields) => Err(Unfit { error: SqlError::from(fields), is_whole: true }),
                None => Ok(()),
            },
            Err(RelayError::Client(error)) => Err(lost(SqlError::error("08006", error.to_string()))),
            Err(error) => {
                let name = backend.server.name.clone();
                Err(lost(self.server_lost(&name, &error, None)))
            }
        }
    }
}

/// Whether the piece parses a statement's text, under a name or not as the statement has it.
fn parses(piece: &Piece, statement: &ClientStatement) -> bool {
    let number = statement.text.number;
    let parses =
        |item: &Item| matches!(item, Item::Parse { text, named } if text.number == number && *named == statement.named);
    piece.request.items.iter().any(parses)
}
