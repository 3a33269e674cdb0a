//! The extended protocol: batches of messages up to `Sync`.
//!
//! A batch is read whole (or up to `Flush`, or a bound) before any of it runs, so that where it must run is known. It
//! is cut at the router's own statements (BEGIN, COMMIT, SET ...); each piece between is one request to one server.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use super::action::is_routers_own;
use super::batch_traits::BatchTraits;
use super::outcome::Outcome;
use super::relay::{self, BATCH_BYTES_MAX};
use super::request::{Item, Request};
use super::simple::{readable, unread};
use super::transaction::Transaction;
use super::{ClientStatement, Kept, PORTAL_NAME_BYTES_MAX, PORTALS_MAX, Session, SessionEnd};
use crate::prepared_text::on_their_own;
use crate::settings::Reach;
use crate::sql::{Action, ParseError, Statement, names_a_time};
use crate::wire::{Bind, Close, CloseTarget, Describe, Execute, Frame, Parse, Reply, SqlError, sqlstate};

/// A client that says nothing for so long inside a batch may wait for an error of what it has said: one server runs
/// each message when it comes. So what has come runs then, and the rest follows in the same transaction.
const LULL: Duration = Duration::from_millis(200);

/// Bound values longer than this are not looked through for the words of time.
const VALUES_SEEN_BYTES_MAX: usize = 1 << 20;

/// How a batch was ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The client's `Sync`.
    Sync,
    /// The client's `Flush`.
    Flush,
    /// By its size, because nothing more has come for a while, or because what follows is data for a COPY in it, or a
    /// message of the simple protocol.
    Size,
}

/// Messages for one server, and what they execute.
pub(super) struct Piece {
    pub request: Request,
    pub traits: BatchTraits,
    /// Names of the statements that its `Parse` messages prepare on a server.
    parses: Vec<Bytes>,
}

impl Piece {
    fn new() -> Piece {
        Piece { request: Request::default(), traits: BatchTraits::nothing(), parses: Vec::new() }
    }
}

const PARSE_COMPLETE: &[u8] = b"1\0\0\0\x04";
const BIND_COMPLETE: &[u8] = b"2\0\0\0\x04";
const CLOSE_COMPLETE: &[u8] = b"3\0\0\0\x04";
const NO_DATA: &[u8] = b"n\0\0\0\x04";
const NO_PARAMETERS: &[u8] = b"t\0\0\0\x06\0\0";
const EMPTY_QUERY: &[u8] = b"I\0\0\0\x04";

impl Session {
    /// `Sync` alone.
    pub(super) async fn sync(&mut self) -> Result<(), SessionEnd> {
        self.skips_until_sync = false;
        self.in_extended_batch = false;
        if let Some(transaction) = self.transaction.as_ref().filter(|transaction| transaction.implicit) {
            let outcome = if transaction.failed { Outcome::Failed } else { Outcome::Done };
            self.end_implicit(outcome).await?;
        }
        if self.transaction.is_none() {
            self.portals.clear();
        }
        self.skips_until_sync = false;
        self.release();
        self.ready();
        Ok(())
    }

    /// A batch that starts with `first`.
    pub(super) async fn extended_batch(&mut self, first: Frame) -> Result<(), SessionEnd> {
        let mut bytes = 0;
        let mut frames = vec![];
        let mut next = first;
        let end = loop {
            bytes += next.bytes.len() + next.rest;
            let in_parts = next.rest > 0;
            match next.tag {
                b'S' => break End::Sync,
                b'H' => break End::Flush,
                b'P' | b'B' | b'D' | b'E' | b'C' => frames.push(next),
                b'X' => return Err(SessionEnd::Terminated),
                b'd' | b'c' | b'f' | b'Q' | b'F' => {
                    self.client.put_back(&next);
                    break End::Size;
                }
                tag => {
                    let text = format!("message type {tag} inside an extended batch");
                    return Err(SessionEnd::Fatal(SqlError::fatal(sqlstate::PROTOCOL_VIOLATION, text)));
                }
            }
            // Whatever follows the first part of a message is the rest of it.
            if in_parts || bytes > BATCH_BYTES_MAX {
                break End::Size;
            }
            next = match self.client.buffered_frame()? {
                Some(frame) => frame,
                None => {
                    relay::flush(&mut self.client).await?;
                    match tokio::time::timeout(LULL, self.next_frame()).await {
                        Ok(frame) => frame?,
                        Err(_) if frames.is_empty() => self.next_frame().await?,
                        Err(_) => break End::Size,
                    }
                }
            };
        };
        (self.in_extended_batch, self.took_sync, self.began_copy) = (true, false, false);
        self.run_batch(frames, end).await?;
        match end {
            // Its server was lost: another Sync follows the data.
            End::Sync if self.began_copy && !self.took_sync => self.skips_until_sync = true,
            End::Sync => self.sync().await?,
            _ if self.took_sync => self.sync().await?,
            End::Flush => relay::flush(&mut self.client).await?,
            End::Size => {}
        }
        Ok(())
    }

