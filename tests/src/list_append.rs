//! Random list-append transactions from many sessions: updates on the leader, READ ONLY ones on any server.
//!
//! Shapes and pauses are chosen so that the anomalies of replicated snapshot isolation are likely: updates that read some
//! keys, wait, and append to others, while quick ones append to what was read and readers look at both.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use crate::client::{Session, StatementError};
use crate::cluster::TestCluster;
use crate::history::{Ending, History, Operation, Recorder};

/// Keys that are in use at a time.
const HOT_KEYS: i64 = 6;
/// A key is retired after so many appends, so that lists stay short.
const APPENDS_PER_KEY: i64 = 40;
/// A session that is refused this often in a row gives the run up.
const REFUSALS_MAX: usize = 500;

/// A random run.
#[derive(Debug, Clone)]
pub struct Workload {
    /// Replays a run's choices; printed when it fails.
    pub seed: u64,
    /// Sessions at once.
    pub clients: usize,
    /// Transactions to commit, together.
    pub transactions: usize,
    /// Of a hundred transactions, how many are READ ONLY.
    pub reads_percent: u32,
    /// Pause between the statements of a transaction, in milliseconds.
    pub pause_ms: RangeInclusive<u64>,
}

impl Workload {
    /// 8 clients, 40 % READ ONLY, 3000 transactions.
    pub fn usual(seed: u64) -> Workload {
        Workload { seed, clients: 8, transactions: 3000, reads_percent: 40, pause_ms: 0..=5 }
    }

    /// Runs it on `cluster` and gives back what happened, with a last read of every key on the leader.
    ///
    /// # Errors
    ///
    /// A refusal that is no retryable conflict, or endless conflicts.
    pub async fn run(&self, cluster: &TestCluster) -> anyhow::Result<History> {
        let control = cluster.updater("control").await?;
        control.run("CREATE TABLE IF NOT EXISTS lists (k bigint PRIMARY KEY, v text NOT NULL)").await?;
        // A run again on the same cluster starts from nothing.
        control.run("DELETE FROM lists").await?;
        cluster.settle().await?;
        let shared = Arc::new(Shared {
            recorder: Recorder::default(),
            left: AtomicUsize::new(self.transactions),
            next_value: AtomicI64::new(1),
        });
        let mut clients = tokio::task::JoinSet::new();
        for number in 0..self.clients {
            clients.spawn(Client::open(self, cluster, number, Arc::clone(&shared)).await?.run());
        }
        while let Some(result) = clients.join_next().await {
            result??;
        }
        read_everything(cluster, &shared, self.clients).await?;
        let shared = Arc::into_inner(shared).expect("every client has ended");
        Ok(shared.recorder.into_history())
    }
}

struct Shared {
    recorder: Recorder,
    left: AtomicUsize,
    next_value: AtomicI64,
}

/// One session's part: a connection for updates and one for reads at each server, as one client might use several. When a
/// router stands before the servers, one connection is all of them, so that the session's own order is the router's too.
struct Client {
    number: usize,
    workload: Workload,
    random: StdRng,
    shared: Arc<Shared>,
    updater: Session,
    readers: Vec<(Session, &'static str, Option<String>)>,
}

impl Client {
    async fn open(
        workload: &Workload,
        cluster: &TestCluster,
        number: usize,
        shared: Arc<Shared>,
    ) -> anyhow::Result<Client> {
        let name = format!("client {number}");
        let updater = cluster.updater(&name).await?;
        let mut readers = Vec::new();
        for server in cluster.servers.all() {
            let begin = cluster.begin_read(&server.name);
            readers.push(if cluster.has_router() {
                (updater.clone(), begin, Some(format!("SET onecopy.server = '{}'", server.name)))
            } else {
                (server.connect(&name).await?, begin, None)
            });
        }
        let random = StdRng::seed_from_u64(workload.seed.wrapping_mul(1_000_003).wrapping_add(number as u64));
        Ok(Client { number, workload: workload.clone(), random, shared, updater, readers })
    }

    async fn run(mut self) -> anyhow::Result<()> {
        let mut refusals = 0;
        while self.shared.left.load(Ordering::Relaxed) > 0 {
            let committed = if self.random.random_range(0..100) < self.workload.reads_percent {
                self.read_transaction().await?
            } else {
                self.update_transaction().await?
            };
            if committed {
                refusals = 0;
                let _ = self.shared.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            } else {
                refusals += 1;
                anyhow::ensure!(
                    refusals < REFUSALS_MAX,
                    "client {} was refused {refusals} times in a row",
                    self.number
                );
            }
        }
        Ok(())
    }

