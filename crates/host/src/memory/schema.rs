//! The extension's functions in the cluster's database, where the agent calls them; followers have them by replication.

use onecopy_postgres::{InstalledExtension, Server};
use tokio_postgres::Client;

use crate::{HostError, Progress};

/// The extension's name, and its library's.
pub(crate) const EXTENSION: &str = "onecopy";

/// The schema of the extension's functions. Clients own the database, so they may make objects in `public`: what a
/// superuser calls must not lie beside theirs.
const SCHEMA: &str = "onecopy_memory";

/// Makes the extension on the leader, or brings it to the installed version.
///
/// The new functions are of no use to a server that has loaded the module of before, and reach all servers by
/// replication: where this `up` `takes_over` any, those of before stay. The new module serves them, and the agent
/// understands them.
///
/// # Errors
/// [`HostError::Server`] when the leader is not reachable, [`HostError::Sql`] when it refuses to make it,
/// [`HostError::ForeignSchema`].
pub(super) async fn make_missing(
    name: &str,
    leader: &Server,
    extension: &InstalledExtension,
    takes_over: bool,
    progress: &dyn Progress,
) -> Result<(), HostError> {
    let client = leader.socket_connection().connect().await.map_err(HostError::server(name))?;
    let made = "SELECT extversion FROM pg_catalog.pg_extension WHERE extname = $1";
    let made = client.query_opt(made, &[&EXTENSION]).await;
    let Some(made) = made.map_err(HostError::sql(name, "look for the extension"))? else {
        check_schema(name, &client).await?;
        let statements = format!(
            "BEGIN; CREATE SCHEMA IF NOT EXISTS {SCHEMA}; CREATE EXTENSION {EXTENSION} SCHEMA {SCHEMA}; \
             GRANT USAGE ON SCHEMA {SCHEMA} TO pg_monitor; COMMIT"
        );
        return client.batch_execute(&statements).await.map_err(HostError::sql(name, "make the extension"));
    };
    let (made, installed) = (made.get::<_, String>(0), &extension.version);
    if made == *installed {
        return Ok(());
    }
    let stays = format!("the functions of the extension {EXTENSION} stay at version {made}");
    if takes_over {
        let remedy = format!("`onecopy down` and `onecopy up` bring them to {installed}");
        progress.notice(format!("{stays} while servers run that this `up` has not started; {remedy}"));
    } else if let Err(error) = client.batch_execute(&format!("ALTER EXTENSION {EXTENSION} UPDATE")).await {
        let error = HostError::sql(name, "update the extension")(error);
        progress.notice(format!("{stays}, and {installed} is installed: {error}"));
    }
    Ok(())
}

/// Refuses a schema into which somebody else than a superuser can put functions.
async fn check_schema(name: &str, client: &Client) -> Result<(), HostError> {
    let owner = "SELECT role.rolname::text FROM pg_catalog.pg_namespace namespace \
        JOIN pg_catalog.pg_roles role ON role.oid = nspowner WHERE nspname = $1 AND NOT role.rolsuper";
    match client.query_opt(owner, &[&SCHEMA]).await.map_err(HostError::sql(name, "look at the extension's schema"))? {
        Some(row) => Err(HostError::ForeignSchema { schema: SCHEMA, owner: row.get(0) }),
        None => Ok(()),
    }
}
