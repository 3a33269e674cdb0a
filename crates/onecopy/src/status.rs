//! `onecopy status`: the servers and the router of a running cluster.

use std::fmt::Write as _;

use clap::Args;
use indicatif::HumanBytes;
use onecopy_host::memory::MemorySummary;
use onecopy_host::{CloneStatus, ClusterStatus, MachineStatus};
use onecopy_memory::size;

use crate::directory::DirectoryOption;
use crate::machines;
use crate::watch::Watch;

/// Show the servers and the router
#[derive(Debug, Args)]
pub struct Status {
    #[command(flatten)]
    directory: DirectoryOption,
    #[command(flatten)]
    watch: Watch,
}

impl Status {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let directory = self.directory.resolve()?;
        crate::block_on(self.watch.show(async || onecopy_host::status(&directory).await, table))
    }
}

/// The status for people.
fn table(status: &ClusterStatus) -> String {
    let router = &status.router;
    let mut text = format!(
        "{} in {}, daemon {}\n{} clients, {} reads, {} updates, reads are {}\n",
        status.address,
        status.directory.display(),
        status.process_id,
        router.clients,
        router.reads,
        router.updates,
        router.freshness
    );
    if let Some(memory) = &status.memory {
        text.push_str(&memory_lines(memory));
    }
    server_lines(status, &mut text);
    if let Some(total) = &status.machines {
        let _ = writeln!(text, "{}", machines::total_line(total));
    }
    if !router.databases.is_empty() {
        database_lines(status, &mut text);
    }
    text
}

/// The servers' memory, on one line, and what is wrong with it.
fn memory_lines(memory: &MemorySummary) -> String {
    let (used, budget) = (size::text(memory.committed_bytes), size::text(memory.budget_bytes));
    let automatic = if memory.automatic { "automatic" } else { "set by hand" };
    let available = memory.available_bytes.map(|bytes| format!(", the host has {} left", size::text(bytes)));
    let notice = memory.notice.as_ref().map(|notice| format!("{notice}\n"));
    format!(
        "pools have {used} of {budget}, {automatic}{}\n{}\n",
        available.unwrap_or_default(),
        notice.unwrap_or_default()
    )
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
        if let Some(machine) = &server.machine {
            let _ = writeln!(text, "  {}", machine_line(machine));
            if machine.process_id.is_some() {
                let _ = writeln!(text, "  {}", machines::footprint_line(machine));
            }
        }
        if let Some(clone) = &server.clone {
            let _ = writeln!(text, "  {}", clone_line(clone));
        }
        if let Some(problem) = &server.problem {
            let _ = writeln!(text, "  {problem}");
        }
    }
}

/// How a server's machine is.
fn machine_line(machine: &MachineStatus) -> String {
    let available = machine.memory_available_bytes.map(|bytes| format!(", {} left", size::text(bytes)));
    let disk = match (machine.disk_process_id, machine.process_id) {
        (None, Some(_)) => "disk not served".to_owned(),
        _ => format!("disk {} of {}", size::text(machine.disk_used_bytes), size::text(machine.disk_bytes)),
    };
    let restarts = match machine.disk_restarts {
        0 => String::new(),
        times => format!(", its process restarted {times} times"),
    };
    let unresponsive = machine.unresponsive_s.map(|seconds| format!(" for {seconds} s")).unwrap_or_default();
    format!(
        "machine {}{unresponsive}, {} cpus, memory {}{} (not managed), {disk}{restarts}",
        machine.state,
        machine.processors,
        size::text(machine.memory_bytes),
        available.unwrap_or_default()
    )
}

/// How far a clone is.
fn clone_line(clone: &CloneStatus) -> String {
    if clone.whole {
        return if clone.way == "fork" { clone.way.clone() } else { format!("{} clone, whole", clone.way) };
    }
    let percent = 100.0 * clone.filled_ratio();
    let (filled, total) = (HumanBytes(clone.filled_bytes), HumanBytes(clone.total_bytes));
    let rate = HumanBytes(clone.rate_bytes_per_second);
    let left = clone.left_seconds.map(|seconds| format!(", {seconds} s left")).unwrap_or_default();
    format!(
        "{} clone, {percent:.1} % filled ({filled} of {total}), {rate}/s{left}, {} faults served",
        clone.way, clone.demand_faults
    )
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