    async fn read_transaction(&mut self) -> anyhow::Result<bool> {
        let place = self.random.random_range(0..self.readers.len());
        let (session, begin, choose) = self.readers[place].clone();
        if let Some(choose) = choose {
            session.run(&choose).await?;
        }
        let count = self.random.random_range(2..=4);
        let operations = self.hot_keys(count).into_iter().map(|key| Operation::Read { key, values: Vec::new() });
        let operations = operations.collect();
        self.transaction(session, begin, operations).await
    }

    async fn update_transaction(&mut self) -> anyhow::Result<bool> {
        let keys = self.hot_keys(4);
        let mut operations = Vec::new();
        if self.random.random_bool(0.5) {
            // Slow: reads first, appends elsewhere later.
            for &key in &keys[..self.random.random_range(1..=2)] {
                operations.push(Operation::Read { key, values: Vec::new() });
            }
            operations.push(self.append_to(keys[2]));
            if self.random.random_bool(0.3) {
                operations.push(Operation::Read { key: keys[2], values: Vec::new() });
                operations.push(self.append_to(keys[3]));
            }
        } else {
            for &key in &keys[..self.random.random_range(1..=2)] {
                operations.push(self.append_to(key));
            }
        }
        self.transaction(self.updater.clone(), "BEGIN ISOLATION LEVEL SERIALIZABLE", operations).await
    }

    fn append_to(&self, key: i64) -> Operation {
        Operation::Append { key, value: self.shared.next_value.fetch_add(1, Ordering::Relaxed) }
    }

    /// Different keys of those now in use, in a random order.
    fn hot_keys(&mut self, count: usize) -> Vec<i64> {
        let generation = self.shared.next_value.load(Ordering::Relaxed) / (HOT_KEYS * APPENDS_PER_KEY);
        let keys: Vec<i64> = (generation * HOT_KEYS..(generation + 1) * HOT_KEYS).collect();
        keys.sample(&mut self.random, count).copied().collect()
    }

    /// Runs one transaction to its end and records it; whether it committed.
    async fn transaction(
        &mut self,
        session: Session,
        begin: &str,
        mut operations: Vec<Operation>,
    ) -> anyhow::Result<bool> {
        let invoked = self.shared.recorder.tick();
        let result = self.statements(&session, begin, &mut operations).await;
        let result = match result {
            Ok(()) => session.run("COMMIT").await.map(drop),
            Err(error) => {
                session.run("ROLLBACK").await?;
                Err(error)
            }
        };
        let ending = match &result {
            Ok(()) => Ending::Committed,
            Err(_) => Ending::Aborted,
        };
        self.shared.recorder.complete(self.number, invoked, ending, operations);
        match result {
            Err(error) if !error.is_retryable() => Err(error.into()),
            _ => Ok(ending == Ending::Committed),
        }
    }

    async fn statements(
        &mut self,
        session: &Session,
        begin: &str,
        operations: &mut [Operation],
    ) -> Result<(), StatementError> {
        session.run(begin).await?;
        for (position, operation) in operations.iter_mut().enumerate() {
            if position > 0 {
                let pause_ms = self.random.random_range(self.workload.pause_ms.clone());
                tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            }
            match operation {
                Operation::Append { key, value } => {
                    let sql = format!(
                        "INSERT INTO lists VALUES ({key}, '{value}') \
                         ON CONFLICT (k) DO UPDATE SET v = lists.v || ' ' || excluded.v"
                    );
                    session.run(&sql).await?;
                }
                Operation::Read { key, values } => {
                    let answer = session.run(&format!("SELECT v FROM lists WHERE k = {key}")).await?;
                    *values = values_of(answer.text().unwrap_or_default());
                }
            }
        }
        Ok(())
    }
}

fn values_of(list: &str) -> Vec<i64> {
    list.split_whitespace().map(|value| value.parse().expect("only numbers are appended")).collect()
}

/// Ends a history with a read of every key, so that each append has its place in some order.
async fn read_everything(cluster: &TestCluster, shared: &Shared, session_number: usize) -> anyhow::Result<()> {
    let leader = cluster.servers.leader().connect("last reader").await?;
    let invoked = shared.recorder.tick();
    let answer = leader.run("SELECT k, v FROM lists ORDER BY k").await?;
    let mut operations = Vec::new();
    for row in answer.rows {
        if let [Some(key), Some(list)] = row.as_slice() {
            operations.push(Operation::Read { key: key.parse()?, values: values_of(list) });
        }
    }
    shared.recorder.complete(session_number, invoked, Ending::Committed, operations);
    Ok(())
}
