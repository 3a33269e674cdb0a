//! The commit barrier: commits enter it side by side, a gate closes it.
//!
//! Every commit that may write runs inside the commit barrier. The gate waits until the commit barrier is empty and
//! holds newcomers out, so that while it is closed no commit is in flight on the leader. The barrier counts commits;
//! the count at a gate tells which commits an epoch holds.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::backend::ServerProcess;

/// How often it is looked whether somebody has left.
const LEFT_LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Commits of one database.
#[derive(Debug, Default)]
pub struct CommitBarrier {
    gate: RwLock<()>,
    begun: AtomicU64,
    done: AtomicU64,
    /// How many found the commit barrier closed, or about to be.
    held: AtomicU64,
    in_flight: Mutex<HashMap<u64, InFlightCommit>>,
    in_doubt: Mutex<Vec<InDoubtCommit>>,
}

/// What must stand until it is known what has become of a commit: the barrier of DDL, say. It ends when it is dropped.
pub type HeldUntilResolved = Box<dyn std::fmt::Debug + Send + Sync>;

/// A server process whose commit was sent and never answered: it may still happen.
#[derive(Debug)]
struct InDoubtCommit {
    process: ServerProcess,
    /// Held, never looked at.
    _kept: Option<HeldUntilResolved>,
}

/// A commit that is in flight, or a statement that commits by itself.
#[derive(Debug, Clone)]
pub struct InFlightCommit {
    /// The client's session.
    pub session: u64,
    /// Since when.
    pub since: Instant,
    /// What a statement of its kind is remembered by, when it is one statement rather than a COMMIT.
    pub statement: Option<u64>,
}

impl CommitBarrier {
    /// Commits that were sent, whether or not they have ended: an upper bound of what anybody can have seen.
    pub fn commits_begun(&self) -> u64 {
        self.begun.load(SeqCst)
    }

    /// Commits that have ended: a lower bound of what a snapshot taken from now on holds.
    pub fn commits_done(&self) -> u64 {
        self.done.load(SeqCst)
    }

    /// Commits that have had to wait for a gate so far.
    pub fn commits_held(&self) -> u64 {
        self.held.load(SeqCst)
    }

    async fn wait_until_open(&self) -> RwLockReadGuard<'_, ()> {
        if let Ok(guard) = self.gate.try_read() {
            return guard;
        }
        self.held.fetch_add(1, SeqCst);
        self.gate.read().await
    }

    /// Enters with a commit of `session` that `process` will run.
    pub async fn enter(&self, session: u64, process: ServerProcess, statement: Option<u64>) -> CommitGuard<'_> {
        let guard = self.wait_until_open().await;
        self.begun.fetch_add(1, SeqCst);
        self.lock_in_flight().insert(session, InFlightCommit { session, since: Instant::now(), statement });
        CommitGuard { barrier: self, kept: None, _guard: guard, session, process, resolved: false }
    }

    /// Enters with a transaction that has probably written nothing: it counts only once it is known to have.
    pub async fn enter_uncounted(&self, session: u64, process: ServerProcess) -> UncountedCommit<'_> {
        let guard = self.wait_until_open().await;
        self.lock_in_flight().insert(session, InFlightCommit { session, since: Instant::now(), statement: None });
        UncountedCommit { barrier: self, guard: Some(guard), session, process }
    }

    /// Waits until all who are inside now have left, whoever comes meanwhile; at most for `timeout`.
    pub async fn wait_for_in_flight(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let inside: Vec<InFlightCommit> = self.in_flight();
        let is_inside =
            |one: &InFlightCommit| self.lock_in_flight().get(&one.session).is_some_and(|now| now.since == one.since);
        while inside.iter().any(is_inside) && Instant::now() < deadline {
            tokio::time::sleep(LEFT_LOOK_INTERVAL).await;
        }
    }

    /// Watches over `process` while it does outside the commit barrier what may commit at any time.
    pub fn watch(&self, process: ServerProcess, kept: HeldUntilResolved) -> WatchGuard<'_> {
        WatchGuard { barrier: self, process, kept: Some(kept) }
    }

    /// Closes the commit barrier once it is empty; none when that takes longer than `timeout`.
    pub async fn close(&self, timeout: Duration) -> Option<ClosedBarrier<'_>> {
        let guard = tokio::time::timeout(timeout, self.gate.write()).await.ok()?;
        Some(ClosedBarrier { barrier: self, _guard: guard })
    }

    /// Commits that are in flight now.
    pub fn in_flight(&self) -> Vec<InFlightCommit> {
        self.lock_in_flight().values().cloned().collect()
    }

    /// Notes a server process that nobody here waits for and that may still commit.
    pub fn note_in_doubt(&self, process: ServerProcess) {
        self.note(process, None);
    }

    fn note(&self, process: ServerProcess, kept: Option<HeldUntilResolved>) {
        self.lock_in_doubt().push(InDoubtCommit { process, _kept: kept });
    }

    /// Server processes whose commits may still happen.
    pub fn in_doubt(&self) -> Vec<ServerProcess> {
        self.lock_in_doubt().iter().map(|in_doubt| in_doubt.process).collect()
    }

    /// Notes that `processes` have ended.
    pub fn resolve(&self, processes: &[ServerProcess]) {
        let resolved: Vec<InDoubtCommit> =
            self.lock_in_doubt().extract_if(.., |in_doubt| processes.contains(&in_doubt.process)).collect();
        // What they have kept ends here, where no lock is held.
        drop(resolved);
    }

    fn lock_in_doubt(&self) -> std::sync::MutexGuard<'_, Vec<InDoubtCommit>> {
        self.in_doubt.lock().expect("no code panics while it holds this lock")
    }

    fn lock_in_flight(&self) -> std::sync::MutexGuard<'_, HashMap<u64, InFlightCommit>> {
        self.in_flight.lock().expect("no code panics while it holds this lock")
    }
}

