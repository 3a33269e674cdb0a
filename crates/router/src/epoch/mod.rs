//! Epochs: prefixes of the leader's commit order, open for reading on every replica at once.
//!
//! [`CommitBarrier`] knows which commits are in flight, [`Gatekeeper`] makes epochs, [`Epochs`] hands them to readers.
//!
//! An epoch is *doomed* when something that is not MVCC (DDL, TRUNCATE) commits after it: what a reader sees at it from
//! then on may be wrong. The flag is set before such a commit is sent and read after each answer, so no answer that saw
//! the commit is ever believed.

mod commit_barrier;
mod gatekeeper;
#[cfg(test)]
mod history_tests;
#[cfg(test)]
mod manual_poll;
mod member;
#[cfg(test)]
pub(crate) mod model_server;
mod pace;
mod statistics;
#[cfg(test)]
mod tests;
pub(crate) mod tripwire;
mod wait_times;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

pub use commit_barrier::{CommitBarrier, CommitGuard, HeldUntilResolved, WatchGuard};
pub use gatekeeper::{GateHooks, Gatekeeper};
pub use statistics::{GateStatistics, GateSummary};
pub use wait_times::WaitTimes;

use crate::config::Freshness;
use crate::servers::Server;
use crate::topology::Topology;

/// One prefix of the commit order.
#[derive(Debug)]
pub struct Epoch {
    /// Grows from gate to gate; given before its snapshots are taken.
    pub id: u64,
    /// How many commits it holds.
    pub commits: u64,
    /// When its gate closed.
    pub closed_at: Instant,
    /// Where it is open.
    pub snapshots: Vec<EpochSnapshot>,
    doomed_up_to: Arc<AtomicU64>,
}

/// Where an epoch is open.
#[derive(Debug, Clone)]
pub struct EpochSnapshot {
    /// The server.
    pub server: Arc<Server>,
    /// The exported snapshot to read it with there.
    pub snapshot: String,
}

impl Epoch {
    fn new(id: u64, commits: u64, closed_at: Instant, snapshots: Vec<EpochSnapshot>, epochs: &Epochs) -> Epoch {
        Epoch { id, commits, closed_at, snapshots, doomed_up_to: epochs.doomed_up_to.clone() }
    }

    /// No epoch at all: each reader has a snapshot of its own. For tests that must fail without epochs.
    pub fn unsafe_fake(servers: &Topology<Arc<Server>>) -> Epoch {
        static ID: AtomicU64 = AtomicU64::new(1);
        let id = ID.fetch_add(1, SeqCst);
        Epoch {
            id,
            commits: 0,
            closed_at: Instant::now(),
            snapshots: servers
                .servers()
                .map(|server| EpochSnapshot { server: server.clone(), snapshot: String::new() })
                .collect(),
            doomed_up_to: Arc::default(),
        }
    }

    /// The snapshot to read it with on `server`; none where it is not open.
    pub fn snapshot_on(&self, server: &Server) -> Option<&str> {
        self.snapshots
            .iter()
            .find(|snapshot| snapshot.server.number == server.number)
            .map(|snapshot| snapshot.snapshot.as_str())
    }

    /// Whether what is read at it can no longer be believed.
    pub fn is_doomed(&self) -> bool {
        self.id <= self.doomed_up_to.load(SeqCst)
    }
}

/// What a reader demands of an epoch.
#[derive(Debug, Clone, Copy)]
pub enum Demand {
    /// At least this many commits.
    Commits(u64),
    /// At least so many commits, and not older than this unless nothing committed since.
    Age(u64, Duration),
}

/// How many commits a session knows of.
#[derive(Debug, Clone, Copy, Default)]
pub struct Known {
    /// Its client may have been told of these before it began.
    pub before: u64,
    /// It may have seen these itself: what it has read or written on the leader.
    pub seen: u64,
}

impl Demand {
    /// The demand of a reader that arrives now and knows of so many commits. However old a read may be, it never shows
    /// less than the session has seen.
    pub fn of(freshness: Freshness, barrier: &CommitBarrier, known: Known) -> Demand {
        match freshness {
            Freshness::Strict => Demand::Commits(barrier.commits_begun()),
            Freshness::Session => Demand::Commits(known.seen.max(known.before)),
            Freshness::Bounded(age) => Demand::Age(known.seen, age),
        }
    }

    fn is_met_by(self, epoch: &Epoch, barrier: &CommitBarrier) -> bool {
        match self {
            Demand::Commits(commits) => epoch.commits >= commits,
            Demand::Age(commits, age) => {
                epoch.commits >= barrier.commits_begun()
                    || (epoch.commits >= commits && epoch.closed_at.elapsed() <= age)
            }
        }
    }
}

/// What is known of a snapshot on the leader that is taken after this was made.
#[derive(Debug, Clone, Copy)]
pub struct LaterSnapshot {
    /// Commits that it holds at least.
    pub commits: u64,
    /// What had been changed that is not MVCC, for [`Epochs::snapshot_stands`].
    pub change_counter: u64,
    /// The same of what dooms epochs, for [`Epochs::is_older_than_a_doom`].
    pub dooms: u64,
}

