//! What a clone must know of a server that somebody else started.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use onecopy_clone::plan::SourceServer;
use onecopy_postgres::{
    AccessRule, Binaries, ConnectionParameters, ControlFile, Directory, RuleKind, ServiceUser, Settings,
};
use tokio_postgres::Client;

/// Settings of the source that a clone beside it must not have: places, addresses, TLS, archiving, where logs go, who
/// it follows. Those that begin so, too.
const OWN_SETTINGS: [&str; 30] = [
    "data_directory",
    "hba_file",
    "ident_file",
    "config_file",
    "external_pid_file",
    "listen_addresses",
    "port",
    "unix_socket_",
    "ssl",
    "krb_",
    "archive_",
    "restore_command",
    "log_destination",
    "log_directory",
    "log_file",
    "log_rotation",
    "log_truncate",
    "logging_collector",
    "syslog_",
    "event_source",
    "primary_",
    "recovery_",
    "promote_trigger_file",
    "synchronous_standby_names",
    "cluster_name",
    "stats_temp_directory",
    "transaction_",
    "in_hot_standby",
    "hot_standby",
    "bonjour",
];

/// A running server.
pub struct Source {
    /// How it is reached and where its data is.
    pub server: SourceServer,
    /// The programs that it runs from.
    pub binaries: Binaries,
    /// The account that it runs as.
    pub user: ServiceUser,
    /// What it was configured with, but for [`OWN_SETTINGS`].
    pub settings: Settings,
    /// Who may log in to it.
    pub access_rules: Vec<AccessRule>,
    /// Lines of its `pg_hba.conf` that the clone cannot have.
    pub left_out: Vec<String>,
    /// Where its Unix socket is, and the port in its name.
    pub socket_directory: PathBuf,
    port: u16,
}

impl Source {
    /// Asks the server behind a data directory or a connection string.
    pub async fn ask(source: &str) -> anyhow::Result<Source> {
        let connection = connection_of(source)?.with_application_name("onecopy clone");
        let client = connection.connect().await?;
        let data_directory = PathBuf::from(show(&client, "data_directory").await?);
        check_local(&client, &data_directory).await?;
        let port: u16 = show(&client, "port").await?.parse().context("the source's port is none")?;
        let process = postmaster(&data_directory)?;
        let program = fs::read_link(format!("/proc/{process}/exe"))
            .with_context(|| format!("cannot see which program the source (process {process}) runs"))?;
        let user = ServiceUser::owner_of(&data_directory)?;
        // That account names the process.
        let binaries = Binaries::in_directory_of(program.parent().unwrap_or(Path::new("/")), &user)?;
        let leader = leader_of(&client, &connection).await?;
        let (access_rules, left_out) = access_rules(&client).await?;
        let sockets = show(&client, "unix_socket_directories").await?;
        let socket_directory = sockets.split(',').next().unwrap_or_default().trim().trim_matches('"');
        let socket_directory = if socket_directory.is_empty() { "/tmp" } else { socket_directory };
        Ok(Source {
            settings: settings(&client).await?,
            server: SourceServer { connection, data_directory, leader, replication: None },
            socket_directory: PathBuf::from(socket_directory),
            binaries,
            user,
            access_rules,
            left_out,
            port,
        })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The next port above the source's at which nobody listens.
    pub fn next_free_port(&self) -> anyhow::Result<u16> {
        let is_free = |port: &u16| {
            let socket = self.socket_directory.join(format!(".s.PGSQL.{port}"));
            !socket.exists() && TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()
        };
        let free = (self.port.saturating_add(1)..=u16::MAX).find(is_free);
        free.with_context(|| format!("no port above {} is free; give one with --port", self.port))
    }
}

/// A connection string, or that of the server in a data directory with `$PGUSER` and `$PGPASSWORD`.
pub fn connection_of(source: &str) -> anyhow::Result<ConnectionParameters> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let directory = Path::new(source);
    if !directory.is_dir() {
        let mut parameters: ConnectionParameters = source.parse().with_context(|| {
            format!("{source:?} is neither a directory nor a connection string (postgresql://USER@HOST:PORT/DATABASE)")
        })?;
        parameters.password = parameters.password.or_else(|| variable("PGPASSWORD"));
        return Ok(parameters);
    }
    let path = directory.join("postmaster.pid");
    let text =
        pid_file(directory).with_context(|| format!("no server runs in {source}: cannot read {}", path.display()))?;
    // Source: PostgreSQL, src/include/utils/pidfile.h: port, socket directory, first address are the lines 4, 5 and 6.
    let line = |number: usize| text.lines().nth(number - 1).map(str::trim).filter(|line| !line.is_empty());
    let port = line(4).and_then(|port| port.parse().ok()).context("the server is only starting")?;
    let user = variable("PGUSER").unwrap_or_else(|| "postgres".to_owned());
    Ok(ConnectionParameters {
        host: line(5).or(line(6)).unwrap_or("127.0.0.1").to_owned(),
        port,
        password: variable("PGPASSWORD"),
        database: variable("PGDATABASE").unwrap_or_else(|| "postgres".to_owned()),
        user,
        application_name: None,
    })
}

async fn show(client: &Client, setting: &str) -> anyhow::Result<String> {
    let row = client.query_one("SELECT pg_catalog.current_setting($1)", &[&setting]).await;
    Ok(row.with_context(|| format!("the source does not tell its {setting}"))?.get(0))
}