    async fn run_batch(&mut self, frames: Vec<Frame>, end: End) -> Result<(), SessionEnd> {
        let mut piece = Piece::new();
        for frame in frames {
            let executes = frame.tag == b'E';
            let in_parts = frame.rest > 0;
            let changes_settings = piece.traits.pins.is_some() || piece.traits.local_settings != Reach::Nothing;
            // What was executed may have changed by what rules the server reads SQL, which the server says behind it.
            // A Bind in parts cannot be run again, so it runs in a transaction, with nothing that has none.
            if changes_settings && matches!(frame.tag, b'P' | b'B') || in_parts && piece.traits.statements > 0 {
                self.run_before(&mut piece).await?;
                if self.skips_until_sync {
                    return Ok(());
                }
            }
            match self.take_message(frame, &mut piece).await? {
                Next::Go => {}
                Next::Run(statement, text) => {
                    if self.run_before(&mut piece).await? == Outcome::Done {
                        self.run_action(&statement.action, &text, false).await?;
                    }
                }
                Next::Error(error) => {
                    if self.run_before(&mut piece).await? == Outcome::Done {
                        self.fail(error);
                    }
                }
            }
            // The server commits there; what follows is in a transaction of its own.
            if executes && piece.traits.ddl.as_ref().is_some_and(|ddl| ddl.alone) {
                let before = std::mem::replace(&mut piece, Piece::new());
                self.run_piece(before, false).await?;
            }
            if self.skips_until_sync {
                return Ok(());
            }
        }
        self.run_piece(piece, end != End::Sync).await?;
        Ok(())
    }

    /// Runs what goes before a message, and leaves another piece.
    async fn run_before(&mut self, piece: &mut Piece) -> Result<Outcome, SessionEnd> {
        self.is_followed = true;
        let outcome = self.run_piece(std::mem::replace(piece, Piece::new()), true).await;
        self.is_followed = false;
        outcome
    }

    /// `goes_on`: the client's `Sync` does not follow at once, and with it the end of the implicit transaction.
    async fn run_piece(&mut self, piece: Piece, goes_on: bool) -> Result<Outcome, SessionEnd> {
        let Piece { request, traits, parses } = piece;
        if request.items.is_empty() {
            return Ok(Outcome::Done);
        }
        if traits.statements > 0 && self.is_barred(&Action::UNKNOWN) {
            self.forget_statements(&parses);
            return Ok(Outcome::Failed);
        }
        // What follows belongs to the same transaction until the client's Sync, and portals live as long.
        let opens = traits.statements > 0 || request.binds_portal();
        let alone = traits.ddl.as_ref().is_some_and(|ddl| ddl.alone);
        // CALL and DO may commit where nothing else is in their transaction; nobody else waits for a client's COPY.
        let several = traits.statements > 1;
        let in_parts = goes_on && (!traits.commits_itself || several);
        let waits = traits.commits_itself && traits.waits_for_client && several;
        if (in_parts || waits) && opens && self.transaction.is_none() && !alone {
            self.transaction = Some(Transaction::implicit(self));
        }
        self.parsed = 0;
        let outcome = self.run_unit(request, traits).await?;
        if outcome == Outcome::Failed {
            self.forget_statements(parses.get(self.parsed..).unwrap_or_default());
        }
        Ok(outcome)
    }

    /// Statements whose preparation has failed do not exist.
    fn forget_statements(&mut self, names: &[Bytes]) {
        for name in names {
            self.statements.remove(name);
        }
    }

