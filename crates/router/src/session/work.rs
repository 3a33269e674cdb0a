//! What a unit of work is, all its statements taken together.

use std::hash::{DefaultHasher, Hash, Hasher};

use bytes::Bytes;

use crate::settings::Reach;
use crate::sql::{Action, PinReason, Statement, shape};

/// One simple statement, or all that an extended batch executes between two of the router's own actions.
#[derive(Debug, Clone, Default)]
pub struct Work {
    /// Nothing but whitelisted reads (or nothing at all).
    pub reads_only: bool,
    /// Nothing but reads, whitelisted or not: they can run READ ONLY.
    pub only_looks: bool,
    /// Must not share a transaction that is open for long.
    pub own_transaction: bool,
    /// May write.
    pub writes: bool,
    /// May hide DDL or leave session state.
    pub opaque: bool,
    /// Commits by itself; cannot be wrapped.
    pub commits_itself: bool,
    /// DDL or TRUNCATE.
    pub barrier: Option<BarrierWork>,
    /// Waits for the client while it runs.
    pub waits_for_client: bool,
    /// Has a meaning only inside the session's transaction.
    pub within_transaction: bool,
    /// How far settings reach that it may change for the rest of its transaction.
    pub local_settings: Reach,
    /// Leaves session state.
    pub pins: Option<PinReason>,
    /// How many statements are executed.
    pub statements: usize,
    /// By what an update of one statement is remembered.
    pub fingerprint: Option<u64>,
    /// The text of a lone statement.
    pub text: Option<Bytes>,
}

/// What kind of DDL.
#[derive(Debug, Clone)]
pub struct BarrierWork {
    /// Older snapshots stay right.
    pub harmless: bool,
    /// Cannot run in a transaction block.
    pub alone: bool,
    /// A database that must have no other connection.
    pub database: Option<String>,
}

impl Work {
    /// Nothing executed yet.
    pub fn nothing() -> Work {
        Work { reads_only: true, only_looks: true, ..Work::default() }
    }

    /// The work of one statement with this text; `sql` is the same as it is sent.
    pub fn of(statement: &Statement, text: &str, sql: &Bytes) -> Work {
        let (pins, local_settings) = (statement.pins, statement.local_settings);
        let mut work = Work { pins, local_settings, statements: 1, text: Some(sql.clone()), ..Work::default() };
        match &statement.action {
            Action::Read { own_transaction } => {
                work.reads_only = true;
                work.only_looks = true;
                work.own_transaction = *own_transaction;
            }
            Action::Update { opaque, writes, commits_itself } => {
                work.opaque = *opaque;
                work.writes = *writes;
                work.only_looks = !*writes && !*opaque && statement.pins.is_none();
                work.commits_itself = *commits_itself;
            }
            Action::Barrier { harmless, alone, database } => {
                work.writes = true;
                work.barrier = Some(BarrierWork { harmless: *harmless, alone: *alone, database: database.clone() });
            }
            Action::CopyIn => {
                work.writes = true;
                work.waits_for_client = true;
            }
            Action::Declare { read, hold } => {
                work.reads_only = *read && !*hold;
                // What FETCH runs is judged here, when its query is known.
                work.writes = !*read;
                work.opaque = !*read;
                work.within_transaction = true;
            }
            Action::CursorUse | Action::Savepoint(_) | Action::RollbackTo(_) | Action::Release(_) => {
                // Inside a transaction they go where it is; what they do there was judged when the cursor was declared.
                work.reads_only = true;
                work.within_transaction = true;
            }
            Action::ExecutePrepared => {
                work.writes = true;
                work.opaque = true;
            }
            Action::Notify => work.writes = true,
            _ => {}
        }
        if work.writes {
            let mut hasher = DefaultHasher::new();
            shape(text).hash(&mut hasher);
            work.fingerprint = Some(hasher.finish());
        }
        work
    }

    /// Adds what is executed after it in the same batch.
    pub fn add(&mut self, other: Work) {
        let first = self.statements == 0;
        self.reads_only &= other.reads_only;
        self.only_looks &= other.only_looks;
        self.own_transaction |= other.own_transaction;
        self.writes |= other.writes;
        self.opaque |= other.opaque;
        self.within_transaction |= other.within_transaction;
        self.commits_itself |= other.commits_itself;
        self.waits_for_client |= other.waits_for_client;
        self.barrier = match (self.barrier.take(), other.barrier) {
            (Some(one), Some(two)) => Some(BarrierWork {
                harmless: one.harmless && two.harmless,
                alone: one.alone || two.alone,
                database: one.database.or(two.database),
            }),
            (one, two) => one.or(two),
        };
        self.local_settings = self.local_settings.max(other.local_settings);
        self.pins = self.pins.or(other.pins);
        self.statements += other.statements;
        self.fingerprint = if first { other.fingerprint } else { None };
        self.text = if first { other.text } else { None };
    }

    /// Whether it must be wrapped in a transaction of the router's own rather than run whole in the commit room.
    pub fn must_be_wrapped(&self) -> bool {
        let alone = self.barrier.as_ref().is_some_and(|barrier| barrier.alone);
        !self.commits_itself && !alone && (self.opaque || self.barrier.is_some() || self.waits_for_client)
    }
}
