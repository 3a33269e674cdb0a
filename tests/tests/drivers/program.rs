//! Runs a program against a cluster, in a directory of its own, and gives what it printed.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, ensure};
use onecopy_postgres::Binaries;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::{DATABASE, PASSWORD, USER};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// A program that has not ended by then hangs.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(400);

/// A command whose libpq finds the router.
pub fn command(program: impl AsRef<std::ffi::OsStr>, cluster: &TestCluster) -> Command {
    let address = cluster.router().local_address();
    let mut command = Command::new(program);
    command
        .env("PGHOST", address.ip().to_string())
        .env("PGPORT", address.port().to_string())
        .env("PGUSER", USER)
        .env("PGPASSWORD", PASSWORD)
        .env("PGDATABASE", DATABASE)
        .env("PGCONNECT_TIMEOUT", "60")
        .env_remove("PGSERVICE")
        .kill_on_drop(true);
    command
}

/// One of PostgreSQL's own programs.
pub fn postgresql(name: &str, cluster: &TestCluster) -> anyhow::Result<Command> {
    let path = Binaries::find(None)?.directory().join(name);
    Ok(command(path, cluster))
}

/// What a program printed.
#[derive(Debug)]
pub struct Printed {
    pub success: bool,
    pub output: String,
    pub errors: String,
}

/// Runs it to its end with `input`.
pub async fn run(mut command: Command, input: &str) -> anyhow::Result<Printed> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("the program does not start; scripts/setup.sh installs it")?;
    let mut pipe = child.stdin.take().context("it has an input")?;
    let written = async {
        // A program that ends before it has read everything says why itself.
        let _ = pipe.write_all(input.as_bytes()).await;
        drop(pipe);
    };
    let both = async { tokio::join!(child.wait_with_output(), written).0 };
    let output = tokio::time::timeout(PROGRAM_TIMEOUT, both).await.context("the program hangs")??;
    Ok(Printed {
        success: output.status.success(),
        output: String::from_utf8_lossy(&output.stdout).into_owned(),
        errors: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// The same, for a program that must succeed; gives its output.
pub async fn run_well(command: Command, input: &str) -> anyhow::Result<String> {
    let printed = run(command, input).await?;
    ensure!(printed.success, "the program failed: {}{}", printed.output, printed.errors);
    Ok(printed.output)
}

/// Where the sources of the drivers' programs are.
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/drivers").join(name)
}
