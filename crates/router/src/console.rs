//! The admin console: `psql onecopy` on the router's port, in the manner of PgBouncer's.
//!
//! Open to superusers and members of `pg_monitor`. It only shows; it runs on simple queries, and needs no server.

use bytes::BytesMut;

use crate::session::ClientStatus;
use crate::state::RouterState;
use crate::status::RouterStatus;
use crate::wire::{Channel, ChannelError, Reply, SqlError, sql_of_query, sqlstate};

/// The name of the console among databases. A real database of this name cannot be reached through the router.
pub const DATABASE: &str = "onecopy";

/// What can be shown.
const SUBJECTS: [(&str, &str); 7] = [
    ("SHOW SERVERS", "servers: role, health, reads, share of reads, replay lag"),
    ("SHOW EPOCHS", "databases: newest epoch, its age, where it is open, how gates went"),
    ("SHOW POOLS", "databases: clients and idle back ends"),
    ("SHOW CLIENTS", "sessions: user, database, application, address, state, how long connected"),
    ("SHOW STATS", "counters since the router started"),
    ("SHOW VERSION", "the router's version"),
    ("SHOW HELP", "this"),
];

/// A table of text.
struct Table {
    columns: &'static [&'static str],
    rows: Vec<Vec<Option<String>>>,
}

/// Answers console commands until the client goes.
pub async fn serve(router: &RouterState, client: &mut Channel) -> Result<(), ChannelError> {
    client.output.parameter_status("server_version", concat!("15.0 (onecopy ", env!("CARGO_PKG_VERSION"), ")"));
    client.output.parameter_status("client_encoding", "UTF8");
    client.output.parameter_status("standard_conforming_strings", "on");
    client.output.ready_for_query(b'I');
    loop {
        client.flush().await?;
        let frame = client.frame().await?;
        match frame.tag {
            b'X' => return Ok(()),
            b'Q' => {
                let sql = sql_of_query(&frame).unwrap_or_default();
                let clients = || router.client_statuses();
                answer(&String::from_utf8_lossy(&sql), &RouterStatus::of(router), clients, &mut client.output);
                client.output.ready_for_query(b'I');
            }
            b'S' => client.output.ready_for_query(b'I'),
            _ => SqlError::error(sqlstate::FEATURE_NOT_SUPPORTED, "the console answers simple queries only")
                .hint("Use psql.")
                .encode(&mut client.output),
        }
    }
}

fn answer(sql: &str, status: &RouterStatus, clients: impl FnOnce() -> Vec<ClientStatus>, output: &mut BytesMut) {
    let words: Vec<String> =
        sql.trim_matches(|c: char| c.is_whitespace() || c == ';').split_whitespace().map(str::to_uppercase).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let table = match words.as_slice() {
        ["SHOW", "SERVERS"] => servers(status),
        ["SHOW", "EPOCHS"] => epochs(status),
        ["SHOW", "POOLS"] => pools(status),
        ["SHOW", "CLIENTS"] => clients_table(&clients()),
        ["SHOW", "STATS"] => stats(status),
        ["SHOW", "VERSION"] => {
            Table { columns: &["version"], rows: vec![text([concat!("onecopy ", env!("CARGO_PKG_VERSION"))])] }
        }
        [] | ["SHOW", "HELP"] | ["HELP"] => Table {
            columns: &["command", "shows"],
            rows: SUBJECTS.iter().map(|(command, shows)| text([*command, *shows])).collect(),
        },
        _ => {
            SqlError::error(sqlstate::SYNTAX_ERROR, format!("the console does not know {sql:?}"))
                .hint("SHOW HELP lists its commands.")
                .encode(output);
            return;
        }
    };
    output.text_columns(table.columns);
    for row in &table.rows {
        output.text_row(row);
    }
    output.command_complete("SHOW");
}

fn text<const N: usize>(values: [impl ToString; N]) -> Vec<Option<String>> {
    values.iter().map(|value| Some(value.to_string())).collect()
}

fn servers(status: &RouterStatus) -> Table {
    let row = |server: &crate::status::ServerStatus| {
        text([
            server.name.clone(),
            format!("{:?}", server.role).to_lowercase(),
            format!("{:?}", server.health).to_lowercase(),
            server.address.clone(),
            server.reads.to_string(),
            server.reads_in_flight.to_string(),
            server.read_share.to_string(),
            server.replay_lag_bytes.to_string(),
        ])
    };
    Table {
        columns: &["server", "role", "health", "address", "reads", "reads_in_flight", "read_share", "replay_lag_bytes"],
        rows: status.servers.iter().map(row).collect(),
    }
}

