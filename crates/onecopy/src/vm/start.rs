//! `onecopy vm start`: a machine runs, and its server.

use clap::Args;
use onecopy_host::machines::Machines;
use onecopy_machine::MachineName;

use super::MachineOption;
use crate::output;
use crate::progress::Display;

/// Start a machine, and its PostgreSQL server, if it has one; returns when the guest answers
#[derive(Debug, Args)]
pub struct Start {
    #[command(flatten)]
    machine: MachineOption,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

impl Start {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let (name, machines) = (self.machine.name()?, self.machine.machines()?);
        crate::block_on(async { start(&machines, &name, &Display::choose(self.json)).await })
    }
}

/// Starts it, and tells how its server is reached.
pub async fn start(machines: &Machines, name: &MachineName, display: &Display) -> anyhow::Result<()> {
    let started = machines.start(name, display).await;
    display.finish();
    started?;
    if matches!(display, Display::Json) {
        return Ok(());
    }
    output::say(format_args!("The machine {name} runs."));
    tell(machines, name)
}

/// How it is reached.
pub fn tell(machines: &Machines, name: &MachineName) -> anyhow::Result<()> {
    if let Some(access) = machines.access(name)? {
        let password = access.password.as_deref().unwrap_or_default();
        let (user, host, port, database) = (&access.user, &access.host, access.port, &access.database);
        let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        output::say(format_args!("  connect   psql postgresql://{user}:{password}@{host}:{port}/{database}"));
    }
    output::say(format_args!("  work      onecopy vm exec {name} -- uname -a"));
    output::say(format_args!("  look      onecopy vm console {name} --follow"));
    output::say(format_args!("  stop      onecopy vm stop {name}"));
    Ok(())
}
