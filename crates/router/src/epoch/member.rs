//! One server's part in the epochs of one database: connections that hold snapshots open.
//!
//! ```text
//!  Out --joining succeeds--> In
//!  In  --misses a deadline, loses its connection--> Out (tried again with back-off)
//! ```
//!
//! Each deadline that is missed has kept the commit barrier closed for so long. So who misses it again soon after it
//! has come back stays out for twice as long as the time before.
//!
//! No gate waits for a server that is not in, and joining is a task of its own. It ends only when the server has
//! replayed so much that the next gate will hardly have to wait for it: one that is far behind, such as a new copy,
//! catches up outside.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::backend::{Backend, BackendError, Credentials, Purpose};
use crate::config::LiveSettings;
use crate::servers::Server;
use crate::timeline::{SystemTimeline, Unfit};
use crate::topology::Role;

/// First pause before a server that left the epochs is tried again; doubled each time.
const REJOIN_PAUSE_MIN: Duration = Duration::from_millis(50);

/// Longest such pause.
const REJOIN_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Longest pause of a follower that is late again and again: it keeps the commit barrier closed for 1 % of the time at
/// the most.
const LATE_PAUSE_MAX: Duration = Duration::from_secs(10);

/// A follower that has been in for so long is no flapping one.
const STEADY_AFTER: Duration = Duration::from_secs(10);

/// A server that joins must have caught up within this, or is tried again later.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// A pause between two looks at a standby that joins.
const CATCH_UP_LOOK_PAUSE: Duration = Duration::from_millis(10);

/// A pause between two looks whether a joining has ended.
const LOOK_PAUSE: Duration = Duration::from_millis(1);

/// Pauses that a standby itself makes between looks at what it has replayed, before it says that it has not. The router
/// waits no longer for it than its own time-out.
const REPLAY_LOOKS_MAX: u32 = 10_000;

const OPEN_SNAPSHOT: [&str; 2] =
    ["BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "SELECT pg_catalog.pg_export_snapshot()"];

const CANARY: &str =
    "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY; SELECT 1 FROM onecopy_router.tripwire LIMIT 1; COMMIT";

/// Where a gate stands in the WAL.
#[derive(Debug, Clone)]
pub(super) struct Marker {
    /// The position that a standby must have replayed.
    pub(super) position: String,
    /// When the leader committed it.
    pub(super) made_at: Instant,
}

/// What a server must have caught up with before it joins.
#[derive(Debug, Clone)]
pub(super) struct CatchUp {
    /// The leader; its probes tell how much it has written.
    pub(super) leader: Arc<Server>,
    /// The newest gate.
    pub(super) newest: watch::Receiver<Option<Marker>>,
    /// A gate that was made half of `follower_timeout_ms` ago is as good as the newest.
    pub(super) settings: LiveSettings,
}

/// One server in the epochs of one database.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) server: Arc<Server>,
    database: Arc<str>,
    credentials: Arc<Credentials>,
    catch_up: CatchUp,
    state: State,
    /// The pause if it is late once more.
    late_pause: Duration,
    /// Why it could not join the last time; told once.
    refusal: Option<String>,
}

/// Connections that hold snapshots, and of which history their server is.
type Joined = ([Backend; 2], SystemTimeline);

impl Drop for Member {
    fn drop(&mut self) {
        if let State::Joining { task, .. } = &self.state {
            task.abort();
        }
    }
}

#[derive(Debug)]
enum State {
    Out { retry_at: Instant, pause: Duration },
    Joining { task: JoinHandle<Result<Joined, BackendError>>, pause: Duration },
    In { holders: Box<[Backend; 2]>, next: usize, timeline: SystemTimeline, since: Instant },
}

impl Member {
    pub(super) fn new(server: Arc<Server>, database: Arc<str>, catch_up: CatchUp) -> Member {
        let state = State::Out { retry_at: Instant::now(), pause: REJOIN_PAUSE_MIN };
        let credentials = Arc::new(Credentials::of_router(&server));
        Member { server, database, credentials, catch_up, state, late_pause: REJOIN_PAUSE_MIN, refusal: None }
    }

