//! DDL, in the open or hidden in code of users, and what becomes of others beside it.
//!
//! What is not MVCC is found in PostgreSQL's own books. A transaction that has changed a relation holds its ACCESS
//! EXCLUSIVE lock until it ends. A transaction that such a change has overtaken holds a lock of the relation as well,
//! and reads one file of it in the catalog of its snapshot and another one in the catalog of now.

use std::collections::VecDeque;
use std::time::Duration;

use super::batch_traits::BatchTraits;
use super::ddl_in_progress::{Change, closed_by_ddl};
use super::relay::{Ended, Hold, RelayError, Relayed, first_value};
use super::request::{Expected, put_own};
use super::transaction::LeaderTransaction;
use super::{Session, SessionEnd};
use crate::backend::Backend;
use crate::wire::SqlError;

macro_rules! overtaken {
    ($more:literal) => {
        concat!(
            "SELECT 1 FROM pg_catalog.pg_locks l \
             LEFT JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) l.relation \
             WHERE l.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid() \
             AND l.locktype OPERATOR(pg_catalog.=) 'relation' \
             AND (pg_catalog.pg_relation_filenode(l.relation) IS NOT NULL \
             AND (c.relfilenode OPERATOR(pg_catalog.<>) pg_catalog.pg_relation_filenode(l.relation)) IS NOT FALSE \
             AND (c.relfilenode OPERATOR(pg_catalog.<>) '0'::pg_catalog.oid) IS NOT FALSE \
             OR c.oid IS NULL AND pg_catalog.pg_table_is_visible(l.relation) IS NOT NULL)",
            $more,
            " LIMIT 1"
        )
    };
}

/// A row, if this transaction has opened a relation that got another file, or was made, after its snapshot: TRUNCATE, a
/// rewriting ALTER TABLE, CREATE. What it has changed itself its snapshot sees as it is. Relations without a file of
/// their own, as views, have none in either catalog: a new one is there now, and not in the snapshot's. Those whose
/// file is not in `pg_class` are never rewritten by users. *Not seen*: what only a block of a function has opened whose
/// exception was caught, as the lock has gone with the block, and what only parallel workers have.
const OVERTAKEN: &str = overtaken!("");

/// The same by a snapshot of the leader's own. Which of those may use an index that is not unique PostgreSQL says
/// there; of a unique one plans believe more than an older snapshot sees. Only of what the snapshot lacks the catalog
/// of now is asked: others may be dropping what they have locked.
pub(super) const OVERTAKEN_ON_LEADER: &str = overtaken!(
    " AND CASE WHEN c.oid IS NULL THEN \
     (pg_catalog.pg_get_indexdef(l.relation) OPERATOR(pg_catalog.^@) 'CREATE INDEX ') IS NOT TRUE \
     ELSE (c.relkind OPERATOR(pg_catalog.=) 'i' OR c.relkind OPERATOR(pg_catalog.=) 'I') IS NOT TRUE END"
);

/// Has deferred triggers run, for a look at what they have changed.
const RUN_DEFERRED: &str = "SET CONSTRAINTS ALL IMMEDIATE";

