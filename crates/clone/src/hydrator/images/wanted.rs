//! What another host wants to have frozen, as far as this one does it on the other's word.
//!
//! The other host hands back how a superuser reaches the source, which came from here; whoever changed it on its way
//! must not have this process talk to somebody else, drop a slot of somebody else, or keep the log without end.

use std::net::{IpAddr, UdpSocket};

use onecopy_postgres::{ConnectionParameters, PostgresError, port_of};
use tokio::net::lookup_host;

use crate::CloneError;
use crate::network::WAL_KEEP_BYTES_MAX;
use crate::network::protocol::ProtocolError;
use crate::plan::{Plan, is_slot_name};

/// Why a plan is not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error(transparent)]
    Field(#[from] ProtocolError),
    #[error(transparent)]
    Source(#[from] CloneError),
}

/// The plan as this host goes by it.
pub(super) async fn take(plan: Plan) -> Result<Plan, Refusal> {
    let port = port_of(&plan.source.data_directory);
    let mut plan = take_fields(plan, port).await?;
    plan.wal_keep_bytes_max = plan.wal_keep_bytes_max.min(WAL_KEEP_BYTES_MAX);
    // It is asked of others by clones here alone.
    plan.source.replication = None;
    check_at_source(&plan).await?;
    Ok(plan)
}

/// Without asking the source.
async fn take_fields(mut plan: Plan, port: Option<u16>) -> Result<Plan, ProtocolError> {
    check_letters(&plan)?;
    if !is_slot_name(&plan.slot) {
        return Err(ProtocolError::not_taken(
            "slot",
            &plan.slot,
            "a slot's name has a-z, 0-9 and _, at most 63 of them",
        ));
    }
    let connection = &mut plan.source.connection;
    if port != Some(connection.port) {
        return Err(ProtocolError::not_taken("port", connection.port, "the source does not listen there"));
    }
    if !connection.host.starts_with('/') {
        // From here on it is an address: a name may mean another one when it is asked for again.
        connection.host = own_address(&connection.host).await?.to_string();
    }
    Ok(plan)
}

/// What is written into logs has no letter that begins a line of its own there, or does something to a terminal.
fn check_letters(plan: &Plan) -> Result<(), ProtocolError> {
    let connection = &plan.source.connection;
    let mut fields = vec![
        ("target", plan.target.to_string_lossy()),
        ("tablespaces", plan.tablespaces.to_string_lossy()),
        ("user_name", plan.user_name.as_str().into()),
    ];
    for connection in [connection].into_iter().chain(&plan.source.leader) {
        fields.push(("host", connection.host.as_str().into()));
        fields.push(("user", connection.user.as_str().into()));
        fields.push(("database", connection.database.as_str().into()));
        fields.push(("application_name", connection.application_name.as_deref().unwrap_or_default().into()));
    }
    match fields.into_iter().find(|(_, value)| value.chars().any(char::is_control)) {
        None => Ok(()),
        Some((field, value)) => Err(ProtocolError::not_taken(field, value, "it has a control character")),
    }
}

/// An address of this machine that `host` means.
async fn own_address(host: &str) -> Result<IpAddr, ProtocolError> {
    let found =
        lookup_host((host, 0)).await.map(|found| found.map(|address| address.ip()).collect()).unwrap_or(Vec::new());
    // Only an address that is one's own can be bound to.
    let own = found.into_iter().find(|address| UdpSocket::bind((*address, 0)).is_ok());
    own.ok_or_else(|| ProtocolError::not_taken("host", host, "the source is on this machine, and that is another one"))
}

/// The source says itself whom it follows, and which slots there are.
async fn check_at_source(plan: &Plan) -> Result<(), Refusal> {
    const QUERY: &str = "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1),
        current_setting('primary_conninfo', true)";
    let client = plan.source.connection.connect().await.map_err(CloneError::from)?;
    let row = client.query_one(QUERY, &[&plan.slot]).await.map_err(PostgresError::sql("ask the source what it is"));
    let row = row.map_err(CloneError::from)?;
    // Whose it is cannot be known here, whatever its name.
    if row.get(0) {
        let reason = "the source has a slot of this name: take another one (--slot), or drop that one on the source if \
            nobody needs it (pg_drop_replication_slot)";
        return Err(ProtocolError::not_taken("slot", &plan.slot, reason).into());
    }
    let Some(leader) = &plan.source.leader else { return Ok(()) };
    let followed = row.get::<_, Option<String>>(1).and_then(|text| text.parse::<ConnectionParameters>().ok());
    match followed.is_some_and(|followed| (&followed.host, followed.port) == (&leader.host, leader.port)) {
        true => Ok(()),
        false => Err(ProtocolError::not_taken("leader", leader, "it is not whom the source follows").into()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::network::server::tests::SourceHost;

    /// The source's host goes by what it knows of the source, not by what the clone's host hands back: no other machine
    /// or port is connected to, no slot that is there is dropped, also of two images that come at once (*not held* for
    /// one that another program makes in the instant before the service is killed), no line of the log is forged,
    /// images and freezes are counted together.
    ///
    /// Spec: C3
    #[tokio::test]
    async fn k23_another_machine_another_port_and_what_is_no_slot_are_refused() {
        let plan = tokio::task::spawn_blocking(|| {
            let directory = tempfile::tempdir().unwrap();
            SourceHost::new(&[1], 1, directory.path(), Duration::from_secs(1)).plan()
        });
        let plan = plan.await.unwrap();
        let with = |change: fn(&mut Plan)| {
            let mut plan = plan.clone();
            change(&mut plan);
            plan
        };
        let lies = [
            (with(|plan| plan.slot = "x'; DROP TABLE y; --".to_owned()), "slot \"x'; DROP"),
            (with(|plan| plan.slot = "../x".to_owned()), "slot \"../x\""),
            (with(|plan| plan.slot = "s".repeat(64)), "slot \"sss"),
            (with(|plan| plan.slot = String::new()), "slot \"\""),
            (with(|plan| plan.target = "/srv/x\nERROR forged".into()), "target \"/srv/x\\nERROR forged\""),
            (with(|plan| plan.tablespaces = "/srv/\u{1b}[2J".into()), "tablespaces \"/srv/\\u{1b}[2J\""),
            (with(|plan| plan.user_name = "x\ry".to_owned()), "user_name \"x\\ry\""),
            (with(|plan| plan.source.connection.user = "x\nERROR".to_owned()), "user \"x\\nERROR\""),
            (with(|plan| plan.source.connection.database = "x\0".to_owned()), "database \"x\\0\""),
            (
                with(|plan| plan.source.connection.application_name = Some("x\u{85}".to_owned())),
                "application_name \"x\\u{85}\"",
            ),
            (
                with(|plan| plan.source.leader = Some(plan.source.connection.with_database("x\ny"))),
                "database \"x\\ny\"",
            ),
            (with(|plan| plan.source.connection.port = 22), "port 22"),
            (with(|plan| plan.source.connection.host = "192.0.2.7".to_owned()), "host \"192.0.2.7\""),
            (with(|plan| plan.source.connection.host = "no such name".to_owned()), "host \"no such name\""),
        ];
        for (lie, named) in lies {
            let error = take_fields(lie, Some(5432)).await.unwrap_err().to_string();
            assert!(error.contains(named) && !error.contains('\n'), "{error}");
        }
        let error = take_fields(plan.clone(), None).await.unwrap_err().to_string();
        assert!(error.contains("does not listen"), "{error}");
        assert_eq!(take_fields(plan.clone(), Some(5432)).await.unwrap(), plan, "a socket is here in any case");
        let named = with(|plan| plan.source.connection.host = "127.0.0.1".to_owned());
        assert_eq!(take_fields(named.clone(), Some(5432)).await.unwrap(), named);
    }
}
