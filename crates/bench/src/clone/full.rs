//! A primary that its clients keep as busy as they can, and what it makes of being cloned.

use std::fmt;
use std::time::Instant;

use onecopy_clone::plan::FillOptions;
use rand::RngExt;
use serde::Serialize;
use tokio_postgres::Client;

use super::Creation;
use super::method::BenchMethod;
use super::site::Site;
use super::updates::{self, Ended, Load, Update, accounts};
use crate::cluster::DATABASE;

/// Of a hundred transactions, this many read one account; the others update.
const READ_PERCENT: u32 = 90;

/// Connections that change the schema.
const SCHEMA_CLIENTS: u32 = 2;

/// Who keeps the source busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FullLoad {
    /// Eight clients without a pause: no processor is left over.
    Saturated,
    /// One client without a pause: it and its back end take turns, so that about one processor is theirs.
    SpareProcessor,
    /// Eight clients, and two that create, index, cluster, truncate and drop tables.
    SchemaChanges,
}

impl FullLoad {
    /// All, in the order of the rows.
    pub const ALL: [FullLoad; 3] = [FullLoad::Saturated, FullLoad::SpareProcessor, FullLoad::SchemaChanges];

    async fn start(self, site: &Site) -> anyhow::Result<Load> {
        let (clients, schema_clients) = match self {
            FullLoad::Saturated => (8, 0),
            FullLoad::SpareProcessor => (1, 0),
            FullLoad::SchemaChanges => (8, SCHEMA_CLIENTS),
        };
        let mut load = Load::default();
        let accounts = accounts(site).await?;
        let connection = site.source.connection().with_database(DATABASE);
        for _ in 0..clients {
            load.tasks.spawn(read_and_update(connection.connect_as_client().await?, accounts, load.ended.clone()));
        }
        for number in 0..schema_clients {
            load.tasks.spawn(change_schema(connection.connect_as_client().await?, number));
        }
        Ok(load)
    }
}

impl fmt::Display for FullLoad {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            FullLoad::Saturated => "8 clients",
            FullLoad::SpareProcessor => "1 client",
            FullLoad::SchemaChanges => "8 clients, 2 change the schema",
        })
    }
}

/// One lazy clone of a busy source.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct BusyCreation {
    /// Who kept it busy.
    pub load: FullLoad,
    /// The clone, and the source meanwhile.
    #[serde(flatten)]
    pub creation: Creation,
}

impl BusyCreation {
    /// What the source did meanwhile, in parts of what it did before.
    pub fn rate_kept(&self) -> f64 {
        self.creation.during.per_second / self.creation.before.per_second
    }

    /// What it did with the clone behind it, in parts of what it did before.
    pub fn rate_after(&self) -> f64 {
        self.creation.after.per_second / self.creation.before.per_second
    }

    /// How many times longer the slowest of a hundred took meanwhile.
    pub fn p99_grown(&self) -> f64 {
        self.creation.during.p99_ms / self.creation.before.p99_ms
    }
}

/// Clones the source under a load, filled as by default.
pub async fn measure(site: &Site, load: FullLoad, round: u32) -> anyhow::Result<BusyCreation> {
    let creation = updates::measure(site, (BenchMethod::Lazy, FillOptions::default()), round, load.start(site)).await?;
    Ok(BusyCreation { load, creation })
}

async fn read_and_update(client: Client, accounts: i32, ended: Ended) -> anyhow::Result<()> {
    let read = client.prepare("SELECT abalance FROM pgbench_accounts WHERE aid = $1").await?;
    let update = Update::prepare(&client).await?;
    loop {
        let account = rand::rng().random_range(1..=accounts);
        let begin = Instant::now();
        if rand::rng().random_range(0..100) < READ_PERCENT {
            client.query_one(&read, &[&account]).await?;
        } else {
            update.run(&client, account).await?;
        }
        ended.push(begin);
    }
}

async fn change_schema(client: Client, number: u32) -> anyhow::Result<()> {
    let table = format!("changing_{number}");
    client.batch_execute(&format!("DROP TABLE IF EXISTS {table}")).await?;
    loop {
        for statement in [
            format!("CREATE TABLE {table} AS SELECT n, repeat('x', 100) AS filler FROM generate_series(1, 5000) AS n"),
            format!("CREATE INDEX {table}_n ON {table} (n)"),
            format!("CLUSTER {table} USING {table}_n"),
            format!("TRUNCATE {table}"),
            format!("DROP TABLE {table}"),
        ] {
            client.batch_execute(&statement).await?;
        }
    }
}
