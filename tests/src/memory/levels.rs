//! The three levels of working together behind one face, so that the same is asked of each.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::ensure;
use onecopy_memory::own::Own;
use onecopy_memory::published::Published;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::memory::harness::Plan;
use crate::memory::pool::Pool;
use crate::servers::TestServer;

/// What a server keeps published: less than tests take, so that it must be filled again.
const RESERVE: &str = "32MB";
/// What has not been given back by then never is.
const DEADLINE: Duration = Duration::from_secs(180);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// A level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// The server shrinks its pool when it is asked.
    Request,
    /// The agent takes what the server has published, and does not ask.
    Publish,
    /// The agent drops clean pages of a server that knows nothing of it.
    Own,
}

/// A server that can be made smaller at its level.
#[derive(Debug)]
pub struct Hand {
    level: Level,
    server: Pool,
    published: Option<Arc<Published>>,
    own: Option<Arc<Own>>,
}

impl Level {
    /// What is to be started for it.
    pub fn plan(self, plan: Plan) -> Plan {
        match self {
            Level::Request => plan,
            Level::Publish => plan.set("onecopy.memory_reserve", RESERVE),
            Level::Own => plan.without_extension(),
        }
    }
}

impl Hand {
    /// On a running server that was planned for this level.
    ///
    /// # Errors
    ///
    /// The level's own refusal.
    pub async fn of(level: Level, server: &TestServer) -> anyhow::Result<Hand> {
        let directory = server.server.data_directory();
        let (mut published, mut own) = (None, None);
        match level {
            Level::Request => {}
            Level::Publish => published = Some(Arc::new(Published::open(directory)?)),
            Level::Own => own = Some(Arc::new(Own::open(directory)?)),
        }
        Ok(Hand { level, server: Pool::of(server).await?, published, own })
    }

    /// Has memory given back until at most `bytes` of the pool are left.
    ///
    /// # Errors
    ///
    /// A refusal, or memory that does not come.
    pub async fn shrink(&self, bytes: u64) -> anyhow::Result<()> {
        let deadline = Instant::now() + DEADLINE;
        while !self.press(bytes).await? {
            ensure!(
                Instant::now() < deadline,
                "{:?}: the pool is not {bytes} bytes: {}",
                self.level,
                self.shown().await
            );
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        Ok(())
    }

    async fn shown(&self) -> String {
        match self.level {
            Level::Own => self.own.as_ref().map(|own| format!("{:?}", own.figures())).unwrap_or_default(),
            _ => format!("{:?}", self.server.status().await),
        }
    }

    /// One step towards it, as an agent does one after the other; whether that was all.
    ///
    /// # Errors
    ///
    /// A refusal.
    pub async fn press(&self, bytes: u64) -> anyhow::Result<bool> {
        if let Some(own) = self.own.clone() {
            // Dirty pages are not the agent's to write.
            self.server.session().run("CHECKPOINT").await?;
            let dropped = tokio::task::spawn_blocking(move || own.shrink_to(bytes)).await??;
            return Ok(dropped.resident_bytes <= bytes);
        }
        let Some(published) = self.published.clone() else {
            return Ok(self.server.resize(bytes).await? == bytes);
        };
        let target = self.server.status().await?.target_bytes;
        if target > bytes {
            tokio::task::spawn_blocking(move || published.take(target - bytes)).await??;
        }
        Ok(target <= bytes)
    }

    /// Gives the pool room to grow again.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn grow(&self, bytes: u64) -> anyhow::Result<()> {
        if self.level != Level::Own {
            self.server.resize(bytes).await?;
        }
        Ok(())
    }

    /// Keeps the pool small until the value is dropped: what was read again at the level own must be dropped again.
    pub fn hold(&self, bytes: u64) -> Hold {
        let (stopping, own) = (Arc::new(AtomicBool::new(false)), self.own.clone());
        let stop = stopping.clone();
        let task = tokio::task::spawn_blocking(move || {
            while let (Some(own), false) = (&own, stop.load(Ordering::Relaxed)) {
                own.shrink_to(bytes)?;
                std::thread::sleep(LOOK_INTERVAL);
            }
            Ok(())
        });
        Hold { stopping, task }
    }
}

/// A pool that is kept small.
#[derive(Debug)]
pub struct Hold {
    stopping: Arc<AtomicBool>,
    task: JoinHandle<anyhow::Result<()>>,
}

impl Hold {
    /// Ends it.
    ///
    /// # Errors
    ///
    /// What went wrong meanwhile.
    pub async fn end(mut self) -> anyhow::Result<()> {
        self.stopping.store(true, Ordering::Relaxed);
        (&mut self.task).await?
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
    }
}
