//! PostgreSQL's own programs, as the server's account runs them.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::servers::{DATABASE, PASSWORD, TestServer, USER};

/// Fills pgbench's tables.
///
/// # Errors
///
/// What pgbench said.
pub fn pgbench_initialize(server: &TestServer, scale: u32) -> anyhow::Result<()> {
    let mut command = connected(server, "pgbench");
    command.args(["--initialize", "--init-steps=dtGvp", "--quiet", "--scale"]).arg(scale.to_string()).arg(DATABASE);
    output(&mut command).map(drop)
}

/// `pg_basebackup` into `directory`, with a new slot; `moved` is where a tablespace lies, and where its copy shall lie.
///
/// # Errors
///
/// What the program said.
pub fn base_backup(
    source: &TestServer,
    directory: &Path,
    slot: &str,
    moved: &(PathBuf, PathBuf),
) -> anyhow::Result<()> {
    let mut command = connected(source, "pg_basebackup");
    command.arg("--pgdata").arg(directory).args(["--checkpoint=fast", "--create-slot", "--slot", slot]);
    command.arg(format!("--tablespace-mapping={}={}", moved.0.display(), moved.1.display()));
    output(&mut command).map(drop)
}

/// Verifies the checksum of every page of a server that does not run; gives back how many pages those were.
///
/// # Errors
///
/// Pages whose checksums are wrong, in the program's words; a server that runs.
pub fn checksums(server: &TestServer) -> anyhow::Result<u64> {
    let mut command = program(server, "pg_checksums");
    command.arg("--check").arg("--pgdata").arg(server.server.data_directory());
    let said = output(&mut command)?;
    let pages = said.lines().find_map(|line| line.strip_prefix("Blocks scanned:")?.trim().parse().ok());
    ensure!(said.contains("Bad checksums:  0"), "pg_checksums: {said}");
    pages.with_context(|| format!("pg_checksums: {said}"))
}

/// Verifies every table and index of every database, and that each index knows every row.
///
/// # Errors
///
/// What is damaged, in the program's words.
pub fn amcheck(server: &TestServer) -> anyhow::Result<()> {
    let mut command = connected(server, "pg_amcheck");
    // 18 gives notice of each unlogged index that it passes over on a standby.
    command.env("PGOPTIONS", "-c client_min_messages=warning");
    let said = output(command.args(["--all", "--heapallindexed", "--jobs=2"]))?;
    ensure!(said.trim().is_empty(), "pg_amcheck: {said}");
    Ok(())
}

fn program(server: &TestServer, name: &str) -> Command {
    let options = server.server.options();
    options.user.command(options.binaries.program(name))
}

pub(crate) fn connected(server: &TestServer, name: &str) -> Command {
    let mut command = program(server, name);
    command.args(["--host", "127.0.0.1", "--username", USER, "--port"]).arg(server.port().to_string());
    command.env("PGPASSWORD", PASSWORD);
    command
}

fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("{:?}", command.get_program()))?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success(), "{:?}: {}: {said}", command.get_program(), output.status);
    Ok(said)
}

/// Starts a server's own program on its data directory, as a person would; gives back what it said when it refused.
///
/// # Errors
///
/// It did not refuse.
pub fn start_by_hand(server: &TestServer) -> anyhow::Result<String> {
    let mut command = program(server, "pg_ctl");
    command.args(["start", "--wait", "--timeout=60", "--pgdata"]).arg(server.server.data_directory());
    let output = command.output()?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(!output.status.success(), "it started: {said}");
    Ok(said)
}
