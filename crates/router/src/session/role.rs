//! What the servers know of a role: its verifier, which database it may enter, whether it may look at the router.
//!
//! The leader is asked, each time: what it has committed of passwords and rights counts from the next log-in on. While
//! it is away a follower is asked that has replayed all that the leader was last known to have written. Each answer to
//! a log-in says that anew: nothing is missing there but what the leader committed after its last probe, and what no
//! log-in has been told yet.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::backend::{Backend, BackendError, Credentials, Purpose, Row};
use crate::health::wal_position;
use crate::servers::{Health, Server};
use crate::settings::quote;
use crate::state::RouterState;
use crate::wire::{SqlError, sqlstate};

/// A server that does not answer within this is passed over.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// What a log-in depends on.
#[derive(Debug)]
pub(super) struct Admission {
    /// The stored password of a role that may log in.
    pub verifier: Option<String>,
    /// Its number (`pg_authid.oid`); 0 when there is no such role.
    pub role: u32,
    /// What the role finds under the name of its database. To be told only to who has proved to be the role.
    pub access: DatabaseAccess,
    /// The follower that was asked in the leader's place.
    pub asked_instead: Option<String>,
}

/// What a role finds under a database's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DatabaseAccess {
    /// It may enter.
    Open { is_template: bool },
    /// It lacks the right CONNECT.
    NotForRole,
    /// Nobody may enter (`datallowconn`).
    Closed,
    /// There is no such database.
    Missing,
}

impl DatabaseAccess {
    /// Of the columns behind the password.
    fn of(row: &[Option<String>]) -> DatabaseAccess {
        let is = |column: usize| row.get(column).and_then(Option::as_deref).map(|value| value == "t");
        match (is(1), is(2), is(3)) {
            (None, ..) => DatabaseAccess::Missing,
            (Some(false), ..) => DatabaseAccess::Closed,
            (_, Some(true), is_template) => DatabaseAccess::Open { is_template: is_template == Some(true) },
            _ => DatabaseAccess::NotForRole,
        }
    }

    /// Whether it is a template's; an error in PostgreSQL's words when the role may not enter.
    pub fn check(self, database: &str) -> Result<bool, SqlError> {
        let (code, text) = match self {
            DatabaseAccess::Open { is_template } => return Ok(is_template),
            DatabaseAccess::NotForRole => {
                let error = SqlError::fatal(
                    sqlstate::INSUFFICIENT_PRIVILEGE,
                    format!("permission denied for database \"{database}\""),
                );
                return Err(error.detail("User does not have CONNECT privilege."));
            }
            DatabaseAccess::Closed => {
                (sqlstate::OBJECT_NOT_IN_PREREQUISITE_STATE, "is not currently accepting connections")
            }
            DatabaseAccess::Missing => (sqlstate::INVALID_CATALOG_NAME, "does not exist"),
        };
        Err(SqlError::fatal(code, format!("database \"{database}\" {text}")))
    }
}

/// What the log-in of `user` to `database` depends on.
pub(super) async fn look_up_admission(
    router: &RouterState,
    user: &str,
    database: &str,
) -> Result<Admission, BackendError> {
    let sql = format!(
        "SELECT a.rolpassword, d.datallowconn, pg_catalog.has_database_privilege(a.oid, d.oid, 'CONNECT'), \
         d.datistemplate, a.oid FROM pg_catalog.pg_authid a LEFT JOIN pg_catalog.pg_database d ON d.datname = {} \
         WHERE a.rolname = {} AND a.rolcanlogin \
         AND (a.rolvaliduntil IS NULL OR a.rolvaliduntil > pg_catalog.now())",
        quote(database),
        quote(user)
    );
    let (row, asked_instead) = look_up(router, &sql).await?;
    let row = row.unwrap_or_default();
    let role = row.get(4).and_then(|oid| oid.as_deref()?.parse().ok()).unwrap_or_default();
    Ok(Admission { verifier: row.first().cloned().flatten(), role, access: DatabaseAccess::of(&row), asked_instead })
}

/// Whether the role may use the admin console.
pub(super) async fn may_look(router: &RouterState, user: &str) -> bool {
    let role = quote(user);
    let sql = format!("SELECT pg_catalog.pg_has_role({role}, 'pg_monitor', 'member')");
    matches!(
        look_up(router, &sql).await,
        Ok((Some(row), _)) if row.first().is_some_and(|value| value.as_deref() == Some("t"))
    )
}

