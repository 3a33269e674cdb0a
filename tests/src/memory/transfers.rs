//! Clients that do pgbench's transactions through every crash of their server: they connect again and go on. What a
//! crash may answer is known; anything else, wrong data above all, is an error of the run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::bail;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio_postgres::Config;

use crate::client::{Session, StatementError};

/// What a server says, or that it says nothing, when one of its processes has died: the connection is broken, the
/// server starts, stops, ends its sessions.
const CRASH_CODES: [&str; 6] = ["08006", "08001", "08000", "57P01", "57P02", "57P03"];
const RECONNECT_PAUSE: Duration = Duration::from_millis(50);
/// Accounts of pgbench at scale 1.
const ACCOUNTS_PER_BRANCH: u64 = 100_000;
const TELLERS_PER_BRANCH: u64 = 10;

/// Whether an error is what a crash looks like from outside.
pub fn is_crash(error: &StatementError) -> bool {
    CRASH_CODES.contains(&error.code.as_str())
}

/// What was answered, or none when a crash explains why nothing was.
///
/// # Errors
///
/// Any other error.
pub fn crash_or_error<T>(outcome: anyhow::Result<T>) -> anyhow::Result<Option<T>> {
    match outcome {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.downcast_ref::<StatementError>().is_some_and(is_crash) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What clients share.
#[derive(Debug, Default)]
pub struct Shared {
    /// Set to end them.
    pub stopping: AtomicBool,
    /// Transactions that were answered.
    pub done: AtomicU64,
    /// Connections that broke.
    pub broken: AtomicU64,
}

/// Transfers (or, on a standby, reads) until it is told to stop.
///
/// # Errors
///
/// Any answer that no crash explains.
pub async fn client(config: Config, scale: u64, is_reader: bool, seed: u64, shared: Arc<Shared>) -> anyhow::Result<()> {
    let mut random = StdRng::seed_from_u64(seed);
    while !shared.stopping.load(Ordering::Relaxed) {
        let broken = match Session::connect("client", &config).await {
            Ok(session) => work(&session, scale, is_reader, &mut random, &shared).await,
            Err(error) => Err(error),
        };
        match broken {
            Ok(()) => {}
            Err(error) if is_crash(&error) => {
                shared.broken.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(RECONNECT_PAUSE).await;
            }
            Err(error) => bail!("no crash explains this: {error}"),
        }
    }
    Ok(())
}

async fn work(
    session: &Session,
    scale: u64,
    is_reader: bool,
    random: &mut StdRng,
    shared: &Shared,
) -> Result<(), StatementError> {
    while !shared.stopping.load(Ordering::Relaxed) {
        let account = random.random_range(1..=scale * ACCOUNTS_PER_BRANCH);
        if is_reader {
            session.run(&format!("SELECT abalance FROM pgbench_accounts WHERE aid = {account}")).await?;
        } else {
            let (teller, branch) =
                (random.random_range(1..=scale * TELLERS_PER_BRANCH), random.random_range(1..=scale));
            let delta = random.random_range(-5000..=5000);
            session
                .run(&format!(
                    "BEGIN; UPDATE pgbench_accounts SET abalance = abalance + {delta} WHERE aid = {account};
                    UPDATE pgbench_tellers SET tbalance = tbalance + {delta} WHERE tid = {teller};
                    UPDATE pgbench_branches SET bbalance = bbalance + {delta} WHERE bid = {branch};
                    INSERT INTO pgbench_history (tid, bid, aid, delta) VALUES ({teller}, {branch}, {account}, {delta});
                    COMMIT"
                ))
                .await?;
        }
        shared.done.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