    async fn take_message(&mut self, frame: Frame, piece: &mut Piece) -> Result<Next, SessionEnd> {
        let next = match frame.tag {
            b'P' => self.take_parse(Parse::read(&frame).map_err(Session::malformed)?, piece).await,
            b'B' => self.take_bind(Bind::read(&frame).map_err(Session::malformed)?, piece).await,
            b'D' => self.take_describe(&Describe::read(&frame).map_err(Session::malformed)?, frame, piece).await,
            b'E' => self.take_execute(&Execute::read(&frame).map_err(Session::malformed)?, frame, piece),
            _ => self.take_close(&Close::read(&frame).map_err(Session::malformed)?, frame, piece),
        };
        Ok(next)
    }

    async fn take_parse(&mut self, parse: Parse, piece: &mut Piece) -> Next {
        let named = !parse.name.is_empty();
        if named && self.statements.contains_key(&parse.name) {
            let name = String::from_utf8_lossy(&parse.name);
            return Next::Error(SqlError::error(
                sqlstate::DUPLICATE_PREPARED_STATEMENT,
                format!("prepared statement \"{name}\" already exists"),
            ));
        }
        if self.statements.is_full() && !self.statements.contains_key(&parse.name) {
            return Next::Error(
                SqlError::error(sqlstate::PROGRAM_LIMIT_EXCEEDED, "too many prepared statements in this session")
                    .hint("Close or DEALLOCATE those that are not needed any more."),
            );
        }
        let classified_at = self.database.catalog.version();
        let statement = match self.database.catalog.classify(&parse.sql).await {
            Ok(statements) if statements.len() > 1 => {
                return Next::Error(SqlError::error(
                    sqlstate::SYNTAX_ERROR,
                    "cannot insert multiple commands into a prepared statement",
                ));
            }
            Ok(statements) => statements.first().cloned(),
            Err(error @ ParseError::TooLong { .. }) => {
                return Next::Error(unread(&error));
            }
            Err(_) => {
                // The leader's parser says in its words what is wrong; the statement exists for nobody.
                let settings = self.settings_of_statements();
                let text =
                    self.database.catalog.prepared_texts().shared(self.user.clone(), parse.sql, parse.types, settings);
                piece.request.items.push(Item::Parse { text, named: false });
                piece.traits.reads_only = false;
                self.statements.remove(&parse.name);
                return Next::Go;
            }
        };
        let own = statement.as_ref().is_none_or(|statement| is_routers_own(&statement.action));
        let name = parse.name.clone();
        let (prepared, kept) = match statement.as_ref().filter(|_| !own) {
            Some(statement) => self.text_of(parse, statement, &piece.traits),
            None => (
                self.database.catalog.prepared_texts().shared(
                    self.user.clone(),
                    parse.sql,
                    parse.types,
                    Arc::default(),
                ),
                Kept::Not,
            ),
        };
        // What is to be had on one back end only has a name of its own there, whatever the client calls it.
        let named = named || prepared.private && !prepared.own_result;
        if own {
            piece.request.items.push(Item::Answer(Bytes::from_static(PARSE_COMPLETE)));
        } else {
            piece.request.items.push(Item::Parse { text: prepared.clone(), named });
            piece.parses.push(name.clone());
            self.mark_place(statement.as_ref(), piece);
        }
        let statement = ClientStatement { text: prepared, statement, named, kept, before_ddl: None, classified_at };
        self.statements.insert(name, statement);
        Next::Go
    }

    /// Classifies a statement again if the catalog has changed since: a view may write now that did not.
    async fn classify_again(&mut self, name: &Bytes, statement: &mut ClientStatement) {
        let version = self.database.catalog.version();
        if statement.classified_at == version || statement.statement.is_none() {
            return;
        }
        statement.statement = match self.database.catalog.classify(&statement.text.sql).await {
            Ok(statements) => statements.first().cloned(),
            Err(_) => Some(Statement::unknown(statement.text.sql.len())),
        };
        statement.classified_at = version;
        // What is kept as well, or each Bind from now on would classify it anew.
        self.statements.insert(name.clone(), statement.clone());
    }