/// Of all relations that this transaction has locked as DDL and TRUNCATE do, and the tables of those that are indexes,
/// temporary ones aside: the condition that finds them, or others of their names, in the catalog that others see. One
/// that is dropped has no name any more, and whether it was temporary only others know. Some DDL locks no more than
/// ANALYZE does: of that what it has written into the catalog tells, which is no older than this transaction
/// (VALIDATE CONSTRAINT, and what gives a parent a child).
///
/// Before the condition `d`, or `-`: whether the transaction has written into the catalogs of what statements call, by
/// PostgreSQL's own count of that, in which those of the last second may still be. DDL holds no lock of those catalogs.
/// What changes constraints of domains or names of schemas is not seen, nor anything without `track_counts`.
const CHANGED: &str = "SELECT pg_catalog.concat(CASE WHEN \
         pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL AND \
         (SELECT pg_catalog.bool_or(pg_catalog.pg_stat_get_xact_tuples_inserted(w.id) OPERATOR(pg_catalog.>) 0 \
          OR pg_catalog.pg_stat_get_xact_tuples_updated(w.id) OPERATOR(pg_catalog.>) 0 \
          OR pg_catalog.pg_stat_get_xact_tuples_deleted(w.id) OPERATOR(pg_catalog.>) 0) \
          FROM (VALUES ('pg_catalog.pg_proc'::pg_catalog.regclass::pg_catalog.oid), \
            ('pg_catalog.pg_operator'::pg_catalog.regclass), ('pg_catalog.pg_cast'::pg_catalog.regclass), \
            ('pg_catalog.pg_trigger'::pg_catalog.regclass), ('pg_catalog.pg_event_trigger'::pg_catalog.regclass) \
          ) w(id)) THEN 'd' ELSE '-' END, \
         pg_catalog.string_agg(pg_catalog.concat('oid = ', l.relation, \
         ' OR relname = ' OPERATOR(pg_catalog.||) pg_catalog.quote_literal(c.relname::pg_catalog.text), \
         ' OR oid = ' OPERATOR(pg_catalog.||) i.indrelid), ' OR ')) \
     FROM pg_catalog.pg_locks l \
     LEFT JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) l.relation \
     LEFT JOIN pg_catalog.pg_index i ON i.indexrelid OPERATOR(pg_catalog.=) l.relation, \
     pg_catalog.age(pg_catalog.pg_current_xact_id_if_assigned()::pg_catalog.xid) own \
     WHERE l.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid() \
     AND l.locktype OPERATOR(pg_catalog.=) 'relation' \
     AND (c.relpersistence OPERATOR(pg_catalog.<>) 't') IS NOT FALSE \
     AND (l.mode OPERATOR(pg_catalog.=) 'AccessExclusiveLock' \
     OR l.mode OPERATOR(pg_catalog.=) 'ShareUpdateExclusiveLock' \
     AND (EXISTS (SELECT FROM pg_catalog.pg_constraint k WHERE k.conrelid OPERATOR(pg_catalog.=) l.relation \
     AND pg_catalog.age(k.xmin) OPERATOR(pg_catalog.<=) own) \
     OR EXISTS (SELECT FROM pg_catalog.pg_inherits h WHERE h.inhparent OPERATOR(pg_catalog.=) l.relation \
     AND pg_catalog.age(h.xmin) OPERATOR(pg_catalog.<=) own)))";

/// Bytes of such a condition. One that is longer is not asked for: others shall have been concerned.
const CONDITION_BYTES_MAX: usize = 64 * 1024;

/// The leader must tell what others see within this.
const OUTSIDE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a COMMIT was not sent.
#[derive(Debug)]
pub(super) enum NotSent {
    /// The transaction must be rolled back, and the client told why.
    Refused(SqlError),
    /// The leader was lost.
    Lost(RelayError),
}

impl Session {
    /// Whether a change of relations has overtaken the transaction: what `traits` has read, or what triggers have at
    /// its end, may be wrong. Asks the server only when something was changed since its snapshot, but then each time:
    /// it may open what was changed at any time.
    pub(super) async fn is_overtaken(
        &mut self,
        leader: &mut LeaderTransaction,
        traits: &BatchTraits,
    ) -> Result<Result<bool, RelayError>, SessionEnd> {
        let epochs = &self.database.epochs;
        let is_harmless = traits.statements == 1 && traits.ddl.as_ref().is_some_and(|ddl| ddl.harmless);
        if is_harmless || epochs.snapshot_stands(leader.snapshot.change_counter) {
            return Ok(Ok(false));
        }
        // What it has changed itself has the file of now in its own catalog; a savepoint that was taken back has let
        // its locks go.
        let has_changed = leader.has_ddl && traits.ddl.is_none() && traits.statements > 0;
        let may_have_let_go = traits.within_transaction && traits.statements > 1;
        if traits.lets_go || (has_changed || may_have_let_go) && epochs.is_older_than_a_doom(&leader.snapshot) {
            return Ok(Ok(true));
        }
        let relayed = match self.own_statement(&mut leader.backend, OVERTAKEN_ON_LEADER, false).await? {
            Ok(relayed) => relayed,
            Err(error) => return Ok(Err(error)),
        };
        Ok(Ok(relayed.own_error.is_some() || !relayed.own_rows.is_empty()))
    }

