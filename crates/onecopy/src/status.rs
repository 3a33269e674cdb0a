//! `onecopy status`: the servers and the router of a running cluster.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::time::Duration;

use clap::Args;
use onecopy_host::ClusterStatus;

use crate::directory::DirectoryOption;

/// How often `--watch` looks.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Show the servers and the router
#[derive(Debug, Args)]
pub struct Status {
    #[command(flatten)]
    directory: DirectoryOption,
    /// Everything, as one JSON document
    #[arg(long)]
    json: bool,
    /// Again every second, until Ctrl-C
    #[arg(long)]
    watch: bool,
}

impl Status {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let directory = self.directory.resolve()?;
        crate::block_on(async {
            loop {
                let status = onecopy_host::status(&directory).await?;
                let mut output = std::io::stdout().lock();
                if self.watch && !self.json && output.is_terminal() {
                    // Source: ECMA-48, cursor to the first place and erase the display.
                    output.write_all(b"\x1b[H\x1b[2J")?;
                }
                match self.json {
                    true => writeln!(output, "{}", serde_json::to_string(&status)?)?,
                    false => output.write_all(table(&status).as_bytes())?,
                }
                output.flush()?;
                drop(output);
                if !self.watch {
                    return Ok(());
                }
                tokio::time::sleep(WATCH_INTERVAL).await;
            }
        })
    }
}

/// The status for people.
fn table(status: &ClusterStatus) -> String {
    let router = &status.router;
    let mut text = format!(
        "{} in {}, daemon {}\n{} clients, {} reads, {} updates, reads are {}\n\n",
        status.address,
        status.directory.display(),
        status.process_id,
        router.clients,
        router.reads,
        router.updates,
        router.freshness
    );
    server_lines(status, &mut text);
    if !router.databases.is_empty() {
        database_lines(status, &mut text);
    }
    text
}

fn server_lines(status: &ClusterStatus, text: &mut String) {
    // Writing to a String cannot fail, here and below.
    let _ = writeln!(
        text,
        "{:<12} {:<9} {:<14} {:>8} {:<12} {:>10} {:>10} {:>8}",
        "server", "role", "state", "process", "position", "lag", "reads", "restarts"
    );
    for server in &status.servers {
        let reads = status.router.servers.iter().find(|routed| routed.name == server.name).map(|routed| routed.reads);
        let _ = writeln!(
            text,
            "{:<12} {:<9} {:<14} {:>8} {:<12} {:>10} {:>10} {:>8}",
            server.name,
            server.role,
            server.replication.as_ref().filter(|_| server.state == "running").unwrap_or(&server.state),
            or_dash(server.process_id),
            or_dash(server.position),
            or_dash(server.replay_lag_bytes.map(|bytes| format!("{bytes} B"))),
            or_dash(reads),
            or_dash(server.restarts),
        );
        if let Some(problem) = &server.problem {
            let _ = writeln!(text, "  {problem}");
        }
    }
}

fn database_lines(status: &ClusterStatus, text: &mut String) {
    let _ = writeln!(
        text,
        "\n{:<12} {:>7} {:>9} {:>8} {:>10} {:>9} {:>9} {:>8}",
        "database", "clients", "epoch age", "servers", "commits", "gates", "gate p50", "tripped"
    );
    for database in &status.router.databases {
        let _ = writeln!(
            text,
            "{:<12} {:>7} {:>9} {:>8} {:>10} {:>9} {:>9} {:>8}",
            database.name,
            database.clients,
            or_dash(database.epoch_age_ms.map(|age| format!("{age} ms"))),
            database.epoch_servers.len(),
            database.commits,
            database.gates.epochs,
            format!("{:.1} ms", database.gates.gate_p50_microseconds as f64 / 1000.0),
            database.gates.tripwire_aborts,
        );
    }
}

/// What is known, or a dash.
fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}
