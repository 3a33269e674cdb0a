//! What a unit of work is, all its statements taken together.

use bytes::Bytes;

use crate::settings::Reach;
use crate::sql::{Action, Ddl, PinReason, Statement, fingerprint_hash};

/// One simple statement, or all that an extended batch executes between two of the router's own actions.
#[derive(Debug, Clone, Default)]
pub struct BatchTraits {
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
    /// Names may mean something else behind it, to who runs it.
    pub defines: bool,
    /// DDL or TRUNCATE.
    pub ddl: Option<Ddl>,
    /// The text of a SET or the like.
    pub setting: Option<String>,
    /// Waits for the client while it runs.
    pub waits_for_client: bool,
    /// Has a meaning only inside the session's transaction.
    pub within_transaction: bool,
    /// Takes back a part of its transaction.
    pub takes_back: bool,
    /// Takes back what it has executed itself before, and lets the locks of that go.
    pub lets_go: bool,
    /// How far settings reach that it may change for the rest of its transaction.
    pub local_settings: Reach,
    /// The leader alone can run it.
    pub acts_on_server: bool,
    /// Leaves session state.
    pub pins: Option<PinReason>,
    /// How many statements are executed.
    pub statements: usize,
    /// By what an update of one statement is remembered.
    pub fingerprint: Option<u64>,
    /// The text of a lone statement.
    pub text: Option<Bytes>,
}

impl BatchTraits {
    /// Nothing executed yet.
    pub fn nothing() -> BatchTraits {
        BatchTraits { reads_only: true, only_looks: true, ..BatchTraits::default() }
    }

    /// The work of one statement with this text; `sql` is the same as it is sent.
    pub fn of(statement: &Statement, text: &str, sql: &Bytes) -> BatchTraits {
        let Statement { pins, local_settings, defines, acts_on_server, .. } = *statement;
        let mut traits = BatchTraits { pins, local_settings, defines, acts_on_server, ..BatchTraits::default() };
        (traits.statements, traits.text) = (1, Some(sql.clone()));
        match &statement.action {
            Action::Read { own_transaction } => {
                traits.reads_only = true;
                traits.only_looks = true;
                traits.own_transaction = *own_transaction;
            }
            Action::Update { opaque, writes, commits_itself } => {
                traits.opaque = *opaque;
                traits.writes = *writes;
                traits.only_looks = !*writes && !*opaque && statement.pins.is_none();
                traits.commits_itself = *commits_itself;
            }
            Action::Ddl(ddl) => {
                traits.writes = true;
                traits.ddl = Some(ddl.clone());
            }
            Action::CopyIn => {
                traits.writes = true;
                // The table's triggers.
                traits.opaque = true;
                traits.waits_for_client = true;
            }
            Action::Declare { read, hold } => {
                traits.reads_only = *read && !*hold;
                // What FETCH runs is classified here, when its query is known.
                traits.writes = !*read;
                traits.opaque = !*read;
                traits.within_transaction = true;
            }
            Action::CursorUse | Action::Savepoint(_) | Action::RollbackTo(_) | Action::Release(_) => {
                // Inside a transaction they go where it is; what they do there was classified when the cursor was
                // declared.
                traits.reads_only = true;
                traits.within_transaction = true;
                traits.takes_back = matches!(statement.action, Action::RollbackTo(_));
            }
            Action::ExecutePrepared => {
                traits.writes = true;
                traits.opaque = true;
            }
            Action::Notify => traits.writes = true,
            _ => {}
        }
        if traits.writes {
            traits.fingerprint = Some(fingerprint_hash(text));
        }
        traits
    }

