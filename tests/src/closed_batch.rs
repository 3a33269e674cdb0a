//! The closed-batch invariant: once a batch is closed its sum never changes, whoever reports it, on whatever server.
//!
//! Receipts go to the batch that is open, a batch is closed by opening the next one, and reports add up the batches
//! that are closed. Under snapshot isolation on replicas a report can miss a receipt of a closed batch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;

use crate::client::{Session, StatementError};
use crate::cluster::TestCluster;

const TABLES: &str = "CREATE TABLE cfg (k text PRIMARY KEY, v int NOT NULL);
    CREATE TABLE control (k text PRIMARY KEY, batch int NOT NULL);
    CREATE TABLE receipts (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, batch int NOT NULL, amount int NOT NULL);
    CREATE INDEX receipts_batch ON receipts (batch);
    INSERT INTO cfg VALUES ('currency', 1); INSERT INTO control VALUES ('receipt', 1);";
const REPORT: &str = "SELECT c.batch - 1, coalesce(sum(r.amount), 0), count(r.id) FROM control c
    LEFT JOIN receipts r ON r.batch = c.batch - 1 WHERE c.k = 'receipt' GROUP BY c.batch";

/// Batches and receipts that every run has more of, and how many times its reports it goes on for them.
const WORK_MIN: usize = 50;
const SPARE_FACTOR: usize = 20;

/// A run of updaters and reporters.
#[derive(Debug, Clone)]
pub struct ClosedBatches {
    /// Replays a run's choices.
    pub seed: u64,
    /// Sessions that insert receipts.
    pub receivers: usize,
    /// Sessions that report, spread over all servers.
    pub reporters: usize,
    /// Reports to make, together.
    pub reports: usize,
}

/// What a run found.
#[derive(Debug, Clone, Default)]
pub struct Findings {
    /// Reports that were made.
    pub reports: usize,
    /// Reports whose sum is not the batch's last sum, by the server that gave them.
    pub wrong: BTreeMap<String, usize>,
    /// Batches that were closed.
    pub batches: usize,
    /// Receipts that were committed.
    pub receipts: i64,
    /// Updates that ended with 40001.
    pub conflicts: usize,
}

impl Findings {
    /// Wrong reports on all servers.
    pub fn wrong_count(&self) -> usize {
        self.wrong.values().sum()
    }
}

#[derive(Debug)]
struct Shared {
    left: AtomicUsize,
    /// Further reports until the run is given up that has too few batches and receipts.
    spare: AtomicUsize,
    closed: AtomicUsize,
    received: AtomicUsize,
    conflicts: AtomicUsize,
}

impl Shared {
    /// Whether the run goes on. On a busy machine one kind of sessions may be far behind the others.
    fn goes_on(&self) -> bool {
        let few = |count: &AtomicUsize| count.load(Ordering::Relaxed) <= WORK_MIN;
        self.left.load(Ordering::Relaxed) > 0
            || (self.spare.load(Ordering::Relaxed) > 0 && (few(&self.closed) || few(&self.received)))
    }

    fn note_report(&self) {
        let less = |left: usize| left.checked_sub(1);
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err() {
            let _ = self.spare.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }
}

#[derive(Debug)]
struct Report {
    server: String,
    batch: i64,
    sum: i64,
}

impl ClosedBatches {
    /// 6 sessions that insert, one that closes, 3 that report, 2000 reports.
    pub fn usual(seed: u64) -> ClosedBatches {
        ClosedBatches { seed, receivers: 6, reporters: 3, reports: 2000 }
    }

    /// The choices of one session: no other of this run has the same ones, nor one of a run with the next seed.
    fn random(&self, session: usize) -> StdRng {
        StdRng::seed_from_u64(self.seed.wrapping_mul(1_000_003).wrapping_add(session as u64))
    }

