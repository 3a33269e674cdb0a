//! What a primary is busy with while it is cloned: short updates without end, and schema changes of every kind.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use onecopy_testing::try_until_async;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;

use crate::client::Session;
use crate::clones::schema_load;
use crate::servers::TestServer;

/// Sessions that update.
const UPDATERS: u64 = 2;
/// Between two transactions of one: the machine has other work, too.
const UPDATE_PAUSE: Duration = Duration::from_millis(2);

/// A load that runs.
pub struct Load {
    tasks: JoinSet<anyhow::Result<()>>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    stopping: AtomicBool,
    updates: AtomicU64,
    schema_rounds: AtomicU64,
}

/// What a load has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadReport {
    /// Committed update transactions.
    pub updates: u64,
    /// Rounds of schema changes.
    pub schema_rounds: u64,
}

impl Load {
    /// Starts both kinds.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn start(source: &TestServer) -> anyhow::Result<Load> {
        let mut load = Load::of_updates(source).await?;
        let (config, session) = (source.config("postgres"), source.connect("schema").await?);
        let shared = load.shared.clone();
        load.tasks.spawn(async move {
            while !shared.stopping.load(Ordering::Relaxed) {
                let round = shared.schema_rounds.load(Ordering::Relaxed);
                schema_load::round(&session, &config, round).await?;
                shared.schema_rounds.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        Ok(load)
    }

    /// Starts updates alone.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn of_updates(source: &TestServer) -> anyhow::Result<Load> {
        let shared = Arc::new(Shared::default());
        let (mut tasks, seed) = (JoinSet::new(), onecopy_testing::seed());
        for updater in 0..UPDATERS {
            let session = source.connect("updater").await?;
            let accounts = session.run("SELECT count(*) FROM pgbench_accounts").await?.number()?;
            tasks.spawn(update(session, StdRng::seed_from_u64(seed.wrapping_add(updater)), accounts, shared.clone()));
        }
        Ok(Load { tasks, shared })
    }

    /// How far it is.
    pub fn report(&self) -> LoadReport {
        LoadReport {
            updates: self.shared.updates.load(Ordering::Relaxed),
            schema_rounds: self.shared.schema_rounds.load(Ordering::Relaxed),
        }
    }

    /// Waits for some more of each kind that runs: what is true then is true under load.
    ///
    /// # Errors
    ///
    /// The load stands still.
    pub async fn go_on(&self, more: LoadReport) -> anyhow::Result<()> {
        let begin = self.report();
        let went_on = |now: &LoadReport| {
            now.updates >= begin.updates + more.updates && now.schema_rounds >= begin.schema_rounds + more.schema_rounds
        };
        let what = format!("the load goes on from {begin:?} by {more:?}");
        try_until_async(&what, async || Ok(self.report()), went_on).await?;
        Ok(())
    }

    /// Ends it.
    ///
    /// # Errors
    ///
    /// The first statement that failed while it ran: a primary that is cloned refuses nothing.
    pub async fn stop(mut self) -> anyhow::Result<LoadReport> {
        self.shared.stopping.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended??;
        }
        Ok(self.report())
    }
}

/// What pgbench does, transaction by transaction.
async fn update(session: Session, mut random: StdRng, accounts: i64, shared: Arc<Shared>) -> anyhow::Result<()> {
    while !shared.stopping.load(Ordering::Relaxed) {
        let (account, delta) = (random.random_range(1..=accounts), random.random_range(-5000..5000));
        let sql = format!(
            "BEGIN; UPDATE pgbench_accounts SET abalance = abalance + {delta} WHERE aid = {account};
             UPDATE pgbench_branches SET bbalance = bbalance + {delta} WHERE bid = 1;
             INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) VALUES (1, 1, {account}, {delta}, now());
             SELECT nextval('numbers'); COMMIT"
        );
        session.run_script(&sql).await?;
        shared.updates.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(UPDATE_PAUSE).await;
    }
    Ok(())
}
