//! `onecopy status`: the servers and the router of a running cluster.

use std::fmt::Write;
use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use onecopy_host::{ClusterStatus, ServerStatus};

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
                if self.watch && !self.json && std::io::stdout().is_terminal() {
                    // Source: ECMA-48, cursor to the first place and erase the display.
                    print!("\x1b[H\x1b[2J");
                }
                match self.json {
                    true => println!("{}", serde_json::to_string(&status)?),
                    false => print!("{}", table(&status)),
                }
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
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ =
        writeln!(text, "router   {}   daemon {}   {}", status.address, status.process_id, status.directory.display());
    let _ = writeln!(
        text,
        "{:<12} {:<9} {:<12} {:>8} {:<12} {:>12} {:>9}",
        "server", "role", "state", "process", "position", "lag", "restarts"
    );
    for server in &status.servers {
        line(server, &mut text);
    }
    text
}

fn line(server: &ServerStatus, text: &mut String) {
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let lag = server.replay_lag_bytes.map(|bytes| format!("{bytes} B"));
    let _ = writeln!(
        text,
        "{:<12} {:<9} {:<12} {:>8} {:<12} {:>12} {:>9}",
        server.name,
        server.role,
        server.replication.as_ref().filter(|_| server.state == "running").unwrap_or(&server.state),
        or_dash(server.process_id.map(|number| number.to_string())),
        or_dash(server.position.map(|position| position.to_string())),
        or_dash(lag),
        or_dash(server.restarts.map(|restarts| restarts.to_string())),
    );
    if let Some(problem) = &server.problem {
        let _ = writeln!(text, "  {problem}");
    }
}
