//! What a unit of work is, all its statements taken together.

use bytes::Bytes;

use crate::settings::Reach;
use crate::sql::{Action, PinReason, Statement, fingerprint};

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
    /// The text of a SET or the like.
    pub setting: Option<String>,
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
    /// What it has changed for others is told by its ACCESS EXCLUSIVE locks.
    pub told_by_locks: bool,
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
            Action::Barrier { harmless, alone, told_by_locks, database } => {
                work.writes = true;
                work.barrier = Some(BarrierWork {
                    harmless: *harmless,
                    alone: *alone,
                    told_by_locks: *told_by_locks,
                    database: database.clone(),
                });
            }
            Action::CopyIn => {
                work.writes = true;
                // The table's triggers.
                work.opaque = true;
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
            work.fingerprint = Some(fingerprint(text));
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
                told_by_locks: one.told_by_locks && two.told_by_locks,
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

    /// Whether it may run in a transaction that reads an epoch.
    pub fn fits_an_epoch(&self) -> bool {
        self.pins.is_none() && !self.opaque && self.barrier.is_none() && !self.waits_for_client
    }

    /// Whether nothing of it is left once its transaction is rolled back, so that it can be run again. Code of users
    /// may reach out of the database; what leaves session state has an effect although it fails.
    pub fn leaves_nothing_behind(&self) -> bool {
        !self.opaque && !self.commits_itself && !self.waits_for_client && self.pins.is_none()
    }

    /// Whether it must be wrapped in a transaction of the router's own rather than run whole in the commit room.
    /// `is_long`: its kind kept a gate from closing before. `beside_ddl`: DDL is going on, and an update must find out
    /// before its commit whether TRUNCATE has overtaken its snapshot.
    pub fn must_be_wrapped(&self, is_long: bool, beside_ddl: bool) -> bool {
        let alone = self.barrier.as_ref().is_some_and(|barrier| barrier.alone);
        let shall =
            self.opaque || self.barrier.is_some() || self.waits_for_client || is_long || (beside_ddl && self.writes);
        // Inside of a transaction these would be refused (2D000, 25001).
        shall && !self.commits_itself && !alone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn barrier(harmless: bool, alone: bool, database: Option<&str>) -> Work {
        let database = database.map(str::to_owned);
        let barrier = Some(BarrierWork { harmless, alone, told_by_locks: false, database });
        Work { writes: true, barrier, statements: 1, ..Work::default() }
    }

    /// An update runs whole in the room unless something speaks against it; then the room has only its COMMIT.
    #[test]
    fn what_could_hold_the_room_or_hide_ddl_is_wrapped() {
        let update = Work { writes: true, statements: 1, ..Work::default() };
        assert!(!update.must_be_wrapped(false, false));
        assert!(update.must_be_wrapped(true, false), "its kind kept a gate from closing");
        assert!(update.must_be_wrapped(false, true), "TRUNCATE may overtake its snapshot");
        assert!(Work { opaque: true, ..update.clone() }.must_be_wrapped(false, false));
        assert!(Work { waits_for_client: true, ..update.clone() }.must_be_wrapped(false, false));
        assert!(barrier(false, false, None).must_be_wrapped(false, false), "TRUNCATE dooms at its COMMIT");
        let read = Work { statements: 1, ..Work::nothing() };
        assert!(!read.must_be_wrapped(false, true), "a read has nothing to lose beside DDL");
    }

    /// CALL and DO that may commit, and DDL that stands alone, are refused by PostgreSQL inside of a transaction, so
    /// nothing that has happened before brings them into one.
    #[test]
    fn what_cannot_run_in_a_transaction_is_never_wrapped() {
        let call = Work { writes: true, opaque: true, commits_itself: true, statements: 1, ..Work::default() };
        for work in [call, barrier(true, true, None), barrier(false, true, Some("db"))] {
            for (is_long, beside_ddl) in [(false, false), (true, false), (false, true), (true, true)] {
                assert!(!work.must_be_wrapped(is_long, beside_ddl), "{work:?} {is_long} {beside_ddl}");
            }
        }
    }

    /// Only what a rollback takes back altogether is run again.
    #[test]
    fn what_a_rollback_does_not_take_back_is_not_run_again() {
        let update = || Work { writes: true, statements: 1, ..Work::default() };
        assert!(update().leaves_nothing_behind() && barrier(false, false, None).leaves_nothing_behind());
        for work in [
            Work { opaque: true, ..update() },
            Work { commits_itself: true, ..update() },
            Work { waits_for_client: true, ..update() },
            Work { pins: Some(PinReason::AdvisoryLock), ..update() },
        ] {
            assert!(!work.leaves_nothing_behind(), "{work:?}");
        }
    }

    /// A batch is as dangerous as the most dangerous of its statements, whatever their order.
    #[test]
    fn a_batch_is_judged_by_all_its_statements() {
        let read = || Work { statements: 1, ..Work::nothing() };
        let update = || Work { writes: true, opaque: true, statements: 1, fingerprint: Some(1), ..Work::default() };
        for works in [[read(), update()], [update(), read()]] {
            let mut batch = Work::nothing();
            works.into_iter().for_each(|work| batch.add(work));
            assert!(batch.writes && batch.opaque && !batch.reads_only && !batch.only_looks);
            assert_eq!((batch.statements, batch.fingerprint), (2, None), "no single statement stands for it");
        }
        let mut batch = barrier(true, false, None);
        batch.add(barrier(false, true, Some("db")));
        let both = batch.barrier.expect("both are DDL");
        assert_eq!((both.harmless, both.alone, both.database.as_deref()), (false, true, Some("db")));
    }
}
