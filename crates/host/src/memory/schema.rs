//! The extension's functions in the cluster's database, where the agent calls them; followers have them by replication.

use onecopy_postgres::{InstalledExtension, Server};
use tokio_postgres::Client;

use super::starting::EXTENSION;
use crate::HostError;

/// The schema of the extension's functions. Clients own the database, so they may make objects in `public`: what a superuser calls must not
/// lie beside theirs.
const SCHEMA: &str = "onecopy_memory";

/// Makes the extension on the leader, or brings it to the installed version.
///
/// # Errors
/// [`HostError::Server`] when the leader is not reachable, [`HostError::Sql`] when it refuses, [`HostError::ForeignSchema`].
pub(super) async fn make_missing(name: &str, leader: &Server, extension: &InstalledExtension) -> Result<(), HostError> {
    let client = leader.socket_connection().connect().await.map_err(HostError::server(name))?;
    let made = "SELECT extversion FROM pg_catalog.pg_extension WHERE extname = $1";
    let made = client.query_opt(made, &[&EXTENSION]).await;
    let statements = match made.map_err(HostError::sql(name, "look for the extension"))? {
        Some(row) if row.get::<_, String>(0) == extension.version => return Ok(()),
        Some(_) => format!("ALTER EXTENSION {EXTENSION} UPDATE"),
        None => {
            check_schema(name, &client).await?;
            format!(
                "BEGIN; CREATE SCHEMA IF NOT EXISTS {SCHEMA}; CREATE EXTENSION {EXTENSION} SCHEMA {SCHEMA}; \
                 GRANT USAGE ON SCHEMA {SCHEMA} TO pg_monitor; COMMIT"
            )
        }
    };
    client.batch_execute(&statements).await.map_err(HostError::sql(name, "make the extension"))
}

/// Refuses a schema into which somebody else than a superuser can put functions.
async fn check_schema(name: &str, client: &Client) -> Result<(), HostError> {
    let owner = "SELECT role.rolname::text FROM pg_catalog.pg_namespace namespace JOIN pg_catalog.pg_roles role ON role.oid = nspowner \
        WHERE nspname = $1 AND NOT role.rolsuper";
    match client.query_opt(owner, &[&SCHEMA]).await.map_err(HostError::sql(name, "look at the extension's schema"))? {
        Some(row) => Err(HostError::ForeignSchema { schema: SCHEMA, owner: row.get(0) }),
        None => Ok(()),
    }
}