/// A commit inside the commit barrier.
#[derive(Debug)]
pub struct CommitGuard<'a> {
    barrier: &'a CommitBarrier,
    /// Ends before its guard: no gate counts in between.
    kept: Option<HeldUntilResolved>,
    _guard: RwLockReadGuard<'a, ()>,
    session: u64,
    process: ServerProcess,
    resolved: bool,
}

impl CommitGuard<'_> {
    /// Keeps `kept` until the server has answered, or until it is known what has become of a commit without an answer.
    pub fn keep(&mut self, kept: HeldUntilResolved) {
        self.kept = Some(kept);
    }

    /// The server has answered, with success or an error; gives the number of commits begun so far.
    pub fn resolve(mut self) -> u64 {
        self.resolved = true;
        self.barrier.done.fetch_add(1, SeqCst);
        self.barrier.commits_begun()
    }

    /// The number of commits begun so far, this one among them: an epoch with so many shows what became of it.
    pub fn begun(&self) -> u64 {
        self.barrier.commits_begun()
    }
}

impl Drop for CommitGuard<'_> {
    fn drop(&mut self) {
        self.barrier.lock_in_flight().remove(&self.session);
        if !self.resolved {
            // The next gate must not close before this server process is known to have ended.
            self.barrier.note(self.process, self.kept.take());
        }
    }
}

/// A statement outside the commit barrier that commits by itself.
#[derive(Debug)]
pub struct WatchGuard<'a> {
    barrier: &'a CommitBarrier,
    process: ServerProcess,
    kept: Option<HeldUntilResolved>,
}

impl WatchGuard<'_> {
    /// The server has answered.
    pub fn end(mut self) {
        self.kept = None;
    }
}

impl Drop for WatchGuard<'_> {
    fn drop(&mut self) {
        if let Some(kept) = self.kept.take() {
            self.barrier.note(self.process, Some(kept));
        }
    }
}

/// A transaction inside the commit barrier that has probably written nothing.
#[derive(Debug)]
pub struct UncountedCommit<'a> {
    barrier: &'a CommitBarrier,
    guard: Option<RwLockReadGuard<'a, ()>>,
    session: u64,
    process: ServerProcess,
}

impl<'a> UncountedCommit<'a> {
    /// It has written, or shall: it is a commit like others.
    pub fn into_commit(mut self) -> Option<CommitGuard<'a>> {
        let guard = self.guard.take()?;
        self.barrier.begun.fetch_add(1, SeqCst);
        Some(CommitGuard {
            barrier: self.barrier,
            kept: None,
            _guard: guard,
            session: self.session,
            process: self.process,
            resolved: false,
        })
    }

    /// It has ended without having written.
    pub fn leave(mut self) {
        self.guard = None;
        self.barrier.lock_in_flight().remove(&self.session);
    }
}

impl Drop for UncountedCommit<'_> {
    fn drop(&mut self) {
        if self.guard.is_some() {
            // No answer came: it may have written, and may still commit.
            self.barrier.begun.fetch_add(1, SeqCst);
            self.barrier.lock_in_flight().remove(&self.session);
            self.barrier.note_in_doubt(self.process);
        }
    }
}

/// The barrier while a gate closes it.
#[derive(Debug)]
pub struct ClosedBarrier<'a> {
    barrier: &'a CommitBarrier,
    _guard: RwLockWriteGuard<'a, ()>,
}

impl ClosedBarrier<'_> {
    /// Commits so far; none is in flight. None when one without an answer may still happen.
    pub fn commits(&self) -> Option<u64> {
        if !self.barrier.in_doubt().is_empty() {
            return None;
        }
        let begun = self.barrier.commits_begun();
        self.barrier.done.store(begun, SeqCst);
        Some(begun)
    }
}

