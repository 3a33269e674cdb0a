//! DDL that is under way: who is kept off epochs meanwhile, and what its end dooms.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::database::Database;
use crate::epoch::{Creating, DdlBarrier, Dooming};
use crate::wire::{SqlError, sqlstate};

/// How long DDL waits for commits and single updates that are under way before it. Those that do not end by then have
/// opened their tables already, or wait for others.
const IN_FLIGHT_TIMEOUT: Duration = Duration::from_millis(100);

/// What a transaction's commit changes that no snapshot protects from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Nothing.
    Nothing,
    /// It changes what statements do: functions, operators, casts, triggers. Readers at older epochs go on.
    Defines,
    /// It makes relations of new names. Older epochs stay right for who does not look at them.
    Creates {
        /// It does that, too.
        defines: bool,
    },
    /// It changes what others may read: older epochs are wrong afterwards.
    Dooms,
}

/// DDL, or what may hide it, is under way while this lives. The parts end in their order: an epoch that was published
/// behind the barrier is doomed, and statements are classified anew, before anybody can take it.
#[derive(Debug)]
pub(super) struct DdlInProgress {
    dooming: Option<Dooming>,
    creating: Option<Creating>,
    catalog: Option<CatalogChange>,
    _ddl_barrier: Option<DdlBarrier>,
}

impl DdlInProgress {
    /// DDL in a transaction: it is nobody's business yet, but readers keep off epochs. Single updates that have not
    /// seen the barrier may get their snapshots now and their locks after the DDL, and nobody would ask them: they are
    /// let pass.
    pub(super) async fn begin(database: &Database) -> DdlInProgress {
        let ddl = DdlInProgress::barrier(database);
        database.commit_barrier.wait_for_in_flight(IN_FLIGHT_TIMEOUT).await;
        ddl
    }

    fn barrier(database: &Database) -> DdlInProgress {
        DdlInProgress {
            dooming: None,
            creating: None,
            catalog: None,
            _ddl_barrier: Some(database.epochs.begin_ddl_barrier()),
        }
    }

    /// What dooms epochs at any time from now on, until this ends.
    pub(super) async fn dooming(database: &Arc<Database>) -> DdlInProgress {
        DdlInProgress::begin(database).await.committing(Change::Dooms, database)
    }

    /// A transaction that has done so far what `before` says is about to commit `change`. Called inside the commit
    /// barrier.
    pub(super) fn of_commit(
        before: Option<DdlInProgress>,
        change: Change,
        database: &Arc<Database>,
    ) -> Option<DdlInProgress> {
        let nothing = DdlInProgress { dooming: None, creating: None, catalog: None, _ddl_barrier: None };
        match (before, change) {
            (None, Change::Nothing) => None,
            (None, Change::Defines | Change::Creates { .. }) => Some(nothing.committing(change, database)),
            (None, Change::Dooms) => Some(DdlInProgress::barrier(database).committing(change, database)),
            (Some(before), _) => Some(before.committing(change, database)),
        }
    }

    fn committing(mut self, change: Change, database: &Arc<Database>) -> DdlInProgress {
        self.dooming = (change == Change::Dooms).then(|| database.epochs.begin_dooming());
        self.creating = matches!(change, Change::Creates { .. }).then(|| database.epochs.begin_creating());
        self.catalog = Some(CatalogChange { database: Arc::downgrade(database), change });
        self
    }
}

/// Statements are classified anew when this ends.
#[derive(Debug)]
struct CatalogChange {
    database: Weak<Database>,
    change: Change,
}

impl Drop for CatalogChange {
    fn drop(&mut self) {
        if let Some(database) = self.database.upgrade() {
            database.catalog.changed(self.change == Change::Creates { defines: false });
        }
    }
}

/// What a reader is told whose snapshot DDL has made wrong.
pub(super) fn closed_by_ddl() -> SqlError {
    SqlError::error(sqlstate::SERIALIZATION_FAILURE, "the epoch of this read was closed by concurrent DDL")
        .hint("The transaction might succeed if retried.")
}
