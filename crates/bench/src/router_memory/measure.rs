//! One proxy under one load after the other.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, ensure};
use onecopy_postgres::ConnectionParameters;
use serde::Serialize;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio_postgres::types::Type;

use super::CONNECTIONS;
use crate::cluster::{Cluster, DATABASE, PASSWORD, PLAIN_ROLE};
use crate::proxy::Proxy;

/// Length of a long message.
pub const LONG_MIB: usize = 100;

/// How long a proxy has nothing to do before a load.
const REST: Duration = Duration::from_secs(10);

/// How long it may take to give back what it does not need: the router does that each 30 s.
const LAST_REST: Duration = Duration::from_secs(40);

/// Length of a row of a load by COPY.
const ROW_BYTES: usize = 8000;

/// What a proxy is given to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Load {
    /// Connections that ask once and are idle then, at once.
    Connections,
    /// COPY FROM STDIN.
    CopyIn,
    /// COPY TO STDOUT.
    CopyOut,
    /// An INSERT with a long literal.
    Literal,
    /// An INSERT with a long parameter.
    Parameter,
    /// A read of one long row.
    Row,
    /// Nothing: what is left of all that was before.
    Nothing,
}

impl Load {
    /// All, in their order: what takes most is last, so that no other one has what that has left.
    pub const ALL: [Load; 7] =
        [Load::Connections, Load::CopyIn, Load::CopyOut, Load::Parameter, Load::Row, Load::Literal, Load::Nothing];
}

/// What was measured of one proxy in one round.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// The way.
    pub proxy: &'static str,
    /// From 1.
    pub round: u32,
    /// One of each load, in their order.
    pub figures: Vec<Figure>,
}

/// One load.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Figure {
    /// Which.
    pub load: Load,
    /// Resident memory before it, in MiB.
    pub before_mib: f64,
    /// Most resident memory while it lasted, in MiB.
    pub peak_mib: f64,
}

/// Makes what is loaded into.
pub async fn make_table(cluster: &Cluster) -> anyhow::Result<()> {
    let client = cluster.leader().connection().with_database(DATABASE).connect_as_client().await?;
    client.batch_execute(&format!("CREATE TABLE loaded (text text); GRANT ALL ON loaded TO {PLAIN_ROLE}")).await?;
    Ok(())
}

/// A client of one proxy.
struct Client {
    parameters: ConnectionParameters,
    psql: PathBuf,
}

/// Measures `proxy` under all loads; one by COPY is of `copy_mib`.
pub async fn measure(proxy: &Proxy, cluster: &Cluster, copy_mib: u32) -> anyhow::Result<Vec<Figure>> {
    let parameters = ConnectionParameters {
        port: proxy.port,
        user: PLAIN_ROLE.to_owned(),
        password: Some(PASSWORD.to_owned()),
        ..cluster.leader().connection().with_database(DATABASE)
    };
    let client = Client { parameters, psql: cluster.binaries.program("psql") };
    // What a proxy makes once, such as what it knows of the catalog, belongs to no load.
    client.ask("SELECT count(*) FROM loaded").await?;
    let mut figures = Vec::new();
    for load in Load::ALL {
        tokio::time::sleep(if load == Load::Nothing { LAST_REST } else { REST }).await;
        let memory = proxy.memory().context("there is no proxy")?;
        memory.forget_peak()?;
        let before_mib = memory.resident_mib()?;
        client.run(load, copy_mib).await.with_context(|| format!("{load:?}"))?;
        figures.push(Figure { load, before_mib, peak_mib: memory.peak_mib()? });
    }
    Ok(figures)
}

impl Client {
    async fn run(&self, load: Load, copy_mib: u32) -> anyhow::Result<()> {
        let rows = u64::from(copy_mib) * (1 << 20) / ROW_BYTES as u64;
        // What is written is no matter here, so nothing is.
        match load {
            Load::Connections => self.connect_and_rest().await,
            Load::CopyIn => self.psql("COPY loaded FROM STDIN WHERE false", rows).await,
            Load::CopyOut => {
                let one = format!("SELECT repeat('x', {ROW_BYTES}) FROM generate_series(1, {rows})");
                self.psql(&format!("COPY ({one}) TO STDOUT"), 0).await
            }
            Load::Literal => {
                let long = "x".repeat(LONG_MIB << 20);
                self.ask(&format!("INSERT INTO loaded SELECT '{long}' WHERE false")).await
            }
            Load::Parameter => {
                let (client, long) = (self.parameters.connect_as_client().await?, "x".repeat(LONG_MIB << 20));
                client.query_typed("INSERT INTO loaded SELECT $1 WHERE false", &[(&long, Type::TEXT)]).await?;
                Ok(())
            }
            Load::Row => self.ask(&format!("SELECT repeat('x', {LONG_MIB} << 20)")).await,
            Load::Nothing => Ok(()),
        }
    }

    async fn connect_and_rest(&self) -> anyhow::Result<()> {
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            let client = self.parameters.connect_as_client().await?;
            client.simple_query("SELECT 1 FROM loaded").await?;
            clients.push(client);
        }
        Ok(())
    }

    async fn ask(&self, sql: &str) -> anyhow::Result<()> {
        self.parameters.connect_as_client().await?.simple_query(sql).await?;
        Ok(())
    }

    /// Runs COPY; `rows` are sent to it.
    async fn psql(&self, sql: &str, rows: u64) -> anyhow::Result<()> {
        const ROWS_AT_ONCE: u64 = 8;
        let mut command = Command::new(&self.psql);
        command.args(["-X", "-q", "-h", &self.parameters.host, "-p", &self.parameters.port.to_string()]);
        command.args(["-U", PLAIN_ROLE, "-d", DATABASE, "-c", sql]).env_clear().env("PGPASSWORD", PASSWORD);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().context("cannot run psql")?;
        let mut input = process.stdin.take().context("psql has no input")?;
        let some = format!("{}\n", "x".repeat(ROW_BYTES)).repeat(ROWS_AT_ONCE as usize);
        for _ in 0..rows / ROWS_AT_ONCE {
            // Why it reads no more it says itself.
            if input.write_all(some.as_bytes()).await.is_err() {
                break;
            }
        }
        drop(input);
        let output = process.wait_with_output().await?;
        ensure!(output.status.success(), "psql: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }
}
