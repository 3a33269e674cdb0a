//! One server's part in the epochs of one database: connections that hold snapshots open.
//!
//! ```text
//!  Out --joining succeeds--> In
//!  In  --misses a deadline, loses its connection--> Out (tried again with back-off)
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use crate::backend::{Backend, BackendError, Credentials};
use crate::servers::{Role, Server};

/// First pause before a server that left the epochs is tried again; doubled each time.
const REJOIN_PAUSE_MIN: Duration = Duration::from_millis(50);

/// Longest such pause.
const REJOIN_PAUSE_MAX: Duration = Duration::from_secs(1);

/// A server that joins must replay up to the last marker within this.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// A pause between two looks at a standby that is far behind.
const LOOK_PAUSE: Duration = Duration::from_millis(1);

/// Looks without a pause before looks with one.
const LOOKS_WITHOUT_PAUSE: u32 = 30;

const OPEN_SNAPSHOT: [&str; 2] =
    ["BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "SELECT pg_catalog.pg_export_snapshot()"];

const CANARY: &str =
    "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY; SELECT 1 FROM onecopy_router.tripwire LIMIT 1; COMMIT";

/// One server in the epochs of one database.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) server: Arc<Server>,
    database: Arc<str>,
    credentials: Arc<Credentials>,
    state: State,
}

#[derive(Debug)]
enum State {
    Out { retry_at: Instant, pause: Duration },
    Joining { task: JoinHandle<Result<[Backend; 2], BackendError>>, pause: Duration },
    In { holders: Box<[Backend; 2]>, next: usize },
}

impl Member {
    pub(super) fn new(server: Arc<Server>, database: Arc<str>, credentials: Arc<Credentials>) -> Member {
        let state = State::Out { retry_at: Instant::now(), pause: REJOIN_PAUSE_MIN };
        Member { server, database, credentials, state }
    }

    pub(super) fn is_in(&self) -> bool {
        matches!(self.state, State::In { .. })
    }

    /// Goes on with joining, if this server is out; `marker` is the WAL position it must have replayed.
    pub(super) async fn advance(&mut self, marker: Option<&str>) {
        match &mut self.state {
            State::Out { retry_at, pause } if *retry_at <= Instant::now() => {
                let joining = join(
                    self.server.clone(),
                    self.database.clone(),
                    self.credentials.clone(),
                    marker.map(str::to_owned),
                );
                self.state = State::Joining { pause: *pause, task: tokio::spawn(joining) };
            }
            State::Joining { task, pause } if task.is_finished() => {
                let pause = *pause;
                self.state = match task.await {
                    Ok(Ok(holders)) => {
                        tracing::info!(server = self.server.name, database = &*self.database, "joins the epochs");
                        State::In { holders: Box::new(holders), next: 0 }
                    }
                    Ok(Err(error)) => {
                        tracing::debug!(server = self.server.name, %error, "cannot join the epochs yet");
                        State::Out { retry_at: Instant::now() + pause, pause: (pause * 2).min(REJOIN_PAUSE_MAX) }
                    }
                    Err(_) => State::Out { retry_at: Instant::now() + pause, pause },
                };
            }
            _ => {}
        }
    }

    /// Waits until a started joining has ended.
    pub(super) async fn joined(&mut self) {
        if let State::Joining { task, .. } = &mut self.state {
            while !task.is_finished() {
                tokio::time::sleep(LOOK_PAUSE).await;
            }
            self.advance(None).await;
        }
    }

    /// Leaves the epochs; its connections are closed, since what they still answer is unknown.
    pub(super) fn leave(&mut self, reason: &dyn std::fmt::Display) {
        tracing::warn!(server = self.server.name, database = &*self.database, %reason, "leaves the epochs");
        self.state = State::Out { retry_at: Instant::now() + REJOIN_PAUSE_MIN, pause: REJOIN_PAUSE_MIN };
    }

    /// Opens the epoch's snapshot here and gives its exported name. On the leader the canary runs first; on a follower
    /// `marker` must be replayed first.
    pub(super) async fn open_snapshot(&mut self, marker: Option<&str>) -> Result<String, BackendError> {
        let State::In { holders, next } = &mut self.state else {
            return Err(BackendError::Login {
                server: self.server.name.clone(),
                reason: "not in the epochs".to_owned(),
            });
        };
        let holder = &mut holders[*next];
        let mut results = match self.server.role {
            Role::Leader => holder.pipeline(&[CANARY, OPEN_SNAPSHOT[0], OPEN_SNAPSHOT[1]]).await?,
            Role::Follower => {
                if let Some(marker) = marker {
                    wait_for_replay(holder, marker).await?;
                }
                holder.pipeline(&OPEN_SNAPSHOT).await?
            }
        };
        let name = results.pop().and_then(|rows| rows.into_iter().next()?.into_iter().next()?);
        name.ok_or_else(|| BackendError::Login {
            server: self.server.name.clone(),
            reason: "pg_export_snapshot() gave no name".to_owned(),
        })
    }

    /// The new epoch is published: ends the snapshot of the one before.
    pub(super) async fn turn(&mut self) -> Result<(), BackendError> {
        if let State::In { holders, next } = &mut self.state {
            *next = 1 - *next;
            close_snapshot(&mut holders[*next]).await?;
        }
        Ok(())
    }

    /// Ends all snapshots here.
    pub(super) async fn release(&mut self) -> Result<(), BackendError> {
        if let State::In { holders, .. } = &mut self.state {
            for holder in holders.iter_mut() {
                close_snapshot(holder).await?;
            }
        }
        Ok(())
    }
}

async fn close_snapshot(holder: &mut Backend) -> Result<(), BackendError> {
    if holder.in_transaction {
        holder.rows("ROLLBACK").await?;
    }
    Ok(())
}

async fn join(
    server: Arc<Server>,
    database: Arc<str>,
    credentials: Arc<Credentials>,
    marker: Option<String>,
) -> Result<[Backend; 2], BackendError> {
    let mut first = Backend::connect(&server, &database, &credentials, "onecopy epoch").await?;
    let second = Backend::connect(&server, &database, &credentials, "onecopy epoch").await?;
    if let (Role::Follower, Some(marker)) = (server.role, marker) {
        let replay = wait_for_replay(&mut first, &marker);
        tokio::time::timeout(CATCH_UP_TIMEOUT, replay).await.map_err(|_| BackendError::TimedOut {
            server: server.name.clone(),
            milliseconds: CATCH_UP_TIMEOUT.as_millis(),
        })??;
    }
    Ok([first, second])
}

/// Asks a standby until it has replayed up to `marker`. The commit at that position is visible to every snapshot that is
/// taken afterwards: PostgreSQL advances the replay position after the record's effects.
async fn wait_for_replay(standby: &mut Backend, marker: &str) -> Result<(), BackendError> {
    let look = format!("SELECT pg_catalog.pg_last_wal_replay_lsn() >= '{marker}'::pg_catalog.pg_lsn");
    let mut looks = 0;
    loop {
        let rows = standby.rows(&look).await?;
        if rows.first().and_then(|row| row.first()).and_then(Option::as_deref) == Some("t") {
            return Ok(());
        }
        looks += 1;
        if looks > LOOKS_WITHOUT_PAUSE {
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }
}
