//! What the servers know of a role: its verifier, and whether it may look at the router.

use std::time::Duration;

use crate::backend::{Backend, BackendError, Credentials, Purpose};
use crate::settings::quote;
use crate::state::RouterState;

/// A server that does not answer within this is passed over.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// The stored password of a role that may log in, asked of the leader, or of a follower while the leader is gone.
pub(super) async fn look_up_verifier(router: &RouterState, user: &str) -> Result<Option<String>, BackendError> {
    let sql = format!(
        "SELECT rolpassword FROM pg_catalog.pg_authid WHERE rolname = {} AND rolcanlogin \
         AND (rolvaliduntil IS NULL OR rolvaliduntil > pg_catalog.now())",
        quote(user)
    );
    look_up(router, &sql).await
}

/// Whether the role may use the admin console.
pub(super) async fn may_look(router: &RouterState, user: &str) -> bool {
    let role = quote(user);
    let sql = format!("SELECT pg_catalog.pg_has_role({role}, 'pg_monitor', 'member')");
    matches!(look_up(router, &sql).await, Ok(Some(answer)) if answer == "t")
}

/// The first value of a query in the maintenance database.
async fn look_up(router: &RouterState, sql: &str) -> Result<Option<String>, BackendError> {
    let mut connection = router.verifiers.lock().await;
    // It goes back only after a whole answer: an answer left in it would be believed to be that of the next question.
    if let Some(mut backend) = connection.take()
        && backend.is_alive()
        && !backend.server.is_removed()
        && let Ok(Ok(rows)) = tokio::time::timeout(LOOK_UP_TIMEOUT, backend.rows(sql)).await
    {
        *connection = Some(backend);
        return Ok(rows.into_iter().next().and_then(|row| row.into_iter().next()?));
    }
    let mut first_error = None;
    for server in router.servers.current().iter().filter(|server| server.has_caught_up()) {
        let asked = async {
            let credentials = Credentials::of_router(server);
            let mut backend =
                Backend::connect(server, &router.maintenance_database, &credentials, Purpose::Login).await?;
            let rows = backend.rows(sql).await?;
            Ok::<_, BackendError>((backend, rows))
        };
        match tokio::time::timeout(LOOK_UP_TIMEOUT, asked).await {
            Ok(Ok((backend, rows))) => {
                *connection = Some(backend);
                return Ok(rows.into_iter().next().and_then(|row| row.into_iter().next()?));
            }
            Ok(Err(error)) => first_error = first_error.or(Some(error)),
            Err(_) => {
                first_error = first_error.or(Some(BackendError::TimedOut {
                    server: server.name.clone(),
                    milliseconds: LOOK_UP_TIMEOUT.as_millis(),
                }));
            }
        }
    }
    Err(first_error.expect("there is always a leader"))
}