    /// Adds what is executed after it in the same batch.
    pub fn add(&mut self, other: BatchTraits) {
        let first = self.statements == 0;
        self.reads_only &= other.reads_only;
        self.only_looks &= other.only_looks;
        self.own_transaction |= other.own_transaction;
        self.writes |= other.writes;
        self.opaque |= other.opaque;
        self.within_transaction |= other.within_transaction;
        self.defines |= other.defines;
        self.lets_go |= other.lets_go || (other.takes_back && !first);
        self.takes_back |= other.takes_back;
        self.commits_itself |= other.commits_itself;
        self.waits_for_client |= other.waits_for_client;
        self.ddl = match (self.ddl.take(), other.ddl) {
            (Some(one), Some(two)) => Some(Ddl {
                // Of those that are not harmless the locks must tell all.
                told_by_locks: match one.harmless && two.harmless {
                    true => one.told_by_locks || two.told_by_locks,
                    false => (one.harmless || one.told_by_locks) && (two.harmless || two.told_by_locks),
                },
                harmless: one.harmless && two.harmless,
                alone: one.alone || two.alone,
                indexes_concurrently: one.indexes_concurrently || two.indexes_concurrently,
                database: one.database.or(two.database),
            }),
            (one, two) => one.or(two),
        };
        self.local_settings = self.local_settings.max(other.local_settings);
        self.acts_on_server |= other.acts_on_server;
        self.pins = self.pins.or(other.pins);
        self.statements += other.statements;
        self.fingerprint = if first { other.fingerprint } else { None };
        self.text = if first { other.text } else { None };
    }

    /// The same outside of any transaction, of a lone statement that the server may have refused inside of one: CLUSTER
    /// and REINDEX of a partitioned table commit behind each part.
    pub fn alone(&self) -> Option<BatchTraits> {
        let ddl = self.ddl.as_ref().filter(|ddl| ddl.harmless && self.statements == 1)?;
        Some(BatchTraits { ddl: Some(Ddl { alone: true, ..ddl.clone() }), ..self.clone() })
    }

    /// Whether it may run in a transaction that reads an epoch.
    pub fn fits_an_epoch(&self) -> bool {
        self.pins.is_none() && !self.opaque && self.ddl.is_none() && !self.waits_for_client && !self.acts_on_server
    }

    /// Whether nothing of it is left once its transaction is rolled back, so that it can be run again. Code of users
    /// may reach out of the database; what leaves session state has an effect although it fails.
    pub fn leaves_nothing_behind(&self) -> bool {
        !self.opaque && !self.commits_itself && !self.waits_for_client && self.pins.is_none()
    }