/// The first row of a query in the maintenance database, and the follower's name that gave it in the leader's place.
async fn look_up(router: &RouterState, sql: &str) -> Result<(Option<Row>, Option<String>), BackendError> {
    let leader = router.servers.leader();
    let asked = tokio::select! {
        biased;
        // Those who wait for their turn to ask are let go together.
        () = leader.unresponsive() => Err(BackendError::TimedOut {
            server: leader.name.clone(),
            milliseconds: router.settings().server_timeout_ms.into(),
        }),
        asked = ask_leader(router, leader, sql) => asked,
    };
    let error = match asked {
        Ok(row) => return Ok((row, None)),
        Err(error) => error,
    };
    let written = leader.wal_position_bytes.load(Relaxed);
    let current = router.servers.current();
    let answers = |server: &&Arc<Server>| server.has_caught_up() && server.health() != Health::Unresponsive;
    // A leader that was never seen may have written anything.
    for server in current.followers.iter().filter(answers).filter(|_| written > 0) {
        let asked = ask_follower(server, &router.maintenance_database, written, sql);
        match in_time(server, asked).await {
            Ok(Some(rows)) => return Ok((rows.into_iter().next(), Some(server.name.clone()))),
            Ok(None) => {
                tracing::warn!(server = server.name, "lacks what the leader has written; roles are not looked up there")
            }
            Err(error) => tracing::debug!(%error, "roles cannot be looked up"),
        }
    }
    Err(error)
}

async fn in_time<T>(server: &Server, asked: impl Future<Output = Result<T, BackendError>>) -> Result<T, BackendError> {
    tokio::time::timeout(LOOK_UP_TIMEOUT, asked).await.unwrap_or_else(|_| {
        Err(BackendError::TimedOut { server: server.name.clone(), milliseconds: LOOK_UP_TIMEOUT.as_millis() })
    })
}

async fn ask_leader(router: &RouterState, leader: &Arc<Server>, sql: &str) -> Result<Option<Row>, BackendError> {
    let mut connection = router.verifiers.lock().await;
    // It goes back only after a whole answer: an answer left in it would be believed to be that of the next question.
    if let Some(mut backend) = connection.take()
        && backend.is_alive()
        && let Ok(rows) = in_time(leader, answer_of_leader(&mut backend, sql)).await
    {
        *connection = Some(backend);
        return Ok(rows.into_iter().next());
    }
    let asked = async {
        let credentials = Credentials::of_router(leader);
        let mut backend = Backend::connect(leader, &router.maintenance_database, &credentials, Purpose::Login).await?;
        let rows = answer_of_leader(&mut backend, sql).await?;
        Ok((backend, rows))
    };
    let (backend, rows) = in_time(leader, asked).await?;
    *connection = Some(backend);
    Ok(rows.into_iter().next())
}

/// The leader's answer, and how far it has written when it gives it: a follower that shows less is not asked later.
async fn answer_of_leader(backend: &mut Backend, sql: &str) -> Result<Vec<Row>, BackendError> {
    let rows = backend.rows(sql).await?;
    let written = wal_position(backend).await?;
    backend.server.note_wal_position(written);
    Ok(rows)
}

/// The answer of a follower that has replayed so many bytes; none of one that has not.
async fn ask_follower(
    follower: &Arc<Server>,
    database: &str,
    written: u64,
    sql: &str,
) -> Result<Option<Vec<Row>>, BackendError> {
    let credentials = Credentials::of_router(follower);
    let mut backend = Backend::connect(follower, database, &credentials, Purpose::Login).await?;
    let look = format!("SELECT pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_last_wal_replay_lsn(), '0/0') >= {written}");
    let replayed = backend.rows(&look).await?;
    if replayed.first().and_then(|row| row.first()?.as_deref()) != Some("t") {
        return Ok(None);
    }
    backend.rows(sql).await.map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever is not said to be allowed is refused, in PostgreSQL's words.
    ///
    /// Spec: C2
    #[test]
    fn a_door_is_open_only_when_the_server_says_so() {
        let row = |allows: Option<&str>, may: Option<&str>, template: Option<&str>| -> Row {
            [Some("SCRAM"), allows, may, template].map(|value| value.map(str::to_owned)).to_vec()
        };
        let (yes, no) = (Some("t"), Some("f"));
        for (row, entered) in [
            (row(yes, yes, no), Ok(false)),
            (row(yes, yes, yes), Ok(true)),
            (row(yes, no, no), Err("42501")),
            (row(yes, None, None), Err("42501")),
            (row(no, yes, yes), Err("55000")),
            (row(None, None, None), Err("3D000")),
            (Row::new(), Err("3D000")),
        ] {
            let access = DatabaseAccess::of(&row).check("shop").map_err(|error| error.code);
            assert_eq!(access, entered.map_err(str::to_owned), "{row:?}");
        }
    }
}
