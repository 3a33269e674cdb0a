//! One run of pgbench, and what it says of itself.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, bail};
use serde::Serialize;
use tokio::process::Command;

use crate::cluster::{DATABASE, PASSWORD};

/// Times that pgbench runs a transaction before it counts it as failed; only 40001 and 40P01 are run again.
const TRIES_MAX: u32 = 1000;

/// Threads of pgbench.
const THREADS: usize = 2;

/// How pgbench sends its statements (`--protocol`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// One Query message a statement.
    Simple,
    /// Parse, Bind, Execute for each statement.
    Extended,
    /// Parse once, then Bind and Execute.
    Prepared,
}

impl Protocol {
    /// As pgbench writes it.
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Simple => "simple",
            Protocol::Extended => "extended",
            Protocol::Prepared => "prepared",
        }
    }
}

/// pgbench's own scripts (`--builtin`), and how they are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Script {
    /// One row by primary key, autocommit, at the default isolation (READ COMMITTED).
    SelectOnly,
    /// Three updates, a read and an insert in one SERIALIZABLE transaction, run again after 40001.
    TpcbLike,
    /// Nine of the reads to one of the update transactions, all SERIALIZABLE: the one in which readers need gates.
    Mixed,
}

impl Script {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Script::SelectOnly => "select-only",
            Script::TpcbLike => "tpcb-like",
            Script::Mixed => "mixed",
        }
    }

    /// As `--builtin` wants it, with weights.
    fn builtins(self) -> &'static [&'static str] {
        match self {
            Script::SelectOnly => &["select-only"],
            Script::TpcbLike => &["tpcb-like"],
            Script::Mixed => &["select-only@9", "tpcb-like@1"],
        }
    }

    /// The role that has the isolation of this script as its default, on every way in.
    pub fn role(self) -> &'static str {
        match self {
            Script::SelectOnly => crate::cluster::PLAIN_ROLE,
            Script::TpcbLike | Script::Mixed => crate::cluster::SERIALIZABLE_ROLE,
        }
    }
}

/// What is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Which script.
    pub script: Script,
    /// How it is sent.
    pub protocol: Protocol,
    /// Connections at once.
    pub clients: usize,
    /// How long.
    pub seconds: u32,
}

/// What pgbench counted.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Counts {
    /// Transactions that ended well.
    pub transactions: u64,
    /// Transactions given up after all tries.
    pub failed: u64,
    /// Further tries after 40001 or 40P01.
    pub retries: u64,
    /// Transactions a second, without the time to connect.
    pub transactions_per_second: f64,
    /// Mean time of a transaction, in milliseconds.
    pub latency_ms: f64,
}

impl Run {
    /// The command line, without the programs' directory.
    pub fn arguments(&self, port: &str) -> Vec<String> {
        let mut arguments: Vec<String> =
            ["-n", "-h", "127.0.0.1", "-p", port, "-U", self.script.role()].map(str::to_owned).to_vec();
        for builtin in self.script.builtins() {
            arguments.extend(["-b", builtin].map(str::to_owned));
        }
        arguments.extend(["-M".to_owned(), self.protocol.name().to_owned()]);
        arguments.extend(["-c".to_owned(), self.clients.to_string()]);
        arguments.extend(["-j".to_owned(), THREADS.min(self.clients).to_string()]);
        arguments.extend(["-T".to_owned(), self.seconds.to_string()]);
        if self.script != Script::SelectOnly {
            arguments.push(format!("--max-tries={TRIES_MAX}"));
        }
        arguments.push(DATABASE.to_owned());
        arguments
    }

    /// Runs it against 127.0.0.1 and a port.
    ///
    /// # Errors
    /// When pgbench cannot be run, ends badly (one client that gives up is enough) or says something else.
    pub async fn against(&self, program: &Path, port: u16) -> anyhow::Result<Counts> {
        let arguments = self.arguments(&port.to_string());
        let shown = || format!("pgbench {}", arguments.join(" "));
        let output = Command::new(program)
            .args(&arguments)
            .env_clear()
            .env("LC_ALL", "C")
            .env("PGPASSWORD", PASSWORD)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await
            .with_context(|| format!("cannot run {}", program.display()))?;
        let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if !output.status.success() {
            bail!("{} failed ({}): {}", shown(), output.status, complained.trim());
        }
        parse(&said).with_context(|| format!("{} said: {said}{complained}", shown()))
    }
}

/// Reads pgbench's summary (PostgreSQL 15 to 18).
pub(crate) fn parse(text: &str) -> anyhow::Result<Counts> {
    let after = |label: &str| {
        text.lines().find_map(|line| line.strip_prefix(label)).map(|rest| rest.trim_start_matches([':', '=', ' ']))
    };
    let number = |label: &str| -> anyhow::Result<f64> {
        let rest = after(label).with_context(|| format!("no line {label:?}"))?;
        let digits = rest.split([' ', '/']).next().unwrap_or_default();
        digits.parse().with_context(|| format!("{label:?} is followed by {rest:?}"))
    };
    Ok(Counts {
        transactions: number("number of transactions actually processed")? as u64,
        failed: number("number of failed transactions")? as u64,
        // Without --max-tries pgbench does not speak of retries.
        retries: if after("total number of retries").is_some() { number("total number of retries")? as u64 } else { 0 },
        transactions_per_second: number("tps")?,
        latency_ms: number("latency average")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries() {
        let text = "transaction type: <builtin: TPC-B (sort of)>\nquery mode: simple\n\
            maximum number of tries: 1000\nduration: 1 s\nnumber of transactions actually processed: 711\n\
            number of failed transactions: 2 (0.281%)\nnumber of transactions retried: 300 (42.194%)\n\
            total number of retries: 1234\nlatency average = 11.237 ms\ninitial connection time = 12.0 ms\n\
            tps = 711.923456 (without initial connection time)\n";
        let counts = parse(text).unwrap();
        assert_eq!((counts.transactions, counts.failed, counts.retries), (711, 2, 1234));
        assert_eq!((counts.latency_ms, counts.transactions_per_second), (11.237, 711.923456));

        let reads = text.replace("total number of retries: 1234\n", "");
        assert_eq!(parse(&reads).unwrap().retries, 0);
        assert!(parse(&text.replace("tps", "speed")).is_err());
        assert!(parse("").is_err());
    }

    #[test]
    fn only_updates_are_tried_again() {
        let run = |script| Run { script, protocol: Protocol::Extended, clients: 8, seconds: 5 };
        assert_eq!(
            run(Script::TpcbLike).arguments("PORT").join(" "),
            "-n -h 127.0.0.1 -p PORT -U bench_serializable -b tpcb-like -M extended \
             -c 8 -j 2 -T 5 --max-tries=1000 bench"
        );
        assert!(!run(Script::SelectOnly).arguments("PORT").iter().any(|argument| argument.contains("max-tries")));
    }
}