/// How many of something are under way, and a number that is another one when any was in between.
#[derive(Debug, Default)]
struct InFlight {
    now: AtomicUsize,
    change_counter: AtomicU64,
}

impl InFlight {
    fn begin(&self) {
        self.now.fetch_add(1, SeqCst);
        self.change_counter.fetch_add(1, SeqCst);
    }

    fn end(&self) {
        self.change_counter.fetch_add(1, SeqCst);
        self.now.fetch_sub(1, SeqCst);
    }

    fn change_counter(&self) -> u64 {
        self.change_counter.load(SeqCst)
    }

    /// Whether none is under way, nor was since `change_counter`.
    fn none_since(&self, change_counter: u64) -> bool {
        self.now.load(SeqCst) == 0 && self.change_counter() == change_counter
    }
}

/// Why a reader gets no epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoEpoch {
    /// DDL is going on: read on the leader.
    DdlBarrier,
    /// No gate could be closed in time.
    TimedOut,
}

/// The epochs of one database as readers see them.
#[derive(Debug)]
pub struct Epochs {
    current: RwLock<Option<Arc<Epoch>>>,
    /// Counts gates, closed or failed, so that waiting readers look again.
    attempts: watch::Sender<u64>,
    wanted: Notify,
    /// Readers since the last gate, so that nobody is served epochs that nobody reads.
    readers: AtomicUsize,
    ddl_barriers: AtomicUsize,
    /// Commits at the newest gate whose canary ran.
    canary_commits: AtomicU64,
    last_id: AtomicU64,
    /// Commits that are not MVCC.
    changes: InFlight,
    /// Those of them that doom epochs.
    dooms: InFlight,
    release: AtomicBool,
    /// The last gate was kept from closing too long by commits in flight.
    blocked: AtomicBool,
    doomed_up_to: Arc<AtomicU64>,
    /// How gates went.
    pub statistics: GateStatistics,
    /// What waiting for a gate takes, and reading on the leader instead.
    pub wait_times: WaitTimes,
}

impl Default for Epochs {
    fn default() -> Self {
        Epochs {
            current: RwLock::new(None),
            attempts: watch::Sender::new(0),
            wanted: Notify::new(),
            readers: AtomicUsize::new(0),
            ddl_barriers: AtomicUsize::new(0),
            canary_commits: AtomicU64::new(0),
            last_id: AtomicU64::new(0),
            changes: InFlight::default(),
            dooms: InFlight::default(),
            release: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            doomed_up_to: Arc::default(),
            statistics: GateStatistics::default(),
            wait_times: WaitTimes::default(),
        }
    }
}

impl Epochs {
    /// The newest epoch.
    pub fn current(&self) -> Option<Arc<Epoch>> {
        self.current.read().expect("no code panics while it holds this lock").clone()
    }

    /// A reader that went elsewhere would rather have had an epoch.
    pub fn note_reader(&self) {
        self.readers.fetch_add(1, SeqCst);
        if self.current().is_none() {
            self.wanted.notify_one();
        }
    }

    /// Whether an epoch that meets `demand` is open already.
    pub fn is_ready(&self, demand: Demand, barrier: &CommitBarrier) -> bool {
        self.current().is_some_and(|epoch| demand.is_met_by(&epoch, barrier) && !epoch.is_doomed())
    }

    /// An epoch that meets `demand`, waited for at most `timeout`.
    pub async fn take(
        &self,
        demand: Demand,
        barrier: &CommitBarrier,
        timeout: Duration,
    ) -> Result<Arc<Epoch>, NoEpoch> {
        self.readers.fetch_add(1, SeqCst);
        let deadline = Instant::now() + timeout;
        let mut attempts = None;
        loop {
            if self.ddl_barriers.load(SeqCst) > 0 {
                return Err(NoEpoch::DdlBarrier);
            }
            if let Some(epoch) = self.current()
                && demand.is_met_by(&epoch, barrier)
                && !epoch.is_doomed()
            {
                return Ok(epoch);
            }
            let Some(attempts) = &mut attempts else {
                // Looked at once more: what is published before this is seen there, and what comes after it wakes.
                attempts = Some(self.attempts.subscribe());
                continue;
            };
            self.wanted.notify_one();
            if tokio::time::timeout_at(deadline.into(), attempts.changed()).await.is_err() || self.blocked.load(SeqCst)
            {
                return Err(NoEpoch::TimedOut);
            }
        }
    }

    /// Whether a transaction whose snapshot holds at least `commits` must pass the tripwire before it commits:
    /// a gate closed after its snapshot, and something that it may not have seen committed before that gate.
    pub fn needs_tripwire(&self, commits: u64) -> bool {
        self.canary_commits.load(SeqCst) > commits
    }

    /// Keeps readers off epochs until the returned guard is dropped.
    pub fn begin_ddl_barrier(self: &Arc<Self>) -> DdlBarrier {
        self.ddl_barriers.fetch_add(1, SeqCst);
        self.retire();
        self.attempts.send_modify(|attempts| *attempts += 1);
        DdlBarrier(self.clone())
    }