    pub(super) fn is_in(&self) -> bool {
        matches!(self.state, State::In { .. })
    }

    /// If it is in: whether its connections are there, and the leader is still of the history in which it joined.
    ///
    /// # Errors
    /// Why it must leave.
    pub(super) fn check(&mut self) -> Result<(), &'static str> {
        let State::In { holders, timeline, .. } = &mut self.state else { return Ok(()) };
        if !holders.iter_mut().all(Backend::is_alive) {
            return Err("has lost the connections that hold its snapshots");
        }
        let leader = self.catch_up.leader.timeline.borrow();
        if leader.as_ref().is_some_and(|leader| timeline.check_follows(leader).is_err()) {
            return Err("joined when the leader was of another system or timeline");
        }
        Ok(())
    }

    /// Goes on with joining, if this server is out. Waits for nothing.
    pub(super) async fn advance(&mut self) {
        match &mut self.state {
            State::Out { retry_at, pause } if *retry_at <= Instant::now() => {
                let joining =
                    join(self.server.clone(), self.database.clone(), self.credentials.clone(), self.catch_up.clone());
                self.state = State::Joining { pause: *pause, task: tokio::spawn(joining) };
            }
            State::Joining { task, pause } if task.is_finished() => {
                let pause = *pause;
                self.state = match task.await {
                    Ok(Ok((holders, timeline))) => {
                        tracing::info!(server = self.server.name, database = &*self.database, "joins the epochs");
                        self.server.has_caught_up.store(true, SeqCst);
                        self.refusal = None;
                        if self.server.role == Role::Leader {
                            self.server.timeline.send_replace(Some(timeline.clone()));
                        }
                        State::In { holders: Box::new(holders), next: 0, timeline, since: Instant::now() }
                    }
                    Ok(Err(error)) => {
                        let refusal = Some(error.to_string());
                        if self.refusal != refusal {
                            tracing::warn!(database = &*self.database, %error, "cannot join the epochs");
                            self.refusal = refusal;
                        }
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
            self.advance().await;
        }
    }

    /// Leaves the epochs; its connections are closed, since what they still answer is unknown.
    pub(super) fn leave(&mut self, reason: &dyn std::fmt::Display) {
        tracing::warn!(server = self.server.name, database = &*self.database, %reason, "leaves the epochs");
        self.state = State::Out { retry_at: Instant::now() + REJOIN_PAUSE_MIN, pause: REJOIN_PAUSE_MIN };
    }

    /// Leaves the epochs because it has kept a gate waiting in vain.
    pub(super) fn leave_late(&mut self, reason: &dyn std::fmt::Display) {
        if matches!(self.state, State::In { since, .. } if since.elapsed() >= STEADY_AFTER) {
            self.late_pause = REJOIN_PAUSE_MIN;
        }
        let pause = self.late_pause;
        self.late_pause = (pause * 2).min(LATE_PAUSE_MAX);
        self.leave(reason);
        self.state = State::Out { retry_at: Instant::now() + pause, pause: REJOIN_PAUSE_MIN };
    }

    /// Opens the epoch's snapshot here and gives its exported name. On the leader the canary runs first; on a follower
    /// `marker` must be replayed first.
    pub(super) async fn open_snapshot(&mut self, marker: Option<&str>) -> Result<String, BackendError> {
        let State::In { holders, next, .. } = &mut self.state else {
            return Err(BackendError::Login {
                server: self.server.name.clone(),
                reason: "not in the epochs".to_owned(),
            });
        };
        let holder = &mut holders[*next];
        // The snapshot of the epoch before the newest one: who was to open that has had the time since its gate.
        let end = holder.in_transaction.then_some("ROLLBACK");
        let then_open = |first| end.into_iter().chain([first]).chain(OPEN_SNAPSHOT).collect::<Vec<_>>();
        let mut results = match self.server.role {
            Role::Leader => holder.pipeline(&then_open(CANARY)).await?,
            Role::Follower => {
                let wait = wait_until_replayed(marker.unwrap_or("0/0"));
                let results = holder.pipeline(&then_open(&wait)).await?;
                if results[usize::from(end.is_some())].is_empty() {
                    // What was opened behind it may lack commits.
                    return Err(BackendError::Login {
                        server: self.server.name.clone(),
                        reason: "it has not replayed the marker".to_owned(),
                    });
                }
                results
            }
        };
        let name = results.pop().and_then(|rows| rows.into_iter().next()?.into_iter().next()?);
        name.ok_or_else(|| BackendError::Login {
            server: self.server.name.clone(),
            reason: "pg_export_snapshot() gave no name".to_owned(),
        })
    }

    /// The new epoch is published. The snapshot of the one before stays until the next gate: readers may be about to
    /// open it.
    pub(super) fn turn(&mut self) {
        if let State::In { next, .. } = &mut self.state {
            *next = 1 - *next;
        }
    }

    /// No gate comes so soon: ends the snapshot of the epoch before.
    pub(super) async fn close_previous(&mut self) -> Result<(), BackendError> {
        if let State::In { holders, next, .. } = &mut self.state {
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
    catch_up: CatchUp,
) -> Result<Joined, BackendError> {
    let mut first = Backend::connect(&server, &database, &credentials, Purpose::Epoch).await?;
    let second = Backend::connect(&server, &database, &credentials, Purpose::Epoch).await?;
    let mut timeline = first.system_timeline().await?;
    if server.role == Role::Follower {
        let unfit = |reason| BackendError::Unfit { server: server.name.clone(), reason };
        let near = async {
            follows(&timeline, &catch_up.leader).await.map_err(unfit)?;
            wait_until_near(&mut first, catch_up.clone()).await?;
            // What it has caught up with counts if it was of the leader's history all the time.
            timeline = first.system_timeline().await?;
            follows(&timeline, &catch_up.leader).await.map_err(unfit)
        };
        tokio::time::timeout(CATCH_UP_TIMEOUT, near).await.map_err(|_| BackendError::TimedOut {
            server: server.name.clone(),
            milliseconds: CATCH_UP_TIMEOUT.as_millis(),
        })??;
    }
    Ok(([first, second], timeline))
}

/// Whether a standby of this timeline is one of `leader`'s, which has joined first.
async fn follows(timeline: &SystemTimeline, leader: &Server) -> Result<(), Unfit> {
    let mut known = leader.timeline.subscribe();
    let known = known.wait_for(Option::is_some).await.ok().and_then(|known| known.clone());
    known.map_or(Ok(()), |leader| timeline.check_follows(&leader))
}

/// Waits until a standby is so near the leader that the next gate will hardly have to wait for it.
async fn wait_until_near(standby: &mut Backend, mut catch_up: CatchUp) -> Result<(), BackendError> {
    if catch_up.newest.borrow().is_none() && standby.server.has_caught_up() {
        // The first gate of a database opened just now: it finds out by itself who is too far behind.
        return Ok(());
    }
    // The newest gate may be old, when nobody reads.
    let written = catch_up.leader.wal_position_bytes.load(Relaxed);
    let look = format!("SELECT pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_last_wal_replay_lsn(), '0/0') >= {written}");
    wait_for_replay(standby, &look).await?;
    loop {
        let Some(marker) = catch_up.newest.borrow_and_update().clone() else { return Ok(()) };
        wait_for_replay(standby, &replayed_marker(&marker.position)).await?;
        let is_newest = !catch_up.newest.has_changed().unwrap_or(false);
        let behind_max = Duration::from_millis(catch_up.settings.borrow().follower_timeout_ms) / 2;
        if is_newest || marker.made_at.elapsed() <= behind_max {
            return Ok(());
        }
    }
}

/// The statement with which a standby waits itself: it looks before each pause, and gives a row once it has replayed
/// `position`. PostgreSQL sleeps for no less than a millisecond.
fn wait_until_replayed(position: &str) -> String {
    format!(
        "SELECT 1 FROM (SELECT pg_catalog.generate_series(1, {REPLAY_LOOKS_MAX})) look \
         WHERE pg_catalog.pg_last_wal_replay_lsn() >= '{position}'::pg_catalog.pg_lsn \
         OR pg_catalog.pg_sleep(0.001) IS NULL LIMIT 1"
    )
}

fn replayed_marker(position: &str) -> String {
    format!("SELECT pg_catalog.pg_last_wal_replay_lsn() >= '{position}'::pg_catalog.pg_lsn")
}

/// Asks a standby again and again until its answer to `look` is true. The commit at a position that it says it has
/// replayed is visible to every snapshot that is taken afterwards: PostgreSQL advances the replay position after the
/// record's effects.
async fn wait_for_replay(standby: &mut Backend, look: &str) -> Result<(), BackendError> {
    loop {
        let rows = standby.rows(look).await?;
        if rows.first().and_then(|row| row.first()).and_then(Option::as_deref) == Some("t") {
            return Ok(());
        }
        tokio::time::sleep(CATCH_UP_LOOK_PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServerConfiguration;

    /// A follower where nobody listens.
    fn member() -> Member {
        let configuration = ServerConfiguration::unconnected("follower");
        let server = Server::new(1, Role::Follower, &configuration).unwrap();
        let newest = watch::Sender::new(None).subscribe();
        let settings = watch::Sender::new(Arc::default()).subscribe();
        let catch_up = CatchUp { leader: server.clone(), newest, settings };
        Member::new(server, "database".into(), catch_up)
    }

    fn set_retry_at(member: &mut Member, at: Instant) {
        let State::Out { retry_at, .. } = &mut member.state else { panic!("it is not out") };
        *retry_at = at;
    }

    fn pause_of(member: &Member) -> Duration {
        let State::Out { pause, .. } = &member.state else { panic!("it is not out: {:?}", member.state) };
        *pause
    }

    /// Whoever cannot join is tried ever more rarely, not before its time, and is no part of a gate.
    #[tokio::test]
    async fn a_server_that_cannot_join_is_tried_ever_more_rarely() {
        let mut member = member();
        let mut pauses = Vec::new();
        for _ in 0..7 {
            set_retry_at(&mut member, Instant::now());
            member.advance().await;
            assert!(matches!(member.state, State::Joining { .. }) && !member.is_in());
            member.joined().await;
            pauses.push(pause_of(&member).as_millis());
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1000, 1000, 1000]);
        assert!(!member.server.has_caught_up() && member.open_snapshot(None).await.is_err());
        member.leave(&"it was away for long");
        assert_eq!(pause_of(&member), REJOIN_PAUSE_MIN);
        set_retry_at(&mut member, Instant::now() + Duration::from_secs(3600));
        member.advance().await;
        assert_eq!(pause_of(&member), REJOIN_PAUSE_MIN, "its time has not come");
    }

    /// Each time that a follower is late it keeps the commit barrier closed, so it may come back ever more rarely.
    ///
    /// Spec: L3
    #[tokio::test]
    async fn a_follower_that_is_late_again_and_again_stays_out_ever_longer() {
        let mut member = member();
        for expected_ms in [50, 100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000] {
            let (before, expected) = (Instant::now(), Duration::from_millis(expected_ms));
            member.leave_late(&"late");
            let after = Instant::now();
            let State::Out { retry_at, pause } = member.state else { panic!("it is not out") };
            assert_eq!(pause, REJOIN_PAUSE_MIN, "what cannot connect is another matter");
            assert!((before + expected..=after + expected).contains(&retry_at), "{expected_ms} ms");
        }
    }
}