/// Refuses a server of another machine and a role that may not clone it.
async fn check_local(client: &Client, data_directory: &Path) -> anyhow::Result<()> {
    let question = "SELECT system_identifier, (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = CURRENT_USER) \
        FROM pg_catalog.pg_control_system()";
    let row = client.query_one(question, &[]).await.context("the source does not tell who it is")?;
    ensure!(row.get::<_, bool>(1), "the role of the connection string is no superuser of the source; give one that is");
    let identifier = row.get::<_, i64>(0).cast_unsigned();
    let control = ControlFile::read(data_directory).with_context(|| {
        format!(
            "the source's data directory {} is not on this machine; for another host: --to",
            data_directory.display()
        )
    })?;
    ensure!(
        control.system_identifier == identifier,
        "{} on this machine belongs to another server than the source",
        data_directory.display()
    );
    Ok(())
}

fn pid_file(data_directory: &Path) -> std::io::Result<String> {
    Directory::open(data_directory)?.read_to_string(Path::new("postmaster.pid"))
}

fn postmaster(data_directory: &Path) -> anyhow::Result<u32> {
    let path = data_directory.join("postmaster.pid");
    let text = pid_file(data_directory).with_context(|| format!("cannot read {}", path.display()))?;
    text.lines()
        .next()
        .and_then(|line| line.trim().parse().ok())
        .with_context(|| format!("{} names no process", path.display()))
}

/// The primary of a standby: where it says, with the role that we have here.
async fn leader_of(client: &Client, connection: &ConnectionParameters) -> anyhow::Result<Option<ConnectionParameters>> {
    let row =
        client.query_one("SELECT pg_catalog.pg_is_in_recovery()", &[]).await.context("the source does not answer")?;
    if !row.get::<_, bool>(0) {
        return Ok(None);
    }
    let primary: ConnectionParameters = show(client, "primary_conninfo")
        .await?
        .parse()
        .context("the source is a standby, and its primary_conninfo cannot be understood")?;
    Ok(Some(ConnectionParameters { host: primary.host, port: primary.port, ..connection.clone() }))
}

/// What the source was configured with.
async fn settings(client: &Client) -> anyhow::Result<Settings> {
    let question = "SELECT name, pg_catalog.current_setting(name) FROM pg_catalog.pg_settings \
        WHERE source IN ('configuration file', 'command line', 'environment variable') AND context <> 'internal'";
    let rows = client.query(question, &[]).await.context("the source does not tell its settings")?;
    let mut settings = Settings::new();
    for row in rows {
        let (name, value): (String, String) = (row.get(0), row.get(1));
        if !is_own(&name) {
            settings.set(&name, value);
        }
    }
    Ok(settings)
}

/// Whether each server has this setting for itself.
fn is_own(name: &str) -> bool {
    OWN_SETTINGS.iter().any(|own| name.starts_with(own))
}

/// The lines of the source's `pg_hba.conf`, and those that a clone without TLS cannot have.
async fn access_rules(client: &Client) -> anyhow::Result<(Vec<AccessRule>, Vec<String>)> {
    let question = "SELECT type, database, user_name, address, netmask, auth_method, options, line_number, error \
        FROM pg_catalog.pg_hba_file_rules ORDER BY line_number";
    let rows = client.query(question, &[]).await.context("the source does not tell its access rules")?;
    let (mut rules, mut left_out) = (Vec::new(), Vec::new());
    for row in rows {
        let text = |column: usize| row.get::<_, Option<String>>(column).unwrap_or_default();
        let list = |column: usize| row.get::<_, Option<Vec<String>>>(column).unwrap_or_default();
        let kind = match text(0).as_str() {
            "local" => RuleKind::Local,
            "host" | "hostnossl" | "hostnogssenc" => RuleKind::Host,
            other => {
                left_out.push(format!("line {} ({other})", row.get::<_, i32>(7)));
                continue;
            }
        };
        if let Some(error) = row.get::<_, Option<String>>(8) {
            bail!("line {} of the source's pg_hba.conf is wrong: {error}", row.get::<_, i32>(7));
        }
        let mut method = text(5);
        for option in list(6) {
            method.push_str(&format!(" {option}"));
        }
        let address = [text(3), text(4)].join(" ").trim().to_owned();
        for database in list(1) {
            for user in list(2) {
                let (database, address, method) = (database.clone(), address.clone(), method.clone());
                rules.push(AccessRule { kind, database, user, address, method });
            }
        }
    }
    Ok((rules, left_out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_ways_of_the_source_are_its_own() {
        for own in ["port", "ssl_cert_file", "archive_command", "unix_socket_directories", "hot_standby_feedback"] {
            assert!(is_own(own), "{own}");
        }
        for common in ["shared_buffers", "work_mem", "max_connections", "log_min_duration_statement", "log_line_prefix"]
        {
            assert!(!is_own(common), "{common}");
        }
    }

    #[test]
    fn what_is_no_source_is_refused() {
        for wrong in ["/nonexistent/data", "just words"] {
            assert!(connection_of(wrong).is_err(), "{wrong}");
        }
        let directory = tempfile::tempdir().unwrap();
        let error = connection_of(directory.path().to_str().unwrap()).unwrap_err().to_string();
        assert!(error.contains("no server runs in"), "{error}");
    }
}
