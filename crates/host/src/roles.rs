//! The roles of a new cluster.

use onecopy_postgres::Instance;

use crate::HostError;
use crate::secret::Secrets;

/// The superuser of the servers: the host and the router administer as this one.
pub const SUPERUSER: &str = "postgres";

/// Followers replicate as this one.
pub const REPLICATION: &str = "onecopy_replication";

/// Clients log in as this one. It may make tables and databases, from PostgreSQL 16 on roles, look at the router's
/// console, and is no superuser.
pub const CLIENT: &str = "onecopy";

/// Before PostgreSQL 16 who may make roles may grant them all roles that are no superusers, `pg_execute_server_program`
/// too, and so has the account of the server. From then on only those that he may administer.
///
/// Source: PostgreSQL 16, release notes, "Restrict the privileges of CREATEROLE".
const CREATEROLE_IS_BOUNDED: &str = "SELECT pg_catalog.current_setting('server_version_num')::int >= 160000";

/// The database for clients; it belongs to [`CLIENT`].
pub const DATABASE: &str = "postgres";

/// Makes the roles that are missing; one that exists keeps its password and its rights.
///
/// # Errors
/// [`HostError::Server`] when the leader is not reachable, [`HostError::Sql`] when it refuses.
pub async fn make_missing(name: &str, leader: &dyn Instance, secrets: &Secrets) -> Result<(), HostError> {
    let client = leader.administration().connect().await.map_err(HostError::server(name))?;
    let exists = async |role: &str| -> Result<bool, HostError> {
        let row = client.query_opt("SELECT FROM pg_catalog.pg_roles WHERE rolname = $1", &[&role]).await;
        Ok(row.map_err(HostError::sql(name, "look for a role"))?.is_some())
    };
    let run = async |action: &'static str, statement: String| -> Result<(), HostError> {
        // A statement that fails would stand in the server's log with its password.
        let quietly = format!(
            "BEGIN; SET LOCAL log_statement = 'none'; SET LOCAL log_min_error_statement = 'panic'; {statement}; COMMIT"
        );
        client.batch_execute(&quietly).await.map_err(HostError::sql(name, action))
    };
    // Passwords are letters and digits (`secret`): nothing in them needs quoting.
    if !exists(REPLICATION).await? {
        let password = &secrets.replication;
        run(
            "make the role for replication",
            format!("CREATE ROLE {REPLICATION} LOGIN REPLICATION PASSWORD '{password}'"),
        )
        .await?;
    }
    if !exists(CLIENT).await? {
        let password = &secrets.client;
        let bounded = client.query_one(CREATEROLE_IS_BOUNDED, &[]).await;
        let bounded = bounded.map_err(HostError::sql(name, "look at the version"))?.get(0);
        let makes_roles = if bounded { "CREATEROLE" } else { "NOCREATEROLE" };
        let statement = format!(
            "CREATE ROLE {CLIENT} LOGIN CREATEDB {makes_roles} PASSWORD '{password}'; GRANT pg_monitor TO {CLIENT}; \
             ALTER DATABASE {DATABASE} OWNER TO {CLIENT}"
        );
        run("make the role for clients", statement).await?;
    }
    Ok(())
}