    /// Whether a transaction at an epoch has opened a relation that is newer than that, or may have with locks that it
    /// has let go. Asks the server only when there may be such a one.
    pub(super) async fn looks_at_what_is_newer(
        &mut self,
        backend: &mut Backend,
        change_counter: u64,
        traits: &BatchTraits,
    ) -> Result<bool, SessionEnd> {
        if self.database.epochs.snapshot_stands(change_counter) {
            return Ok(false);
        }
        if traits.lets_go {
            return Ok(true);
        }
        let looked = self.own_statement(backend, OVERTAKEN, false).await?;
        Ok(!looked.is_ok_and(|relayed| relayed.own_error.is_none() && relayed.own_rows.is_empty()))
    }

    /// Whether an error in a batch leaves something unasked that was read before it: the transaction goes on behind one
    /// of its savepoints, which lets the locks go that would tell.
    pub(super) fn leaves_unasked(&self, savepoints: usize, traits: &BatchTraits, change_counter: u64) -> bool {
        savepoints > 0 && traits.statements > 1 && !self.database.epochs.snapshot_stands(change_counter)
    }

    /// What the COMMIT of a transaction will change, after deferred triggers have run.
    pub(super) async fn change_of(
        &mut self,
        leader: &mut LeaderTransaction,
    ) -> Result<Result<Change, NotSent>, SessionEnd> {
        if !leader.opaque {
            return Ok(Ok(if leader.dooms { Change::Dooms } else { Change::Nothing }));
        }
        let mut expected = VecDeque::new();
        // What deferred triggers say is for the client.
        put_own(&mut leader.backend, RUN_DEFERRED, true, &mut expected);
        put_own(&mut leader.backend, CHANGED, false, &mut expected);
        let relayed = match self.own_statements(&mut leader.backend, expected).await? {
            Ok(Relayed { own_error: Some(fields), .. }) => {
                return Ok(Err(NotSent::Refused(SqlError::from(fields))));
            }
            Ok(relayed) => relayed,
            Err(error) => return Ok(Err(NotSent::Lost(error))),
        };
        // Its triggers have read as well.
        match self.is_overtaken(leader, &BatchTraits::nothing()).await? {
            Ok(false) => {}
            Ok(true) => return Ok(Err(NotSent::Refused(closed_by_ddl()))),
            Err(error) => return Ok(Err(NotSent::Lost(error))),
        }
        if leader.dooms {
            return Ok(Ok(Change::Dooms));
        }
        let found = first_value(relayed.own_rows.last());
        let (defines, condition) = (found.starts_with('d'), found.get(1..).unwrap_or_default());
        let is_dooming = !condition.is_empty() && !self.others_see_none(condition).await;
        Ok(Ok(match (is_dooming, condition.contains("relname")) {
            (true, _) => Change::Dooms,
            (false, true) => Change::Creates { defines },
            (false, false) if defines => Change::Defines,
            (false, false) => Change::Nothing,
        }))
    }

    /// Whether others see no relation of this condition. What nobody can tell is none that they do not see.
    async fn others_see_none(&self, condition: &str) -> bool {
        // A name that the client's encoding has hidden from us.
        if condition.len() > CONDITION_BYTES_MAX || condition.contains(char::REPLACEMENT_CHARACTER) {
            return false;
        }
        let sql = format!("SELECT 1 FROM pg_catalog.pg_class WHERE relpersistence <> 't' AND ({condition}) LIMIT 1");
        let asked = self.database.catalog.ask(&sql);
        matches!(tokio::time::timeout(OUTSIDE_TIMEOUT, asked).await, Ok(Ok(rows)) if rows.is_empty())
    }

    /// Runs a statement of the router's own on `backend`.
    pub(super) async fn own_statement(
        &mut self,
        backend: &mut Backend,
        sql: &str,
        heard: bool,
    ) -> Result<Result<Relayed, RelayError>, SessionEnd> {
        let mut expected = VecDeque::new();
        put_own(backend, sql, heard, &mut expected);
        self.own_statements(backend, expected).await
    }

    /// Carries what comes of statements of the router's own that are encoded.
    async fn own_statements(
        &mut self,
        backend: &mut Backend,
        expected: VecDeque<Expected>,
    ) -> Result<Result<Relayed, RelayError>, SessionEnd> {
        let Ended { result, .. } = self.relay(backend, expected, Hold::InCommitBarrier).await;
        self.statement_ended();
        match result {
            Err(RelayError::Client(error)) => Err(error.into()),
            result => Ok(result),
        }
    }
}