fn epochs(status: &RouterStatus) -> Table {
    let row = |database: &crate::status::DatabaseStatus| {
        let mut row = vec![
            Some(database.name.clone()),
            database.epoch.map(|epoch| epoch.to_string()),
            database.epoch_age_ms.map(|age| age.to_string()),
            database.epoch_commits_behind.map(|commits| commits.to_string()),
        ];
        row.extend(text([
            database.epoch_servers.join(", "),
            database.gates.epochs.to_string(),
            database.gates.gave_up.to_string(),
            database.gates.failed.to_string(),
            database.gates.gate_p50_microseconds.to_string(),
            database.gates.gate_p99_microseconds.to_string(),
            database.gates.tripwires.to_string(),
            database.gates.tripwire_aborts.to_string(),
        ]));
        row
    };
    Table {
        columns: &[
            "database",
            "epoch",
            "age_ms",
            "commits_behind",
            "servers",
            "gates",
            "gave_up",
            "failed",
            "gate_p50_us",
            "gate_p99_us",
            "tripwires",
            "tripwire_aborts",
        ],
        rows: status.databases.iter().map(row).collect(),
    }
}

fn pools(status: &RouterStatus) -> Table {
    let mut rows = Vec::new();
    for database in &status.databases {
        for (server, idle) in status.servers.iter().zip(&database.idle_readers) {
            let sessions = (server.role == crate::topology::Role::Leader).then_some(database.parked);
            let mut row = text([&database.name, &server.name]);
            row.extend([
                Some(database.clients.to_string()),
                Some(idle.to_string()),
                sessions.map(|idle| idle.to_string()),
            ]);
            rows.push(row);
        }
    }
    Table { columns: &["database", "server", "clients", "idle_readers", "idle_session_backends"], rows }
}

fn clients_table(clients: &[ClientStatus]) -> Table {
    let row = |client: &ClientStatus| {
        vec![
            Some(client.process_id.to_string()),
            Some(client.user.clone()),
            Some(client.database.clone()),
            client.application_name.clone(),
            client.address.map(|address| address.to_string()),
            Some(client.state.to_owned()),
            Some(client.connected.as_secs().to_string()),
        ]
    };
    Table {
        columns: &["pid", "user", "database", "application_name", "address", "state", "connected_s"],
        rows: clients.iter().map(row).collect(),
    }
}

fn stats(status: &RouterStatus) -> Table {
    let counters = [
        ("clients", status.clients as u64),
        ("logins", status.logins),
        ("refused", status.refused),
        ("reads", status.reads),
        ("updates", status.updates),
        ("read_retries", status.read_retries),
        ("update_retries", status.update_retries),
    ];
    Table {
        columns: &["counter", "value"],
        rows: counters.iter().map(|(name, value)| text([(*name).to_owned(), value.to_string()])).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_that_help_names_is_answered() {
        for (command, _) in SUBJECTS {
            let mut output = BytesMut::new();
            answer(&format!("{};", command.to_lowercase()), &RouterStatus::default(), Vec::new, &mut output);
            assert_eq!(output[0], b'T', "{command}");
        }
    }

    #[test]
    fn a_client_of_which_little_is_known_has_its_row() {
        let client = ClientStatus {
            process_id: 7,
            user: "anna".to_owned(),
            database: "shop".to_owned(),
            application_name: None,
            address: None,
            state: "idle",
            connected: std::time::Duration::from_millis(2500),
        };
        let table = clients_table(&[client]);
        let row: Vec<&str> = table.rows[0].iter().map(|value| value.as_deref().unwrap_or("-")).collect();
        assert_eq!(row, ["7", "anna", "shop", "-", "-", "idle", "2"]);
        assert_eq!(row.len(), table.columns.len());
    }

    #[test]
    fn what_it_does_not_know_is_an_error_with_a_remedy() {
        let mut output = BytesMut::new();
        answer("drop table x", &RouterStatus::default(), Vec::new, &mut output);
        assert_eq!(output[0], b'E');
    }
}
