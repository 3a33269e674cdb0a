//! pgbench in the background, second by second and transaction by transaction.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use onecopy_postgres::ConnectionParameters;
use serde::Serialize;
use tokio::process::{Child, Command};

/// Connections at once.
const CLIENTS: u32 = 4;
const THREADS: u32 = 2;

/// Each client goes on after a serialization failure.
const TRIES: &str = "--max-tries=1000";

/// One row by its key, out of the first `last`.
const READ: &str = "\\set aid random(1, :last)\nSELECT abalance FROM pgbench_accounts WHERE aid = :aid;\n";

/// What clients do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// Nothing.
    Idle,
    /// Reads of single rows, equally likely among the first so many accounts.
    Reads(u64),
    /// pgbench's tpcb-like transactions.
    Updates,
}

impl Work {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Work::Idle => "idle",
            Work::Reads(_) => "select-only",
            Work::Updates => "tpcb-like",
        }
    }
}

/// One transaction.
#[derive(Debug, Clone, Copy)]
pub struct Transaction {
    /// When it ended, in seconds of the epoch.
    pub ended_at: f64,
    /// How long it took.
    pub milliseconds: f64,
}

/// Clients at work.
pub struct Load {
    child: Option<Child>,
    files: tempfile::TempDir,
}

impl Load {
    /// Starts clients; they go on until they are stopped.
    ///
    /// # Errors
    /// pgbench cannot be run.
    pub fn start(
        pgbench: &Path,
        connection: &ConnectionParameters,
        work: Work,
        directory: &Path,
    ) -> anyhow::Result<Load> {
        let files = tempfile::Builder::new().prefix("load-").tempdir_in(directory)?;
        let script = files.path().join("read.sql");
        std::fs::write(&script, READ)?;
        let mut command = Command::new(pgbench);
        command.args(["-n", "-M", "prepared", "-T", "86400", "-c", &CLIENTS.to_string(), "-j", &THREADS.to_string()]);
        command.arg("--log").arg("--log-prefix").arg(files.path().join("log"));
        match work {
            Work::Idle => return Ok(Load { child: None, files }),
            Work::Reads(last) => command.arg("-D").arg(format!("last={last}")).arg("-f").arg(&script),
            Work::Updates => command.args(["-b", "tpcb-like", TRIES]),
        };
        command.arg(connection.to_dsn_without_password()).env_clear().env("LC_ALL", "C");
        command.env("PGPASSWORD", connection.password.as_deref().unwrap_or_default());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let child = command.spawn().context("cannot run pgbench")?;
        Ok(Load { child: Some(child), files })
    }

    /// Stops them, and says what was done.
    ///
    /// # Errors
    /// A client met an error and has given up before.
    pub async fn stop(mut self) -> anyhow::Result<Vec<Transaction>> {
        let Some(mut child) = self.child.take() else { return Ok(Vec::new()) };
        if let Some(status) = child.try_wait()? {
            let output = child.wait_with_output().await?;
            bail!("pgbench gave up ({status}): {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        // The last lines of its log, some kilobytes, may go with it: what is measured is over by then.
        let id = child.id().and_then(|id| i32::try_from(id).ok()).context("pgbench has no process")?;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(id), nix::sys::signal::Signal::SIGINT)?;
        child.wait().await?;
        let mut transactions = Vec::new();
        for entry in std::fs::read_dir(self.files.path())? {
            let path: PathBuf = entry?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("log.")) {
                transactions.extend(std::fs::read_to_string(&path)?.lines().filter_map(transaction));
            }
        }
        Ok(transactions)
    }
}

/// A line of pgbench's log: client, number, microseconds, script, and when it ended in seconds and microseconds. The
/// last line may be cut short.
fn transaction(line: &str) -> Option<Transaction> {
    let mut words = line.split(' ').skip(2);
    let microseconds: f64 = words.next()?.parse().ok()?;
    let seconds: f64 = words.nth(1)?.parse().ok()?;
    let part: f64 = words.next().filter(|word| !word.is_empty())?.parse().ok()?;
    Some(Transaction { ended_at: seconds + part / 1e6, milliseconds: microseconds / 1e3 })
}

/// Now, in seconds of the epoch.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// How many ended in a time, each second.
pub fn per_second(transactions: &[Transaction], from: f64, to: f64) -> f64 {
    within(transactions, from, to).count() as f64 / (to - from)
}

/// Ninety-nine of a hundred that ended in a time took at most so long, in milliseconds; none without any.
pub fn p99_ms(transactions: &[Transaction], from: f64, to: f64) -> Option<f64> {
    let mut times: Vec<f64> = within(transactions, from, to).map(|one| one.milliseconds).collect();
    times.sort_by(f64::total_cmp);
    let last = times.len().checked_sub(1)?;
    times.get((last as f64 * 0.99).round() as usize).copied()
}

fn within(transactions: &[Transaction], from: f64, to: f64) -> impl Iterator<Item = &Transaction> {
    transactions.iter().filter(move |one| (from..to).contains(&one.ended_at))
}

/// Sleeps.
pub async fn pause(seconds: f64) {
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_log() {
        let one = transaction("3 17 1500 0 1700000000 250000").unwrap();
        assert_eq!((one.ended_at, one.milliseconds), (1_700_000_000.25, 1.5));
        for cut in ["", "3", "3 17 1500 0 1700000000", "3 17 1500 0 1700000000 ", "3 17 skipped 0 1700000000 1"] {
            assert!(transaction(cut).is_none(), "{cut:?}");
        }
    }

    #[test]
    fn rates_and_latencies_are_of_their_time() {
        let all: Vec<Transaction> = (0..200)
            .map(|number| Transaction { ended_at: f64::from(number) / 100.0, milliseconds: f64::from(number) })
            .collect();
        assert_eq!(per_second(&all, 0.0, 2.0), 100.0);
        assert_eq!(p99_ms(&all, 0.0, 1.0), Some(98.0));
        assert_eq!(p99_ms(&all, 5.0, 6.0), None);
    }
}
