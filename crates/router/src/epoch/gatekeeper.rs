//! The task that closes gates: one a database.
//!
//! A gate: close the commit barrier; on the leader, the marker (a tiny commit whose WAL position every follower must
//! replay) beside the canary and the leader's snapshot; on every follower, wait for the marker and open the snapshot;
//! publish; reopen. A follower that misses its deadline leaves the epoch; the others go on. Between gates the
//! gatekeeper looks which followers the router has now.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::member::{CatchUp, Marker, Member};
use super::pace::Pace;
use super::{CommitBarrier, Epoch, EpochSnapshot, Epochs, tripwire};
use crate::backend::{Backend, BackendError, Credentials, Purpose, ServerProcess};
use crate::config::{LiveSettings, RouterSettings};
use crate::membership::Servers;
use crate::servers::{Health, Server};
use crate::topology::Topology;

/// The leader must do its part of a gate within this.
const LEADER_TIMEOUT: Duration = Duration::from_millis(1000);

/// How long the first gate waits for the followers' first connections.
const FIRST_JOIN_TIMEOUT: Duration = Duration::from_secs(2);

/// An epoch that lacks no commit is let go after so many times `epoch_age_max_ms`: its snapshots hold vacuum back in
/// all databases (`hot_standby_feedback`), however little happens in this one.
const UNCHANGED_AGE_FACTOR: u32 = 10;

/// A server must close a snapshot within this.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// Connections of the gate's own must be made, and their questions answered, within this.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(2);

/// First and longest pause after a gate that was kept from closing too long by commits in flight.
const BLOCKED_PAUSE_MIN: Duration = Duration::from_millis(50);
const BLOCKED_PAUSE_MAX: Duration = Duration::from_millis(1000);

/// A server process without an answer must be gone within this for a gate to be tried.
const RESOLVE_TIMEOUT: Duration = Duration::from_millis(500);

/// The tripwire is emptied after this many inserts, so that the canary stays cheap.
const TRIPWIRES_KEPT_MAX: u64 = 2000;

/// The marker is flushed whatever the role's settings say, and nobody waits for remote confirmation: each follower is
/// asked on its own.
const PREPARE_MARKER: &str = "SET synchronous_commit = local; SET lock_timeout = '20ms'";

/// A commit whose position marks the gate in the WAL.
const MARKER: &str = "SELECT pg_catalog.pg_logical_emit_message(true, 'onecopy', '')";

/// Why a gate made no epoch.
#[derive(Debug, thiserror::Error)]
enum GateError {
    #[error("sessions {0:?} held their commits open too long")]
    Blocked(Vec<u64>),
    #[error("a commit without an answer may still happen")]
    InDoubt,
    #[error("the leader is not there")]
    NoLeader,
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Makes the epochs of one database.
pub struct Gatekeeper {
    epochs: Arc<Epochs>,
    barrier: Arc<CommitBarrier>,
    settings: LiveSettings,
    credentials: Arc<Credentials>,
    database: Arc<str>,
    servers: Arc<Servers>,
    /// Of which version of the list of servers the members are.
    servers_version: u64,
    members: Topology<Member>,
    marker: Option<Backend>,
    newest_marker: watch::Sender<Option<Marker>>,
    tripwires_emptied: u64,
    pace: Pace,
    hooks: GateHooks,
}

/// Hears who kept a gate from closing.
type OnBlocked = Box<dyn Fn(&[super::commit_barrier::InFlightCommit]) + Send>;

/// What others do when something happens at a gate.
pub struct GateHooks {
    /// These sessions kept a gate from closing.
    pub on_blocked: OnBlocked,
    /// A canary ran: one more serializable transaction on the leader.
    pub on_canary: Box<dyn Fn() + Send>,
}

impl Gatekeeper {
    /// A gatekeeper of `database`.
    pub fn new(
        epochs: Arc<Epochs>,
        barrier: Arc<CommitBarrier>,
        settings: LiveSettings,
        servers: Arc<Servers>,
        database: &str,
        hooks: GateHooks,
    ) -> Gatekeeper {
        let database: Arc<str> = database.into();
        let credentials = Arc::new(Credentials::of_router(servers.leader()));
        let newest_marker = watch::Sender::new(None);
        // In this order the list is at least as new as the version; one that is newer is looked at once more.
        let servers_version = servers.version();
        let members =
            servers.current().map(|server| new_member(server, &database, &servers, &settings, &newest_marker));
        Gatekeeper {
            epochs,
            barrier,
            settings,
            credentials,
            database,
            servers_version,
            servers,
            members,
            marker: None,
            newest_marker,
            tripwires_emptied: 0,
            pace: Pace::new(Instant::now()),
            hooks,
        }
    }

