//! A primary under load, and what it makes of being cloned; and a load at a fixed rate of updates.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use onecopy_clone::plan::FillOptions;
use rand::RngExt;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio_postgres::{Client, Statement};

use super::Creation;
use super::method::{BenchMethod, Clone};
use super::site::Site;
use crate::cluster::DATABASE;

/// Connections that update.
const CLIENTS: u32 = 4;
/// How long the source is looked at before it is cloned, and when its clone is whole.
const BEFORE: Duration = Duration::from_secs(5);
const AFTER: Duration = Duration::from_secs(5);

/// What clients of the source got in some time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Service {
    /// Transactions a second.
    pub per_second: f64,
    /// Half took at most this, from when they were due. Where clients make no pause that is when they have ended the
    /// one before.
    pub p50_ms: f64,
    /// 99 of 100.
    pub p99_ms: f64,
    /// The slowest.
    pub max_ms: f64,
}

impl Service {
    /// Of transactions that ended in `time`, with their latencies in milliseconds; none without any.
    fn of(latencies_ms: &mut [f64], time: Duration) -> Option<Service> {
        latencies_ms.sort_by(f64::total_cmp);
        let at = |part: usize| latencies_ms.get((latencies_ms.len() * part / 100).min(latencies_ms.len() - 1)).copied();
        let last = *latencies_ms.last()?;
        let per_second = latencies_ms.len() as f64 / time.as_secs_f64();
        Some(Service { per_second, p50_ms: at(50)?, p99_ms: at(99)?, max_ms: last })
    }
}

/// When transactions ended, and how many milliseconds each took.
#[derive(Debug, Clone, Default)]
pub struct Ended(Arc<Mutex<Vec<(Instant, f64)>>>);

impl Ended {
    /// One that was due at `due` has ended.
    pub fn push(&self, due: Instant) {
        let now = Instant::now();
        if let Ok(mut ended) = self.0.lock() {
            ended.push((now, (now - due).as_secs_f64() * 1000.0));
        }
    }
}

/// Clients of the source, until it is dropped.
#[derive(Default)]
pub struct Load {
    /// One each.
    pub tasks: JoinSet<anyhow::Result<()>>,
    /// Of all of them.
    pub ended: Ended,
}

impl Load {
    /// Each transaction is due at its time, whether the one before is over or not.
    pub async fn updates(site: &Site, rate: u32) -> anyhow::Result<Load> {
        let mut load = Load::default();
        let accounts = accounts(site).await?;
        for _ in 0..CLIENTS {
            let client = site.source.connection().with_database(DATABASE).connect_as_client().await?;
            let interval = Duration::from_secs_f64(f64::from(CLIENTS) / f64::from(rate));
            load.tasks.spawn(update(client, interval, accounts, load.ended.clone()));
        }
        Ok(load)
    }

    /// What ended between two moments.
    fn between(&mut self, begin: Instant, end: Instant) -> anyhow::Result<Service> {
        if let Some(ended) = self.tasks.try_join_next() {
            ended??;
            bail!("a client of the source has stopped");
        }
        let ended = self.ended.0.lock().map_err(|_| anyhow::anyhow!("a client of the source has panicked"))?;
        let within = ended.iter().filter(|(at, _)| (begin..end).contains(at));
        let mut latencies_ms: Vec<f64> = within.map(|(_, latency_ms)| *latency_ms).collect();
        Service::of(&mut latencies_ms, end - begin).context("the source has done nothing")
    }
}

/// How many accounts there are.
pub async fn accounts(site: &Site) -> anyhow::Result<i32> {
    let client = site.source.connection().with_database(DATABASE).connect_as_client().await?;
    Ok(client.query_one("SELECT max(aid) FROM pgbench_accounts", &[]).await?.get(0))
}

/// The transaction that updates.
pub struct Update {
    update: Statement,
    insert: Statement,
}

impl Update {
    /// Prepares it.
    pub async fn prepare(client: &Client) -> anyhow::Result<Update> {
        let update = client.prepare("UPDATE pgbench_accounts SET abalance = abalance + $1 WHERE aid = $2").await?;
        let insert =
            client.prepare("INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) VALUES (1, 1, $1, $2, now())");
        Ok(Update { update, insert: insert.await? })
    }

    /// Runs it.
    pub async fn run(&self, client: &Client, account: i32) -> anyhow::Result<()> {
        let delta = rand::rng().random_range(-5000..5000);
        client.batch_execute("BEGIN").await?;
        client.execute(&self.update, &[&delta, &account]).await?;
        client.execute(&self.insert, &[&account, &delta]).await?;
        Ok(client.batch_execute("COMMIT").await?)
    }
}

async fn update(client: Client, interval: Duration, accounts: i32, ended: Ended) -> anyhow::Result<()> {
    let update = Update::prepare(&client).await?;
    let mut due = Instant::now();
    loop {
        tokio::time::sleep_until(due.into()).await;
        let account = rand::rng().random_range(1..=accounts);
        update.run(&client, account).await?;
        // From when it was due: what it waited for its predecessor counts, else a pause would be seen once only.
        ended.push(due);
        due += interval;
    }
}

/// Clones the source under a load.
pub async fn measure(
    site: &Site,
    (method, fill): (BenchMethod, FillOptions),
    round: u32,
    load: impl Future<Output = anyhow::Result<Load>>,
) -> anyhow::Result<Creation> {
    let mut load = load.await?;
    tokio::time::sleep(BEFORE).await;
    let clone = Clone::make(site, method, fill).await?;
    let measured = async {
        let before = load.between(clone.begin - BEFORE, clone.begin)?;
        let (caught_up, whole) = tokio::try_join!(clone.wait_caught_up(site), clone.wait_whole())?;
        let whole = whole.max(clone.first_answer);
        let during = load.between(clone.begin, clone.begin + whole)?;
        tokio::time::sleep(AFTER).await;
        let after = load.between(clone.begin + whole, clone.begin + whole + AFTER)?;
        anyhow::Ok(Creation {
            method,
            round,
            first_answer_seconds: clone.first_answer.as_secs_f64(),
            caught_up_seconds: caught_up.as_secs_f64(),
            whole_seconds: whole.as_secs_f64(),
            pause_ms: clone.pause.map(|pause| pause.as_secs_f64() * 1000.0),
            before,
            during,
            after,
        })
    }
    .await;
    // The next method must not find this clone.
    clone.remove(site).await?;
    measured
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_is_told_by_its_latencies() {
        let mut latencies_ms: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        let service = Service::of(&mut latencies_ms, Duration::from_secs(2)).expect("some");
        assert_eq!(service, Service { per_second: 100.0, p50_ms: 101.0, p99_ms: 199.0, max_ms: 200.0 });
        assert_eq!(Service::of(&mut [], Duration::from_secs(1)), None);
    }
}
