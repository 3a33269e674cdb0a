//! Random list-append transactions from many sessions: updates on the leader, READ ONLY ones on any server.
//!
//! Shapes and pauses are chosen so that the anomalies of replicated snapshot isolation are likely: updates that read
//! some keys, wait, and append to others, while quick ones append to what was read and readers look at both.

mod form;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use crate::client::{Session, StatementError};
use crate::cluster::{AT_EPOCH, TestCluster};
use crate::history::{Ending, History, Operation, Recorder, Transaction};
use crate::servers::LEADER;
use form::{Form, send_message, send_statements, values_of};

/// Keys that are in use at a time.
const HOT_KEYS: i64 = 6;
/// A key is retired after so many appends, so that lists stay short.
const APPENDS_PER_KEY: i64 = 40;
/// A session that is refused this often in a row gives the run up.
const REFUSALS_MAX: usize = 10_000;
/// Pause after a refusal that is no conflict: a server is gone.
const FAULT_PAUSE: Duration = Duration::from_millis(20);
/// Where a connection was lost without an SQLSTATE.
const CONNECTION_LOST: &str = "08006";
/// The router itself does not know whether the transaction committed.
const RESOLUTION_UNKNOWN: &str = "08007";
/// What a client is told when a server is lost. Nothing else is borne.
const SERVER_LOST: [&str; 4] = ["57P01", "57P02", "57P03", RESOLUTION_UNKNOWN];

/// A random run.
#[derive(Debug, Clone)]
pub struct Workload {
    /// Replays a run's choices; printed when it fails.
    pub seed: u64,
    /// Sessions at once.
    pub clients: usize,
    /// Transactions to commit, together.
    pub transactions: usize,
    /// Goes on beyond them while this is set: what happens meanwhile takes longer than they do.
    pub goes_on: Arc<AtomicBool>,
    /// Set as soon as all sessions are there and the first transaction begins: what comes before bears no fault.
    pub has_begun: Arc<AtomicBool>,
    /// Of a hundred transactions, how many only read.
    pub reads_percent: u32,
    /// Pause between the statements of a transaction, in milliseconds.
    pub pause_ms: RangeInclusive<u64>,
    /// Whether the router chooses where READ ONLY transactions run, or each is sent to a server of the cluster.
    pub reads_anywhere: bool,
    /// Whether servers are going to be lost: what clients are told of that is then borne, and counted.
    pub bears_faults: bool,
    /// How often clients were told that a server is lost: who takes one away sees here that it was missed.
    pub losses: Arc<AtomicUsize>,
}

impl Workload {
    /// 8 clients, 40 % READ ONLY, 3000 transactions.
    pub fn usual(seed: u64) -> Workload {
        Workload {
            seed,
            clients: 8,
            transactions: 3000,
            goes_on: Arc::new(AtomicBool::new(false)),
            has_begun: Arc::new(AtomicBool::new(false)),
            reads_percent: 40,
            pause_ms: 0..=5,
            reads_anywhere: false,
            bears_faults: false,
            losses: Arc::new(AtomicUsize::new(0)),
        }
    }

    /// Runs it on `cluster` and gives back what happened, with a last read of every key on the leader.
    ///
    /// # Errors
    ///
    /// A refusal that is not to be borne, or endless ones.
    pub async fn run(&self, cluster: &TestCluster) -> anyhow::Result<History> {
        let control = cluster.updater("control").await?;
        control.run("CREATE TABLE IF NOT EXISTS lists (k bigint PRIMARY KEY, v text NOT NULL)").await?;
        // A run again on the same cluster starts from nothing.
        control.run("DELETE FROM lists").await?;
        cluster.wait_for_replay().await?;
        let shared = Arc::new(Shared {
            recorder: Recorder::default(),
            left: AtomicUsize::new(self.transactions),
            next_value: AtomicI64::new(1),
        });
        let mut opened = Vec::new();
        for number in 0..self.clients {
            opened.push(Client::open(self, cluster, number, Arc::clone(&shared)).await?);
        }
        self.has_begun.store(true, Ordering::Relaxed);
        let mut clients: tokio::task::JoinSet<_> = opened.into_iter().map(Client::run).collect();
        while let Some(result) = clients.join_next().await {
            result??;
        }
        read_everything(cluster, &shared, self).await?;
        let shared = Arc::into_inner(shared).expect("every client has ended");
        Ok(shared.recorder.into_history())
    }
}