    /// Makes the members those servers that the router has now; who was one stays as he is.
    fn take_members(&mut self) {
        let servers = self.servers.current();
        let members = &mut self.members.followers;
        members.retain(|member| servers.followers.iter().any(|server| server.number == member.server.number));
        for server in &servers.followers {
            if !members.iter().any(|member| member.server.number == server.number) {
                members.push(new_member(server, &self.database, &self.servers, &self.settings, &self.newest_marker));
            }
        }
    }

    /// Looks whether followers have come or gone.
    fn follow_servers(&mut self) {
        let version = self.servers.version();
        if version != self.servers_version {
            self.servers_version = version;
            self.take_members();
        }
    }

    /// A setting as it is now.
    fn milliseconds(&self, of: impl Fn(&RouterSettings) -> u64) -> Duration {
        Duration::from_millis(of(&self.settings.borrow()))
    }

    /// Does nothing for so long, or until the settings change.
    async fn rest(&mut self, pause: Duration) {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            Ok(()) = self.settings.changed() => {}
        }
    }

    /// Runs until the task is aborted.
    pub async fn run(mut self) {
        for member in self.members.servers_mut() {
            member.advance().await;
        }
        let first = async {
            for member in self.members.servers_mut().filter(|member| member.server.has_caught_up()) {
                member.joined().await;
            }
        };
        let _ = tokio::time::timeout(FIRST_JOIN_TIMEOUT, first).await;
        let mut blocked_pause = Duration::ZERO;
        loop {
            self.settings.mark_unchanged();
            let interval = self.milliseconds(|settings| settings.epoch_interval_ms);
            let pause = self.milliseconds(|settings| settings.gate_interval_min_ms);
            let asked = tokio::select! {
                asked = tokio::time::timeout(interval, self.epochs.wanted.notified()) => asked.is_ok(),
                Ok(()) = self.settings.changed() => continue,
            };
            self.follow_servers();
            self.take_out_lost();
            let is_barred = self.epochs.has_ddl_barrier() || self.epochs.is_to_be_released();
            let is_due = !is_barred && self.is_due(asked);
            if !is_due {
                self.resolve_unasked().await;
            }
            if is_barred {
                self.release().await;
                // A reader that has asked for a gate asks again, or finds the barrier: what it asked for was not done.
                self.epochs.note_attempt(blocked_pause > Duration::ZERO);
                self.rest(pause).await;
                continue;
            }
            if !is_due {
                self.let_lapse().await;
                continue;
            }
            let result = self.attempt().await;
            match &result {
                Ok(()) => blocked_pause = Duration::ZERO,
                Err(GateError::Blocked(_)) => {
                    // Each attempt holds commits for its time-out: the longer somebody stays, the rarer they get.
                    self.epochs.statistics.note_gave_up();
                    blocked_pause = (blocked_pause * 2).clamp(BLOCKED_PAUSE_MIN, BLOCKED_PAUSE_MAX);
                }
                Err(_) => self.epochs.statistics.note_failed(),
            }
            if let Err(error) = &result {
                tracing::debug!(database = &*self.database, %error, "no epoch");
            }
            let now = Instant::now();
            let rest = pause.max(blocked_pause);
            self.epochs.note_attempt(blocked_pause > Duration::ZERO);
            // Who can go elsewhere shall not hurry it.
            self.epochs.wait_times.note_next_gate(now + rest.max(self.pace.pause(now)));
            self.rest(rest.max(self.pace.pause_when_asked(now))).await;
        }
    }

