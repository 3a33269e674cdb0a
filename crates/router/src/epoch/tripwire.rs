//! The table that canaries read and commits that have straddled a gate write: once a database, for nobody else.

use crate::backend::{Backend, BackendError};

const EXISTS: &str = "SELECT pg_catalog.to_regclass('onecopy_router.tripwire') IS NOT NULL";

const MAKE: &str = "CREATE SCHEMA IF NOT EXISTS onecopy_router; \
     CREATE UNLOGGED TABLE IF NOT EXISTS onecopy_router.tripwire (t bigint); \
     GRANT USAGE ON SCHEMA onecopy_router TO PUBLIC; \
     GRANT INSERT ON onecopy_router.tripwire TO PUBLIC";

/// Makes the tripwire in the database of `leader` if it is missing.
///
/// # Errors
/// When the leader is lost or refuses it.
pub(crate) async fn make_if_missing(leader: &mut Backend) -> Result<(), BackendError> {
    let exists = leader.rows(EXISTS).await?;
    if exists.first().and_then(|row| row.first()?.as_deref()) != Some("t") {
        leader.rows(MAKE).await?;
    }
    Ok(())
}