    /// Runs it on a cluster that has no such tables yet.
    ///
    /// # Errors
    ///
    /// A refusal that is no conflict.
    pub async fn run(&self, cluster: &TestCluster) -> anyhow::Result<Findings> {
        cluster.updater("control").await?.run(TABLES).await?;
        cluster.wait_for_replay().await?;
        let shared = Arc::new(Shared {
            left: AtomicUsize::new(self.reports),
            spare: AtomicUsize::new(self.reports * SPARE_FACTOR),
            closed: AtomicUsize::new(0),
            received: AtomicUsize::new(0),
            conflicts: AtomicUsize::new(0),
        });
        let mut updaters = JoinSet::new();
        for number in 0..self.receivers {
            updaters.spawn(receive(cluster.updater("receiver").await?, self.random(number), Arc::clone(&shared)));
        }
        let closer = self.random(self.receivers);
        updaters.spawn(close(cluster.updater("closer").await?, closer, Arc::clone(&shared)));
        let mut reporters = JoinSet::new();
        for number in 0..self.reporters {
            let server = &cluster.servers.all()[number % cluster.servers.all().len()].name;
            let session = cluster.reader("reporter", server).await?;
            let random = self.random(self.receivers + 1 + number);
            reporters.spawn(report(session, server.clone(), cluster.begin_read(server), random, Arc::clone(&shared)));
        }
        let mut reports = Vec::new();
        while let Some(result) = reporters.join_next().await {
            reports.extend(result??);
        }
        while let Some(result) = updaters.join_next().await {
            result??;
        }
        check(cluster, &reports, shared.conflicts.load(Ordering::Relaxed)).await
    }
}

async fn check(cluster: &TestCluster, reports: &[Report], conflicts: usize) -> anyhow::Result<Findings> {
    let leader = cluster.servers.leader().connect("auditor").await?;
    let mut sums: BTreeMap<i64, i64> = BTreeMap::new();
    for row in leader.run("SELECT batch, sum(amount) FROM receipts GROUP BY batch").await?.rows {
        if let [Some(batch), Some(sum)] = row.as_slice() {
            sums.insert(batch.parse()?, sum.parse()?);
        }
    }
    let mut findings = Findings { reports: reports.len(), conflicts, ..Findings::default() };
    findings.receipts = leader.run("SELECT count(*) FROM receipts").await?.number()?;
    findings.batches = usize::try_from(leader.run("SELECT batch - 1 FROM control").await?.number()?)?;
    for report in reports {
        if sums.get(&report.batch).copied().unwrap_or(0) != report.sum {
            *findings.wrong.entry(report.server.clone()).or_default() += 1;
        }
    }
    Ok(findings)
}

async fn pause(random: &mut StdRng, most_ms: u64) {
    tokio::time::sleep(Duration::from_millis(random.random_range(0..=most_ms))).await;
}

/// Runs `work` as one SERIALIZABLE transaction, which is counted in `done`; a conflict is counted and forgotten.
async fn update(
    session: &Session,
    shared: &Shared,
    done: &AtomicUsize,
    work: impl AsyncFnOnce() -> Result<(), StatementError>,
) -> anyhow::Result<()> {
    session.run("BEGIN ISOLATION LEVEL SERIALIZABLE").await?;
    let result = match work().await {
        Ok(()) => session.run("COMMIT").await.map(drop),
        Err(error) => session.run("ROLLBACK").await.and(Err(error)),
    };
    match result {
        Ok(()) => {
            done.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
        Err(error) if error.is_retryable() => {
            shared.conflicts.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

async fn receive(session: Session, mut random: StdRng, shared: Arc<Shared>) -> anyhow::Result<()> {
    while shared.goes_on() {
        let amount = random.random_range(1..=100);
        update(&session, &shared, &shared.received, async || {
            session.run("SELECT v FROM cfg WHERE k = 'currency'").await?;
            let open = session.run("SELECT batch FROM control WHERE k = 'receipt'").await?;
            let batch = open.number().expect("one batch is open");
            pause(&mut random, 8).await;
            session.run(&format!("INSERT INTO receipts (batch, amount) VALUES ({batch}, {amount})")).await.map(drop)
        })
        .await?;
    }
    Ok(())
}

async fn close(session: Session, mut random: StdRng, shared: Arc<Shared>) -> anyhow::Result<()> {
    while shared.goes_on() {
        update(&session, &shared, &shared.closed, async || {
            let open = session.run("SELECT batch FROM control WHERE k = 'receipt'").await?;
            let next = open.number().expect("one batch is open") + 1;
            session.run(&format!("UPDATE control SET batch = {next} WHERE k = 'receipt'")).await.map(drop)
        })
        .await?;
        pause(&mut random, 10).await;
    }
    Ok(())
}

async fn report(
    session: Session,
    server: String,
    begin: &'static str,
    mut random: StdRng,
    shared: Arc<Shared>,
) -> anyhow::Result<Vec<Report>> {
    let mut reports = Vec::new();
    while shared.goes_on() {
        pause(&mut random, 4).await;
        let answer = match session.run_all(&[begin, REPORT, "COMMIT"]).await {
            Ok(answers) => answers[1].clone(),
            // On a plain leader a report, too, may be the one that is refused.
            Err(error) if error.is_retryable() => {
                session.run("ROLLBACK").await?;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        if let [Some(batch), Some(sum), _] = answer.rows[0].as_slice() {
            reports.push(Report { server: server.clone(), batch: batch.parse()?, sum: sum.parse()? });
            shared.note_report();
        }
    }
    Ok(reports)
}