    /// Whether anything would be gained by a gate now.
    fn is_due(&mut self, asked: bool) -> bool {
        let Some(epoch) = self.epochs.current().filter(|epoch| !epoch.is_doomed()) else {
            return asked;
        };
        let newer = self.barrier.commits_begun() > epoch.commits;
        let joined = self.members.servers().any(|member| member.is_in() && epoch.snapshot_on(&member.server).is_none());
        let old = self.is_old(&epoch);
        let are_read = self.epochs.readers.load(SeqCst) > 0 && self.pace.pause(Instant::now()).is_zero();
        // An epoch that lacks nothing is as new as any that could be made.
        (asked || are_read) && (newer || joined || old)
    }

    /// Whether it has held the vacuum horizon back for long enough.
    fn is_old(&self, epoch: &Epoch) -> bool {
        let age_max = self.milliseconds(|settings| settings.epoch_age_max_ms);
        let lacks_commits = self.barrier.commits_begun() > epoch.commits;
        epoch.closed_at.elapsed() > if lacks_commits { age_max } else { age_max * UNCHANGED_AGE_FACTOR }
    }

    /// A server whose connections are lost has the epoch's snapshot no longer: no reader is sent there for it.
    fn take_out_lost(&mut self) {
        for member in self.members.servers_mut() {
            if let Err(reason) = member.check() {
                member.leave(&reason);
            }
        }
        let members = &self.members;
        let has_it =
            |server: &Server| members.servers().any(|member| member.server.number == server.number && member.is_in());
        self.epochs.close_snapshots(|server| !has_it(server));
    }

    /// Lets an epoch end that nobody reads and that holds the vacuum horizon back. While the leader is gone none
    /// lapses: it is all that readers have.
    async fn let_lapse(&mut self) {
        for member in self.members.servers_mut() {
            member.advance().await;
            let closed = tokio::time::timeout(CLOSE_TIMEOUT, member.close_previous()).await;
            leave_unless_done(member, closed);
        }
        self.take_out_lost();
        let Some(epoch) = self.epochs.current() else { return };
        if self.members.leader.server.health() != Health::Up {
            // No other epoch can come in its place.
            return;
        }
        if self.is_old(&epoch) {
            self.release().await;
        }
    }

    /// Ends the current epoch for new readers and all snapshots held for it.
    async fn release(&mut self) {
        self.epochs.retire();
        for member in self.members.servers_mut() {
            let released = tokio::time::timeout(CLOSE_TIMEOUT, member.release()).await;
            leave_unless_done(member, released);
        }
    }