struct Shared {
    recorder: Recorder,
    left: AtomicUsize,
    next_value: AtomicI64,
}

/// A place where reads run, and how to get there.
#[derive(Debug, Clone)]
struct Place {
    /// A connection straight to the server; none: the client's own one, told by `choose` where to read.
    direct: Option<Session>,
    choose: String,
    begin: &'static str,
}

/// One session. Behind a router it has one connection, so that the session's own order is the router's too; without
/// one, a connection to each server, as programs have that balance reads themselves.
struct Client {
    number: usize,
    workload: Workload,
    random: StdRng,
    shared: Arc<Shared>,
    session: Session,
    begin_update: &'static str,
    has_router: bool,
    places: Vec<Place>,
}

impl Client {
    async fn open(
        workload: &Workload,
        cluster: &TestCluster,
        number: usize,
        shared: Arc<Shared>,
    ) -> anyhow::Result<Client> {
        let name = format!("client {number}");
        let mut places = Vec::new();
        if workload.reads_anywhere {
            let choose = "RESET onecopy.server".to_owned();
            places.push(Place { direct: None, choose, begin: cluster.begin_read(LEADER) });
        }
        for server in cluster.servers.all().iter().filter(|_| !workload.reads_anywhere) {
            places.push(Place {
                direct: if cluster.has_router() { None } else { Some(server.connect(&name).await?) },
                choose: format!("SET onecopy.server = '{}'", server.name),
                begin: cluster.begin_read(&server.name),
            });
        }
        Ok(Client {
            number,
            workload: workload.clone(),
            random: StdRng::seed_from_u64(workload.seed.wrapping_mul(1_000_003).wrapping_add(number as u64)),
            shared,
            session: cluster.updater(&name).await?,
            begin_update: cluster.begin_update(),
            has_router: cluster.has_router(),
            places,
        })
    }