    /// Whether DDL is going on.
    pub fn has_ddl_barrier(&self) -> bool {
        self.ddl_barriers.load(SeqCst) > 0
    }

    /// Has all snapshots of the current epoch closed soon: something waits for them (CREATE INDEX CONCURRENTLY,
    /// REINDEX).
    pub fn ask_for_release(&self) {
        self.release.store(true, SeqCst);
        self.wanted.notify_one();
    }

    fn is_to_be_released(&self) -> bool {
        self.release.swap(false, SeqCst)
    }

    /// Dooms all epochs now and once more when the commit that dooms them has ended, with the guard. Call it under a
    /// [`DdlBarrier`]: a gate that was under way at the first time has published at the second, and nobody took its
    /// epoch in between.
    pub fn begin_dooming(self: &Arc<Self>) -> Dooming {
        self.changes.begin();
        self.dooms.begin();
        self.doom();
        Dooming(self.clone())
    }

    /// Dooms all epochs, also one whose gate is closing now.
    pub fn doom(&self) {
        self.doomed_up_to.fetch_max(self.last_id.load(SeqCst), SeqCst);
        self.retire();
    }

    /// A commit of new relations is about to be sent. Call it inside the commit barrier: as no gate closes there,
    /// whoever takes an epoch from now on gets one with these relations in it. Epochs of before stay right for who does
    /// not look at them.
    pub fn begin_creating(self: &Arc<Self>) -> Creating {
        self.changes.begin();
        self.retire();
        Creating(self.clone())
    }

    /// To be called before a transaction on the leader is begun.
    pub fn before_snapshot(&self, barrier: &CommitBarrier) -> LaterSnapshot {
        // Not what has begun only: it may be visible after the snapshot.
        LaterSnapshot {
            commits: barrier.commits_done(),
            change_counter: self.change_counter(),
            dooms: self.dooms.change_counter(),
        }
    }

    /// To be taken before a snapshot, for [`Epochs::snapshot_stands`].
    pub fn change_counter(&self) -> u64 {
        self.changes.change_counter()
    }

    /// Whether nothing that is not MVCC has committed since `change_counter`: otherwise a statement may have opened a
    /// table after a TRUNCATE, or its making, with a snapshot of before it, and found it empty.
    pub fn snapshot_stands(&self, change_counter: u64) -> bool {
        self.changes.none_since(change_counter)
    }

    /// Whether what dooms epochs has committed, or may have, since a snapshot on the leader.
    pub fn is_older_than_a_doom(&self, snapshot: &LaterSnapshot) -> bool {
        !self.dooms.none_since(snapshot.dooms)
    }

    fn note_attempt(&self, blocked: bool) {
        self.blocked.store(blocked, SeqCst);
        self.attempts.send_modify(|attempts| *attempts += 1);
    }

    /// Forgets that a gate was asked for.
    fn forget_requests(&self) {
        let mut wish = std::pin::pin!(self.wanted.notified());
        wish.as_mut().enable();
    }

    fn next_id(&self) -> u64 {
        self.last_id.fetch_add(1, SeqCst) + 1
    }

    /// Takes the current epoch away from new readers.
    fn retire(&self) {
        *self.current.write().expect("no code panics while it holds this lock") = None;
    }

    /// Takes the current epoch away from servers whose snapshot of it is gone; when none is left it ends. A back end
    /// that has it open there already may go on with it.
    fn close_snapshots(&self, mut is_gone: impl FnMut(&Server) -> bool) {
        let mut current = self.current.write().expect("no code panics while it holds this lock");
        let Some(epoch) = &*current else { return };
        let snapshots: Vec<EpochSnapshot> =
            epoch.snapshots.iter().filter(|snapshot| !is_gone(&snapshot.server)).cloned().collect();
        if snapshots.len() < epoch.snapshots.len() {
            let left = Epoch { snapshots, doomed_up_to: epoch.doomed_up_to.clone(), ..**epoch };
            *current = (!left.snapshots.is_empty()).then(|| Arc::new(left));
        }
    }

    fn publish(&self, epoch: Arc<Epoch>) {
        *self.current.write().expect("no code panics while it holds this lock") = Some(epoch);
    }
}

/// A commit that dooms epochs is in flight while this lives.
#[derive(Debug)]
pub struct Dooming(Arc<Epochs>);

impl Drop for Dooming {
    fn drop(&mut self) {
        self.0.doom();
        self.0.dooms.end();
        self.0.changes.end();
    }
}

/// A commit of new relations is in flight while this lives.
#[derive(Debug)]
pub struct Creating(Arc<Epochs>);

impl Drop for Creating {
    fn drop(&mut self) {
        self.0.changes.end();
    }
}

/// DDL is going on while this lives.
#[derive(Debug)]
pub struct DdlBarrier(Arc<Epochs>);

impl Drop for DdlBarrier {
    fn drop(&mut self) {
        // Nobody waits for this: whoever comes to a barrier is sent away.
        self.0.ddl_barriers.fetch_sub(1, SeqCst);
    }
}