#[cfg(test)]
mod interleavings;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::epoch::manual_poll::process;

    #[tokio::test]
    async fn a_gate_closes_only_when_no_commit_is_in_flight() {
        let barrier = CommitBarrier::default();
        let commit = barrier.enter(1, process(10), None).await;
        assert!(barrier.close(Duration::from_millis(5)).await.is_none());
        assert_eq!(barrier.in_flight()[0].session, 1);
        assert_eq!(commit.resolve(), 1);
        let closed = barrier.close(Duration::from_millis(5)).await.expect("empty");
        assert_eq!(closed.commits(), Some(1));
    }

    #[tokio::test]
    async fn an_uncounted_commit_counts_only_when_it_has_written() {
        let barrier = CommitBarrier::default();
        barrier.enter_uncounted(1, process(10)).await.leave();
        assert_eq!((barrier.commits_begun(), barrier.in_doubt()), (0, vec![]));
        barrier.enter_uncounted(1, process(10)).await.into_commit().expect("inside").resolve();
        assert_eq!((barrier.commits_begun(), barrier.commits_done()), (1, 1));
        drop(barrier.enter_uncounted(1, process(11)).await);
        assert_eq!((barrier.commits_begun(), barrier.in_doubt()), (2, vec![process(11)]));
        assert!(barrier.in_flight().is_empty());
    }

    #[tokio::test]
    async fn a_commit_without_an_answer_keeps_the_gate_from_counting() {
        let barrier = CommitBarrier::default();
        drop(barrier.enter(1, process(10), None).await);
        assert_eq!((barrier.commits_begun(), barrier.commits_done()), (1, 0));
        {
            let closed = barrier.close(Duration::from_millis(5)).await.expect("empty");
            assert_eq!(closed.commits(), None);
        }
        barrier.resolve(&[process(10)]);
        let closed = barrier.close(Duration::from_millis(5)).await.expect("empty");
        assert_eq!((closed.commits(), barrier.commits_done()), (Some(1), 1));
    }

    /// A commit whose answer never came is among those that its session demands to see from then on, so that no epoch
    /// of before tells it that nothing has happened.
    #[tokio::test]
    async fn an_abandoned_commit_is_in_doubt_and_counts() {
        let barrier = CommitBarrier::default();
        let commit = barrier.enter(1, process(10), None).await;
        assert_eq!(commit.begun(), 1);
        drop(commit);
        assert_eq!((barrier.commits_begun(), barrier.commits_done(), barrier.in_doubt()), (1, 0, vec![process(10)]));
        let closed = barrier.close(Duration::from_millis(5)).await.expect("its place is free");
        assert_eq!(closed.commits(), None, "its fate is open");
        barrier.resolve(&[process(10)]);
        assert_eq!(closed.commits(), Some(1));
    }

    /// What a commit keeps (a barrier, say) stands until it is answered; without an answer, until its process has
    /// ended.
    #[tokio::test]
    async fn what_a_commit_keeps_stands_until_its_fate_is_known() {
        let barrier = CommitBarrier::default();
        let kept = std::sync::Arc::new(());
        let keep = || -> HeldUntilResolved { Box::new(kept.clone()) };
        let stands = || std::sync::Arc::strong_count(&kept) > 1;
        let mut commit = barrier.enter(1, process(10), None).await;
        commit.keep(keep());
        assert!(stands());
        commit.resolve();
        assert!(!stands());
        let mut lost = barrier.enter_uncounted(1, process(11)).await.into_commit().expect("inside");
        lost.keep(keep());
        drop(lost);
        barrier.resolve(&[process(10)]);
        assert!(stands() && barrier.in_doubt() == [process(11)]);
        barrier.resolve(&[process(11)]);
        assert!(!stands() && barrier.in_doubt().is_empty());
        barrier.watch(process(12), keep()).end();
        assert!(!stands() && barrier.in_doubt().is_empty());
        drop(barrier.watch(process(13), keep()));
        assert!(stands() && barrier.in_doubt() == [process(13)]);
        barrier.resolve(&[process(13)]);
        assert!(!stands());
    }

    /// DDL waits for those who came before it and not for those who come after, and for nobody for ever.
    #[tokio::test]
    async fn those_who_are_inside_are_let_pass() {
        let barrier = CommitBarrier::default();
        let never = Duration::from_secs(3600);
        barrier.wait_for_in_flight(never).await;
        let before = barrier.enter(1, process(10), None).await;
        barrier.wait_for_in_flight(Duration::from_millis(5)).await;
        let mut passing = std::pin::pin!(barrier.wait_for_in_flight(never));
        assert!(tokio::time::timeout(Duration::from_millis(5), &mut passing).await.is_err(), "one is inside");
        before.resolve();
        let again = barrier.enter(1, process(10), None).await;
        passing.await;
        again.resolve();
    }

    /// A gate that gives up can name who is inside, and of a statement of its own its kind.
    #[tokio::test]
    async fn an_uncounted_commit_that_is_counted_is_in_flight_once() {
        let barrier = CommitBarrier::default();
        let commit = barrier.enter_uncounted(1, process(10)).await.into_commit().expect("inside");
        let statement = barrier.enter(2, process(11), Some(42)).await;
        let mut commits = barrier.in_flight();
        commits.sort_by_key(|commit| commit.session);
        let known: Vec<_> = commits.iter().map(|commit| (commit.session, commit.statement)).collect();
        assert_eq!(known, [(1, None), (2, Some(42))]);
        commit.resolve();
        statement.resolve();
        assert!(barrier.in_flight().is_empty());
        assert_eq!((barrier.commits_begun(), barrier.commits_done()), (2, 2));
    }
}