    /// Whether it must be wrapped in a transaction of the router's own rather than run whole in the commit barrier.
    /// `is_long`: its kind kept a gate from closing before. `beside_ddl`: DDL is going on, and an update must find out
    /// before its commit whether TRUNCATE has overtaken its snapshot.
    pub fn must_be_wrapped(&self, is_long: bool, beside_ddl: bool) -> bool {
        let alone = self.ddl.as_ref().is_some_and(|ddl| ddl.alone);
        let shall =
            self.opaque || self.ddl.is_some() || self.waits_for_client || is_long || (beside_ddl && self.writes);
        // Inside of a transaction these would be refused (2D000, 25001).
        shall && !self.commits_itself && !alone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ddl(harmless: bool, alone: bool, database: Option<&str>) -> BatchTraits {
        let database = database.map(str::to_owned);
        let ddl = Some(Ddl { harmless, alone, database, ..Ddl::HARMLESS });
        BatchTraits { writes: true, ddl, statements: 1, ..BatchTraits::default() }
    }

    /// An update runs whole in the commit barrier unless something speaks against it; then the commit barrier has only
    /// its COMMIT.
    #[test]
    fn what_could_hold_the_barrier_or_hide_ddl_is_wrapped() {
        let update = BatchTraits { writes: true, statements: 1, ..BatchTraits::default() };
        assert!(!update.must_be_wrapped(false, false));
        assert!(update.must_be_wrapped(true, false), "its kind kept a gate from closing");
        assert!(update.must_be_wrapped(false, true), "TRUNCATE may overtake its snapshot");
        assert!(BatchTraits { opaque: true, ..update.clone() }.must_be_wrapped(false, false));
        assert!(BatchTraits { waits_for_client: true, ..update.clone() }.must_be_wrapped(false, false));
        assert!(ddl(false, false, None).must_be_wrapped(false, false), "TRUNCATE dooms at its COMMIT");
        let read = BatchTraits { statements: 1, ..BatchTraits::nothing() };
        assert!(!read.must_be_wrapped(false, true), "a read has nothing to lose beside DDL");
    }

    /// CALL and DO that may commit, and DDL that stands alone, are refused by PostgreSQL inside of a transaction, so
    /// nothing that has happened before brings them into one.
    #[test]
    fn what_cannot_run_in_a_transaction_is_never_wrapped() {
        let call =
            BatchTraits { writes: true, opaque: true, commits_itself: true, statements: 1, ..BatchTraits::default() };
        for traits in [call, ddl(true, true, None), ddl(false, true, Some("db"))] {
            for (is_long, beside_ddl) in [(false, false), (true, false), (false, true), (true, true)] {
                assert!(!traits.must_be_wrapped(is_long, beside_ddl), "{traits:?} {is_long} {beside_ddl}");
            }
        }
    }

    /// Only what a rollback takes back altogether is run again.
    #[test]
    fn what_a_rollback_does_not_take_back_is_not_run_again() {
        let update = || BatchTraits { writes: true, statements: 1, ..BatchTraits::default() };
        assert!(update().leaves_nothing_behind() && ddl(false, false, None).leaves_nothing_behind());
        for traits in [
            BatchTraits { opaque: true, ..update() },
            BatchTraits { commits_itself: true, ..update() },
            BatchTraits { waits_for_client: true, ..update() },
            BatchTraits { pins: Some(PinReason::AdvisoryLock), ..update() },
        ] {
            assert!(!traits.leaves_nothing_behind(), "{traits:?}");
        }
    }

    /// A batch is as dangerous as the most dangerous of its statements, whatever their order.
    #[test]
    fn a_batch_is_classified_by_all_its_statements() {
        let read = || BatchTraits { statements: 1, ..BatchTraits::nothing() };
        let update = || BatchTraits {
            writes: true,
            opaque: true,
            statements: 1,
            fingerprint: Some(1),
            ..BatchTraits::default()
        };
        for batches in [[read(), update()], [update(), read()]] {
            let mut batch = BatchTraits::nothing();
            batches.into_iter().for_each(|traits| batch.add(traits));
            assert!(batch.writes && batch.opaque && !batch.reads_only && !batch.only_looks);
            assert_eq!((batch.statements, batch.fingerprint), (2, None), "no single statement stands for it");
        }
        let mut batch = ddl(true, false, None);
        batch.add(ddl(false, true, Some("db")));
        let both = batch.ddl.expect("both are DDL");
        assert_eq!((both.harmless, both.alone, both.database.as_deref()), (false, true, Some("db")));
        let of = |harmless, told_by_locks| BatchTraits {
            ddl: Some(Ddl { harmless, told_by_locks, ..Ddl::HARMLESS }),
            statements: 1,
            ..BatchTraits::default()
        };
        let (analyze, index, truncate, grant) = (of(true, false), of(true, true), of(false, true), of(false, false));
        for (one, two, together) in [
            (&analyze, &analyze, (true, false)),
            (&analyze, &index, (true, true)),
            (&analyze, &truncate, (false, true)),
            (&index, &truncate, (false, true)),
            (&index, &grant, (false, false)),
            (&truncate, &grant, (false, false)),
        ] {
            for (first, second) in [(one, two), (two, one)] {
                let mut batch = first.clone();
                batch.add(second.clone());
                let ddl = batch.ddl.expect("both are DDL");
                assert_eq!((ddl.harmless, ddl.told_by_locks), together, "{first:?} {second:?}");
            }
        }
    }
}