    /// Preparing and describing a statement must happen where it can run, though it writes nothing.
    fn mark_place(&self, statement: Option<&Statement>, piece: &mut Piece) {
        if let Some(statement) = statement {
            let reads_only = statement.action.is_read() || BatchTraits::of(statement, "", &Bytes::new()).reads_only;
            piece.traits.reads_only &= reads_only;
        }
    }

    fn statement_named(&self, name: &Bytes) -> Result<ClientStatement, SqlError> {
        self.statements.get(name).cloned().ok_or_else(|| {
            let text = if name.is_empty() {
                "unnamed prepared statement does not exist".to_owned()
            } else {
                format!("prepared statement \"{}\" does not exist", String::from_utf8_lossy(name))
            };
            SqlError::error(sqlstate::INVALID_SQL_STATEMENT_NAME, text)
        })
    }

    fn portal_named(&self, name: &Bytes) -> Result<ClientStatement, SqlError> {
        self.portals.get(name).cloned().ok_or_else(|| {
            let text = format!("portal \"{}\" does not exist", String::from_utf8_lossy(name));
            SqlError::error(sqlstate::INVALID_CURSOR_NAME, text)
        })
    }

    async fn take_bind(&mut self, bind: Bind, piece: &mut Piece) -> Next {
        let mut statement = match self.statement_named(&bind.statement) {
            Ok(statement) => statement,
            Err(error) => return Next::Error(error),
        };
        self.classify_again(&bind.statement, &mut statement).await;
        if let Err(error) = self.keep_meaning(&bind.statement, &mut statement, piece).await {
            return Next::Error(error);
        }
        if statement.text.is_outdated() {
            return Next::Error(relay::outdated());
        }
        if bind.portal.len() > PORTAL_NAME_BYTES_MAX {
            let text = format!("the name of a portal is longer than {PORTAL_NAME_BYTES_MAX} bytes");
            return Next::Error(SqlError::error(sqlstate::PROGRAM_LIMIT_EXCEEDED, text));
        }
        if self.portals.len() >= PORTALS_MAX && !self.portals.contains_key(&bind.portal) {
            return Next::Error(
                SqlError::error(sqlstate::PROGRAM_LIMIT_EXCEEDED, "too many portals in this transaction")
                    .hint("Close those that are not needed any more."),
            );
        }
        self.portals.insert(on_their_own(bind.portal.clone()), statement.clone());
        if statement.is_routers_own() {
            piece.request.items.push(Item::Answer(Bytes::from_static(BIND_COMPLETE)));
        } else {
            piece.traits.own_transaction |= bind.rest > 0 || names_time(&bind.values);
            self.mark_place(statement.statement.as_ref(), piece);
            piece.request.items.push(Item::Bind { bind, text: statement.text, named: statement.named });
        }
        Next::Go
    }

    /// Whether a portal that no Bind has made may exist on this session's server: DECLARE makes one as well.
    fn may_be_cursor(&self, name: &Bytes) -> bool {
        !name.is_empty()
            && !self.portals.contains_key(name)
            && (self.transaction.is_some() || self.own_backend.is_some())
    }

    async fn take_describe(&mut self, describe: &Describe, frame: Frame, piece: &mut Piece) -> Next {
        if describe.target == CloseTarget::Portal && self.may_be_cursor(&describe.name) {
            piece.traits.within_transaction = true;
            piece.request.items.push(Item::Portal(frame));
            return Next::Go;
        }
        let statement = match describe.target {
            CloseTarget::Statement => self.statement_named(&describe.name),
            CloseTarget::Portal => self.portal_named(&describe.name),
        };
        let mut statement = match statement {
            Ok(statement) => statement,
            Err(error) => return Next::Error(error),
        };
        let of_statement = describe.target == CloseTarget::Statement;
        if of_statement && let Err(error) = self.keep_meaning(&describe.name, &mut statement, piece).await {
            return Next::Error(error);
        }
        if of_statement && statement.text.is_outdated() {
            return Next::Error(relay::outdated());
        }
        if statement.is_routers_own() {
            let mut answer = BytesMut::new();
            if of_statement {
                answer.extend_from_slice(NO_PARAMETERS);
            }
            match statement.statement.map(|statement| statement.action) {
                Some(Action::Show(name)) => answer.text_columns(&[&name]),
                _ => answer.extend_from_slice(NO_DATA),
            }
            piece.request.items.push(Item::Answer(answer.freeze()));
        } else if of_statement {
            self.mark_place(statement.statement.as_ref(), piece);
            let has_fixed_result = statement.has_fixed_result();
            let ClientStatement { text, named, .. } = statement;
            piece.request.items.push(Item::DescribeStatement { text, named, has_fixed_result });
        } else if statement.has_fixed_result() {
            piece.request.items.push(Item::DescribePortal { frame, text: statement.text });
        } else {
            piece.request.items.push(Item::Portal(frame));
        }
        Next::Go
    }

