//! A server's buffer pool, asked and told by SQL.

use anyhow::{Context, ensure};
use onecopy_testing::try_until_async;

use crate::client::{Session, StatementResult};
use crate::servers::TestServer;

/// A connection that asks and tells.
#[derive(Debug, Clone)]
pub struct Pool {
    session: Session,
}

/// The one row of `onecopy_memory_status`, as far as tests look at it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The most that it may be.
    pub ceiling_bytes: u64,
    /// What is wanted.
    pub target_bytes: u64,
    /// The least that it may be.
    pub floor_bytes: u64,
    /// What is in use.
    pub pool_bytes: u64,
    /// What is captured.
    pub parked_bytes: u64,
    /// What is captured and offered.
    pub published_bytes: u64,
    /// What is captured and given back.
    pub returned_bytes: u64,
    /// `steady`, `shrinking`, `growing` or `blocked`.
    pub state: String,
    /// The background worker; 0 when there is none.
    pub worker: u32,
}

const STATUS: &str = "SELECT ceiling_bytes, target_bytes, floor_bytes, pool_bytes, parked_bytes, published_bytes,
    returned_bytes, coalesce(worker_pid, 0), state FROM onecopy_memory_status";

impl Pool {
    /// Connects.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn of(server: &TestServer) -> anyhow::Result<Pool> {
        Ok(Pool { session: server.connect("pool").await? })
    }

    /// The session underneath.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Sets the target and waits until the pool is that large; what the extension says it is now.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn resize(&self, bytes: u64) -> anyhow::Result<u64> {
        let answer = self.want(&format!("{} kB", bytes >> 10), true).await?;
        Ok(answer.number()?.try_into()?)
    }

    /// Sets the target in the extension's own words.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn want(&self, target: &str, wait: bool) -> StatementResult {
        let target = target.replace('\'', "''");
        self.session.run(&format!("SELECT onecopy_memory_target('{target}', {wait})")).await
    }

    /// What the extension says of it.
    ///
    /// # Errors
    ///
    /// The server's refusal; an answer that is none.
    pub async fn status(&self) -> anyhow::Result<Status> {
        let answer = self.session.run(STATUS).await?;
        ensure!(answer.rows.len() == 1, "{} rows of status", answer.rows.len());
        let row: Vec<&str> = answer.rows[0].iter().map(|value| value.as_deref().unwrap_or_default()).collect();
        let number = |column: usize| row[column].parse::<u64>().with_context(|| format!("column {column}: {row:?}"));
        Ok(Status {
            ceiling_bytes: number(0)?,
            target_bytes: number(1)?,
            floor_bytes: number(2)?,
            pool_bytes: number(3)?,
            parked_bytes: number(4)?,
            published_bytes: number(5)?,
            returned_bytes: number(6)?,
            worker: row[7].parse()?,
            state: row[8].to_owned(),
        })
    }

    /// Waits until the pool is at its target; its figures are consistent then.
    ///
    /// # Errors
    ///
    /// It does not come to rest, or its figures contradict each other.
    pub async fn steady(&self) -> anyhow::Result<Status> {
        // What is published belongs to the target, too, until somebody takes it.
        let is_steady = |status: &Status| {
            status.state == "steady" && status.pool_bytes + status.published_bytes == status.target_bytes
        };
        let status = try_until_async("the pool comes to rest", async || self.status().await, is_steady).await?;
        status.ensure_consistent()?;
        Ok(status)
    }
}

impl Status {
    /// Checks what holds of every pool at rest.
    ///
    /// # Errors
    ///
    /// The first thing that does not hold.
    pub fn ensure_consistent(&self) -> anyhow::Result<()> {
        ensure!(self.pool_bytes + self.parked_bytes == self.ceiling_bytes, "pool and parked are not all: {self:?}");
        ensure!(self.floor_bytes <= self.pool_bytes, "below the floor: {self:?}");
        ensure!(self.published_bytes + self.returned_bytes <= self.parked_bytes, "more than is parked: {self:?}");
        Ok(())
    }
}
