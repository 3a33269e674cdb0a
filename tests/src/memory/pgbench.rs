//! pgbench as a load: a child process that is checked by what it says at its end.

use std::io::Write;
use std::process::Stdio;

use anyhow::{Context, ensure};
use tokio::process::{Child, Command};

use crate::clones::programs;
use crate::servers::{DATABASE, TestServer};

/// What the clients of a run do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Script {
    /// pgbench's own: one account by its key.
    SelectOnly,
    /// pgbench's own: three updates, a read, an insert.
    Tpcb,
    /// A script of pgbench's language.
    Own(String),
}

impl Script {
    /// One row of [`crate::memory::pages`] out of so many, all equally likely.
    pub fn uniform_pages(rows: u64) -> Script {
        Script::Own(format!("\\set id random(1, {rows})\nSELECT length(body) + changes FROM pages WHERE id = :id;\n"))
    }

    /// The same with rows in the middle far more likely than those at the ends.
    pub fn gaussian_pages(rows: u64) -> Script {
        Script::Own(format!(
            "\\set id random_gaussian(1, {rows}, 4)\nSELECT length(body) + changes FROM pages WHERE id = :id;\n"
        ))
    }

    /// Updates rows of [`crate::memory::pages`] that do not grow: their pages become dirty and stay theirs.
    pub fn update_pages(rows: u64) -> Script {
        Script::Own(format!("\\set id random(1, {rows})\nUPDATE pages SET changes = changes + 1 WHERE id = :id;\n"))
    }
}

/// When a run ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// After so many seconds.
    Seconds(u64),
    /// After so many transactions of each client.
    Transactions(u64),
}

/// A run.
#[derive(Debug)]
pub struct Pgbench {
    child: Child,
    _script: Option<tempfile::NamedTempFile>,
}

impl Pgbench {
    /// Starts one; it is killed with the value.
    ///
    /// # Errors
    ///
    /// The program is not there.
    pub fn start(server: &TestServer, script: &Script, clients: u32, until: Until) -> anyhow::Result<Pgbench> {
        let mut command = programs::connected(server, "pgbench");
        // A thread for each: pgbench waits for PREPARE, and that for a VACUUM FULL which may wait for another client of
        // the same thread.
        let clients = clients.to_string();
        command.args(["--no-vacuum", "--protocol=prepared", "--jobs", &clients, "--client", &clients]);
        match until {
            Until::Seconds(seconds) => command.args(["--time".to_owned(), seconds.to_string()]),
            Until::Transactions(count) => command.args(["--transactions".to_owned(), count.to_string()]),
        };
        let file = match script {
            Script::SelectOnly => {
                command.arg("--builtin=select-only");
                None
            }
            Script::Tpcb => {
                command.arg("--builtin=tpcb-like");
                None
            }
            Script::Own(text) => {
                let mut file = tempfile::NamedTempFile::new()?;
                file.write_all(text.as_bytes())?;
                // The server's account reads it.
                std::fs::set_permissions(file.path(), std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
                command.arg("--file").arg(file.path());
                Some(file)
            }
        };
        command.arg(DATABASE).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = Command::from(command).kill_on_drop(true).spawn().context("pgbench")?;
        Ok(Pgbench { child, _script: file })
    }

    /// Runs one to its end; gives back its transactions.
    ///
    /// # Errors
    ///
    /// As [`Pgbench::start`] and [`Pgbench::end`].
    pub async fn run(server: &TestServer, script: &Script, clients: u32, until: Until) -> anyhow::Result<u64> {
        Pgbench::start(server, script, clients, until)?.end().await
    }

    /// Waits for its end; gives back its transactions.
    ///
    /// # Errors
    ///
    /// A client met an error, or none did anything.
    pub async fn end(self) -> anyhow::Result<u64> {
        let output = self.child.wait_with_output().await?;
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        ensure!(output.status.success() && !said.contains("aborted"), "pgbench: {}: {said}", output.status);
        let number = |label: &str| -> anyhow::Result<u64> {
            let rest = said.lines().find_map(|line| line.strip_prefix(label)).context(said.clone())?;
            let digits = rest.trim_start_matches([':', ' ']).split(['/', ' ']).next().unwrap_or_default();
            digits.parse().with_context(|| said.clone())
        };
        let (done, failed) =
            (number("number of transactions actually processed")?, number("number of failed transactions")?);
        ensure!(done > 0 && failed == 0, "pgbench: {said}");
        Ok(done)
    }

    /// Ends it before its time, for a run of which nothing is to be learned.
    ///
    /// # Errors
    ///
    /// It cannot be killed.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        ensure!(self.child.try_wait()?.is_none(), "pgbench has ended by itself");
        Ok(self.child.kill().await?)
    }
}