    fn take_execute(&mut self, execute: &Execute, frame: Frame, piece: &mut Piece) -> Next {
        if self.may_be_cursor(&execute.portal) {
            // What it does was classified when it was declared.
            piece.traits.add(BatchTraits {
                reads_only: true,
                within_transaction: true,
                statements: 1,
                ..BatchTraits::default()
            });
            piece.request.items.push(Item::Portal(frame));
            return Next::Go;
        }
        let portal = match self.portal_named(&execute.portal) {
            Ok(portal) => portal,
            Err(error) => return Next::Error(error),
        };
        let text = readable(&portal.text.sql);
        match portal.statement {
            None => {
                piece.request.items.push(Item::Answer(Bytes::from_static(EMPTY_QUERY)));
                Next::Go
            }
            Some(statement) if is_routers_own(&statement.action) => {
                match self.unreadable_value(&statement.action, &portal.text.sql) {
                    Some(error) => Next::Error(error),
                    None => Next::Run(statement, text.into_owned()),
                }
            }
            Some(statement) => {
                if let Some(error) = self.without_block(&statement.action) {
                    return Next::Error(error);
                }
                let traits = BatchTraits::of(&statement, &text, &portal.text.sql);
                if let (Action::Savepoint(_), Some(transaction)) = (&statement.action, &mut self.transaction) {
                    transaction.savepoints += 1;
                }
                if let (Action::RollbackTo(_), Some(transaction)) = (&statement.action, &mut self.transaction) {
                    transaction.failed = false;
                }
                piece.traits.add(traits);
                piece.request.items.push(Item::Portal(frame));
                Next::Go
            }
        }
    }

    fn take_close(&mut self, close: &Close, frame: Frame, piece: &mut Piece) -> Next {
        if close.target == CloseTarget::Portal && self.may_be_cursor(&close.name) {
            piece.traits.within_transaction = true;
            piece.request.items.push(Item::Portal(frame));
            return Next::Go;
        }
        let own_answer = match close.target {
            CloseTarget::Statement => {
                self.statements.remove(&close.name);
                true
            }
            CloseTarget::Portal => self.portals.remove(&close.name).is_none_or(|portal| portal.is_routers_own()),
        };
        piece.request.items.push(if own_answer {
            Item::Answer(Bytes::from_static(CLOSE_COMPLETE))
        } else {
            Item::Portal(frame)
        });
        Next::Go
    }
}

impl ClientStatement {
    /// Whether its result is a matter of its text and the tables, as that of FETCH is not.
    fn has_fixed_result(&self) -> bool {
        let action = self.statement.as_ref().map(|statement| &statement.action);
        matches!(action, Some(Action::Read { .. } | Action::Update { .. }))
    }

    pub(super) fn is_routers_own(&self) -> bool {
        self.statement.as_ref().is_none_or(|statement| is_routers_own(&statement.action))
    }
}

/// Whether a bound value could be read as the time of its transaction.
fn names_time(values: &[u8]) -> bool {
    values.len() > VALUES_SEEN_BYTES_MAX || names_a_time(values)
}

/// What follows a message.
enum Next {
    /// The next message.
    Go,
    /// The piece so far runs, then this statement of the router's own.
    Run(Statement, String),
    /// The piece so far runs, then the batch has failed.
    Error(SqlError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_words_are_found_in_bound_values() {
        assert!(names_time(b"\0\0\0\x01\0\0\0\x03NOW\0\0"));
        assert!(!names_time(b"\0\0\0\x01\0\0\0\x02no\0\0"));
    }
}