    async fn attempt(&mut self) -> Result<(), GateError> {
        self.epochs.readers.store(0, SeqCst);
        for member in self.members.servers_mut() {
            member.advance().await;
        }
        // The leader may have come back with another history.
        self.take_out_lost();
        match tokio::time::timeout(PREPARE_TIMEOUT, self.prepare()).await {
            Ok(result) => result?,
            Err(_) => return Err(GateError::NoLeader),
        }
        if !self.members.leader.is_in() {
            return Err(GateError::NoLeader);
        }
        let timeout = self.milliseconds(|settings| settings.gate_timeout_ms);
        let (barrier, epochs) = (self.barrier.clone(), self.epochs.clone());
        let holding = epochs.statistics.holding();
        let (begun_at, held_before) = (Instant::now(), barrier.commits_held());
        let Some(closed) = barrier.close(timeout).await else {
            let commits = self.barrier.in_flight();
            (self.hooks.on_blocked)(&commits);
            return Err(GateError::Blocked(commits.iter().map(|commit| commit.session).collect()));
        };
        let commits = closed.commits().ok_or(GateError::InDoubt)?;
        let closed_at = Instant::now();
        // Who dooms epochs from now on dooms this one.
        let id = self.epochs.next_id();
        let snapshots = self.open_everywhere(commits).await?;
        // Whoever has asked for a gate up to now gets this one: nothing has committed since it was closed.
        self.epochs.forget_requests();
        self.epochs.publish(Arc::new(Epoch::new(id, commits, closed_at, snapshots, &self.epochs)));
        drop(closed);
        drop(holding);
        let now = Instant::now();
        self.epochs.statistics.note_epoch(now - begun_at);
        self.epochs.wait_times.note_gate(now - begun_at);
        if barrier.commits_held() > held_before {
            self.pace.note_closed(now - begun_at, now);
        }
        self.members.servers_mut().for_each(Member::turn);
        self.take_out_lost();
        Ok(())
    }

    /// What must be there before the commit barrier is closed: the marker's connection, and no commit without an
    /// answer.
    async fn prepare(&mut self) -> Result<(), GateError> {
        self.resolve().await?;
        if self.marker.as_mut().is_none_or(|marker| !marker.is_alive()) {
            let leader = &self.members.leader.server;
            let mut marker = Backend::connect(leader, &self.database, &self.credentials, Purpose::Gate).await?;
            // The database may have been opened while the leader was gone.
            tripwire::make_if_missing(&mut marker).await?;
            marker.rows(PREPARE_MARKER).await?;
            self.marker = Some(marker);
        }
        Ok(())
    }

    /// Resolves commits in doubt also while nobody asks for a gate: a commit without an answer may wait on the leader
    /// for as long as it likes, with its locks, and whoever is in conflict with it is refused meanwhile.
    async fn resolve_unasked(&mut self) {
        if self.barrier.in_doubt().is_empty() || self.members.leader.server.health() != Health::Up {
            return;
        }
        let resolved = tokio::time::timeout(PREPARE_TIMEOUT, self.resolve()).await;
        if !matches!(resolved, Ok(Ok(()))) {
            tracing::debug!(database = &*self.database, ?resolved, "commits without an answer are not resolved");
        }
    }

