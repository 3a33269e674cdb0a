//! The table that canaries read and commits that have straddled a gate write: once a database, for nobody else.

use crate::backend::{Backend, BackendError};
use crate::wire::{ErrorFields, sqlstate};

const EXISTS: &str = "SELECT pg_catalog.to_regclass('onecopy_router.tripwire') IS NOT NULL";

const MAKE: &str = "CREATE SCHEMA IF NOT EXISTS onecopy_router; \
     CREATE UNLOGGED TABLE IF NOT EXISTS onecopy_router.tripwire (t bigint); \
     GRANT USAGE ON SCHEMA onecopy_router TO PUBLIC; \
     GRANT INSERT ON onecopy_router.tripwire TO PUBLIC";

/// One row of text for what is not as [`MAKE`] makes it. Who owns the schema can put anything in the table's place, who
/// owns the table can give it triggers, and a view is whatever its owner says. All of it runs as who reads or writes
/// there: the router's superuser and every client.
const FOREIGN: &str = "\
     SELECT pg_catalog.format('the schema onecopy_router belongs to %I, which is no superuser', rolname) \
     FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles o ON o.oid = n.nspowner \
     WHERE nspname = 'onecopy_router' AND NOT rolsuper \
     UNION ALL \
     SELECT CASE WHEN rolsuper THEN 'onecopy_router.tripwire is no plain table' \
         ELSE pg_catalog.format('onecopy_router.tripwire belongs to %I, which is no superuser', rolname) END \
     FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         JOIN pg_catalog.pg_roles o ON o.oid = c.relowner \
     WHERE nspname = 'onecopy_router' AND relname = 'tripwire' \
         AND (NOT rolsuper OR relkind <> 'r' OR relispartition OR relhassubclass \
             OR relhasrules OR relhastriggers OR relrowsecurity)";

/// Makes the tripwire in the database of `leader` if it is missing. One that others could change is not used.
///
/// # Errors
/// When the leader is lost or refuses it; [`BackendError::Sql`] where somebody else was there first.
pub(crate) async fn make_if_missing(leader: &mut Backend) -> Result<(), BackendError> {
    let exists = leader.rows(EXISTS).await?;
    if exists.first().and_then(|row| row.first()?.as_deref()) != Some("t") {
        refuse_foreign(leader).await?;
        leader.rows(MAKE).await?;
    }
    // Also of one just made: another may have come between.
    refuse_foreign(leader).await
}

async fn refuse_foreign(leader: &mut Backend) -> Result<(), BackendError> {
    let found = leader.rows(FOREIGN).await?;
    let Some(what) = found.into_iter().next().map(|row| row.into_iter().flatten().collect::<String>()) else {
        return Ok(());
    };
    let message = format!(
        "{what}: the router does not use it; as a superuser, past the router, DROP SCHEMA onecopy_router CASCADE in \
         this database, and the router makes it anew"
    );
    let code = sqlstate::OBJECT_NOT_IN_PREREQUISITE_STATE.to_owned();
    let fields = ErrorFields { severity: "ERROR".to_owned(), code, message, ..ErrorFields::default() };
    Err(BackendError::Sql { server: leader.server.name.clone(), fields })
}