    async fn run(mut self) -> anyhow::Result<()> {
        let mut refusals = 0;
        while self.shared.left.load(Ordering::Relaxed) > 0 || self.workload.goes_on.load(Ordering::Relaxed) {
            let result = if self.random.random_range(0..100) < self.workload.reads_percent {
                self.read_transaction().await
            } else {
                self.update_transaction().await
            };
            match result {
                Ok(()) => {
                    refusals = 0;
                    let left = |left: usize| left.checked_sub(1);
                    let _ = self.shared.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left);
                    continue;
                }
                Err(error) if error.is_retryable() => {}
                Err(error) if self.workload.bears_faults && SERVER_LOST.contains(&error.code.as_str()) => {
                    self.workload.losses.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(FAULT_PAUSE).await;
                }
                Err(error) => return Err(error.into()),
            }
            refusals += 1;
            anyhow::ensure!(refusals < REFUSALS_MAX, "client {} was refused {refusals} times in a row", self.number);
        }
        Ok(())
    }

    async fn read_transaction(&mut self) -> Result<(), StatementError> {
        let count = self.random.random_range(2..=4);
        let keys = self.hot_keys(count).into_iter();
        let operations = keys.map(|key| Operation::Read { key, values: Vec::new() }).collect();
        let form = Form::random(&mut self.random);
        if self.random.random_bool(0.15) {
            // Nobody is told that it only reads.
            return self.transaction(form, self.session.clone(), self.begin_update, operations).await;
        }
        let place = self.places[self.random.random_range(0..self.places.len())].clone();
        let session = match place.direct {
            Some(session) => session,
            None => {
                self.session.run(&place.choose).await?;
                self.session.clone()
            }
        };
        self.transaction(form, session, place.begin, operations).await
    }

    async fn update_transaction(&mut self) -> Result<(), StatementError> {
        let keys = self.hot_keys(4);
        let form = Form::random(&mut self.random);
        let mut operations = Vec::new();
        if self.random.random_bool(0.5) {
            // Slow: reads first, appends elsewhere later.
            for &key in &keys[..self.random.random_range(1..=2)] {
                operations.push(Operation::Read { key, values: Vec::new() });
            }
            operations.push(self.append_to(keys[2]));
            // One statement sees nothing of its own appends.
            if self.random.random_bool(0.3) && !form.is_one_message() {
                operations.push(Operation::Read { key: keys[2], values: Vec::new() });
                operations.push(self.append_to(keys[3]));
            }
        } else {
            for &key in &keys[..self.random.random_range(1..=2)] {
                operations.push(self.append_to(key));
            }
        }
        self.transaction(form, self.session.clone(), self.begin_update, operations).await
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

    /// Whether the leader's certifier checked the transaction of `session` that has just committed.
    async fn was_certified(&self, session: &Session, operations: &[Operation]) -> Result<bool, StatementError> {
        if !self.has_router {
            return Ok(false);
        }
        if operations.iter().any(|operation| matches!(operation, Operation::Append { .. })) {
            return Ok(true);
        }
        let answer = session.run("SHOW onecopy.served_by").await?;
        Ok(answer.rows[0][0].as_deref().is_some_and(|place| !place.contains(AT_EPOCH)))
    }

    /// Runs one transaction to its end and records it.
    async fn transaction(
        &mut self,
        form: Form,
        session: Session,
        begin: &str,
        mut operations: Vec<Operation>,
    ) -> Result<(), StatementError> {
        let invoked = self.shared.recorder.tick();
        let mut may_have_committed = form.is_one_message();
        let mut result = if form.is_one_message() {
            send_message(form, &session, begin, &mut operations, &mut self.random).await
        } else {
            let pause_ms = &self.workload.pause_ms;
            send_statements(form, &session, begin, &mut operations, &mut self.random, pause_ms).await
        };
        if result.is_ok() && !form.is_one_message() {
            may_have_committed = true;
            result = session.run("COMMIT").await.map(drop);
        }
        let ending = match &result {
            Ok(()) => Ending::Committed,
            Err(error)
                if may_have_committed && [CONNECTION_LOST, RESOLUTION_UNKNOWN].contains(&error.code.as_str()) =>
            {
                Ending::Unknown
            }
            Err(_) => Ending::Aborted,
        };
        let completed = self.shared.recorder.tick();
        let certified = result.is_ok() && self.was_certified(&session, &operations).await?;
        self.shared.recorder.add(Transaction {
            session: self.number,
            invoked,
            completed,
            ending,
            operations,
            certified,
        });
        if result.is_err() {
            // After a failed COMMIT or one statement there is nothing to roll back; a lost connection is seen later.
            let _ = session.run("ROLLBACK").await;
        }
        result
    }
}

/// Ends a history with a read of every key, so that each append has its place in some order.
async fn read_everything(cluster: &TestCluster, shared: &Shared, workload: &Workload) -> anyhow::Result<()> {
    let (invoked, answer) = loop {
        let invoked = shared.recorder.tick();
        let read = async {
            let leader = cluster.servers.leader().connect("last reader").await?;
            anyhow::Ok(leader.run("SELECT k, v FROM lists ORDER BY k").await?)
        };
        match read.await {
            Ok(answer) => break (invoked, answer),
            // The leader may be down just now; a run that waits too long is ended by its test.
            Err(_) if workload.bears_faults => tokio::time::sleep(FAULT_PAUSE).await,
            Err(error) => return Err(error),
        }
    };
    let mut operations = Vec::new();
    for row in answer.rows {
        if let [Some(key), Some(list)] = row.as_slice() {
            operations.push(Operation::Read { key: key.parse()?, values: values_of(list) });
        }
    }
    shared.recorder.complete(workload.clients, invoked, Ending::Committed, operations);
    Ok(())
}