    /// Makes sure that server processes whose commits were never answered have ended.
    async fn resolve(&mut self) -> Result<(), GateError> {
        let in_doubt = self.barrier.in_doubt();
        if in_doubt.is_empty() {
            return Ok(());
        }
        let leader = self.members.leader.server.clone();
        let list = in_doubt.iter().map(ServerProcess::to_string).collect::<Vec<_>>().join(",");
        let mut backend = Backend::connect(&leader, &self.database, &self.credentials, Purpose::Gate).await?;
        let deadline = Instant::now() + RESOLVE_TIMEOUT;
        while Instant::now() < deadline {
            let sql = format!(
                "SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity \
                 WHERE ({}) IN ({list}) AND pid <> pg_catalog.pg_backend_pid() AND backend_type = 'client backend'",
                ServerProcess::ROW
            );
            if backend.rows(&sql).await?.is_empty() {
                self.barrier.resolve(&in_doubt);
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Err(GateError::InDoubt)
    }

    /// The snapshots of all servers that make it in time. The barrier is closed.
    async fn open_everywhere(&mut self, commits: u64) -> Result<Vec<EpochSnapshot>, GateError> {
        let timeout = self.milliseconds(|settings| settings.follower_timeout_ms);
        let Topology { leader, followers, .. } = &mut self.members;
        let marker = self.marker.as_mut().ok_or(GateError::NoLeader)?;
        (self.hooks.on_canary)();
        let empty_tripwire = self.epochs.statistics.tripwires() - self.tripwires_emptied > TRIPWIRES_KEPT_MAX;
        let both = async { tokio::try_join!(send_marker(marker, empty_tripwire), leader.open_snapshot(None)) };
        let result = match tokio::time::timeout(LEADER_TIMEOUT, both).await {
            Ok(result) => result,
            Err(_) => Err(BackendError::TimedOut {
                server: leader.server.name.clone(),
                milliseconds: LEADER_TIMEOUT.as_millis(),
            }),
        };
        let (position, leader_snapshot) = match result {
            Ok(result) => result,
            Err(error) => {
                self.marker = None;
                leader.leave(&error);
                return Err(error.into());
            }
        };
        // From here on transactions that began before this gate are caught, whether or not an epoch comes of it.
        self.epochs.canary_commits.store(commits, SeqCst);
        if empty_tripwire {
            self.tripwires_emptied = self.epochs.statistics.tripwires();
        }
        // Known before the followers are asked: one that joins meanwhile must not be content with an older one.
        self.newest_marker.send_replace(Some(Marker { position: position.clone(), made_at: Instant::now() }));
        let position = &position;
        let opened = join_all(followers.iter_mut().filter(|member| member.is_in()).map(|member| async move {
            match tokio::time::timeout(timeout, member.open_snapshot(Some(position))).await {
                Ok(Ok(snapshot)) => Some(EpochSnapshot { server: member.server.clone(), snapshot }),
                Ok(Err(error)) => {
                    member.leave(&error);
                    None
                }
                Err(_) => {
                    member.leave_late(&format_args!("has not replayed the marker within {} ms", timeout.as_millis()));
                    None
                }
            }
        }))
        .await;
        let on_leader = EpochSnapshot { server: leader.server.clone(), snapshot: leader_snapshot };
        Ok(std::iter::once(on_leader).chain(opened.into_iter().flatten()).collect())
    }
}

fn new_member(
    server: &Arc<Server>,
    database: &Arc<str>,
    servers: &Servers,
    settings: &LiveSettings,
    newest_marker: &watch::Sender<Option<Marker>>,
) -> Member {
    let catch_up =
        CatchUp { leader: servers.leader().clone(), newest: newest_marker.subscribe(), settings: settings.clone() };
    Member::new(server.clone(), database.clone(), catch_up)
}

/// A server that has not closed a snapshot, or not in time, leaves the epochs.
fn leave_unless_done(member: &mut Member, result: Result<Result<(), BackendError>, tokio::time::error::Elapsed>) {
    match result {
        Ok(Ok(())) => {}
        Ok(Err(error)) => member.leave(&error),
        Err(_) => member.leave(&format_args!("has not closed a snapshot within {} ms", CLOSE_TIMEOUT.as_millis())),
    }
}

/// Commits the marker and gives its WAL position.
async fn send_marker(backend: &mut Backend, empty_tripwire: bool) -> Result<String, BackendError> {
    if empty_tripwire {
        // Outside a serializable transaction, or PostgreSQL would take it for a write that the canary must see.
        match backend.rows("TRUNCATE onecopy_router.tripwire").await {
            Err(BackendError::Sql { fields, .. }) => tracing::debug!(?fields, "the tripwire was not emptied"),
            result => drop(result?),
        }
    }
    let rows = backend.rows(MARKER).await?;
    let position = rows.into_iter().next().and_then(|row| row.into_iter().next()?);
    position.ok_or_else(|| BackendError::Login {
        server: backend.server.name.clone(),
        reason: "pg_logical_emit_message() gave no position".to_owned(),
    })
}

/// Runs all at once and waits for all.
async fn join_all<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        let mut waiting = false;
        for (future, output) in &mut futures {
            if output.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(value) => *output = Some(value),
                    std::task::Poll::Pending => waiting = true,
                }
            }
        }
        if waiting { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
    })
    .await;
    futures.into_iter().filter_map(|(_, output)| output).collect()
}

#[cfg(test)]
mod between_tests;
#[cfg(test)]
mod gate_tests;
#[cfg(test)]
mod harness;
