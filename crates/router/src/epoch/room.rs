//! The commit room: commits enter it side by side, a gate has it alone.
//!
//! Every commit that may write runs inside the room. The gate waits until the room is empty and holds newcomers out, so
//! that while it is closed no commit is in flight on the leader. The room counts commits; the count at a gate tells
//! which commits an epoch holds.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::backend::ServerProcess;

/// How often it is looked whether somebody has left.
const PASS_LOOK: Duration = Duration::from_millis(1);

/// Commits of one database.
#[derive(Debug, Default)]
pub struct Room {
    door: RwLock<()>,
    begun: AtomicU64,
    done: AtomicU64,
    /// How many found the room closed, or about to be.
    held: AtomicU64,
    occupants: Mutex<HashMap<u64, Occupant>>,
    unsettled: Mutex<Vec<Unsettled>>,
}

/// What must stand until it is known what has become of a commit: the barrier of DDL, say. It ends when it is dropped.
pub type Kept = Box<dyn std::fmt::Debug + Send + Sync>;

/// A server process whose commit was sent and never answered: it may still happen.
#[derive(Debug)]
struct Unsettled {
    process: ServerProcess,
    /// Held, never looked at.
    _kept: Option<Kept>,
}

/// Who is in the room.
#[derive(Debug, Clone)]
pub struct Occupant {
    /// The client's session.
    pub session: u64,
    /// Since when.
    pub since: Instant,
    /// What a statement of its kind is remembered by, when it is one statement rather than a COMMIT.
    pub statement: Option<u64>,
}

impl Room {
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

    async fn enter_door(&self) -> RwLockReadGuard<'_, ()> {
        if let Ok(guard) = self.door.try_read() {
            return guard;
        }
        self.held.fetch_add(1, SeqCst);
        self.door.read().await
    }

    /// Enters with a commit of `session` that `process` will run.
    pub async fn enter(&self, session: u64, process: ServerProcess, statement: Option<u64>) -> Commit<'_> {
        let guard = self.enter_door().await;
        self.begun.fetch_add(1, SeqCst);
        self.occupants().insert(session, Occupant { session, since: Instant::now(), statement });
        Commit { room: self, kept: None, _door: guard, session, process, settled: false }
    }

    /// Enters with a transaction that has probably written nothing: it counts only once it is known to have.
    pub async fn visit(&self, session: u64, process: ServerProcess) -> Visit<'_> {
        let guard = self.enter_door().await;
        self.occupants().insert(session, Occupant { session, since: Instant::now(), statement: None });
        Visit { room: self, door: Some(guard), session, process }
    }

    /// Waits until all who are inside now have left, whoever comes meanwhile; at most for `timeout`.
    pub async fn let_pass(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let inside: Vec<Occupant> = self.occupants_now();
        let is_inside = |one: &Occupant| self.occupants().get(&one.session).is_some_and(|now| now.since == one.since);
        while inside.iter().any(is_inside) && Instant::now() < deadline {
            tokio::time::sleep(PASS_LOOK).await;
        }
    }

    /// Watches over `process` while it does outside the room what may commit at any time.
    pub fn watch(&self, process: ServerProcess, kept: Kept) -> Watch<'_> {
        Watch { room: self, process, kept: Some(kept) }
    }

    /// Closes the room once it is empty; none when that takes longer than `timeout`.
    pub async fn close(&self, timeout: Duration) -> Option<ClosedRoom<'_>> {
        let guard = tokio::time::timeout(timeout, self.door.write()).await.ok()?;
        Some(ClosedRoom { room: self, _door: guard })
    }

    /// Who is in the room now.
    pub fn occupants_now(&self) -> Vec<Occupant> {
        self.occupants().values().cloned().collect()
    }

    /// Notes a server process that nobody here waits for and that may still commit.
    pub fn note_unsettled(&self, process: ServerProcess) {
        self.note(process, None);
    }

    fn note(&self, process: ServerProcess, kept: Option<Kept>) {
        self.in_doubt().push(Unsettled { process, _kept: kept });
    }

    /// Server processes whose commits may still happen.
    pub fn unsettled(&self) -> Vec<ServerProcess> {
        self.in_doubt().iter().map(|unsettled| unsettled.process).collect()
    }

    /// Notes that `processes` have ended.
    pub fn settle(&self, processes: &[ServerProcess]) {
        let settled: Vec<Unsettled> =
            self.in_doubt().extract_if(.., |unsettled| processes.contains(&unsettled.process)).collect();
        // What they have kept ends here, where no lock is held.
        drop(settled);
    }

    fn in_doubt(&self) -> std::sync::MutexGuard<'_, Vec<Unsettled>> {
        self.unsettled.lock().expect("no code panics while it holds this lock")
    }

    fn occupants(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Occupant>> {
        self.occupants.lock().expect("no code panics while it holds this lock")
    }
}

/// A commit inside the room.
#[derive(Debug)]
pub struct Commit<'a> {
    room: &'a Room,
    /// Ends before the door opens: no gate counts in between.
    kept: Option<Kept>,
    _door: RwLockReadGuard<'a, ()>,
    session: u64,
    process: ServerProcess,
    settled: bool,
}

impl Commit<'_> {
    /// Keeps `kept` until the server has answered, or until it is known what has become of a commit without an answer.
    pub fn keep(&mut self, kept: Kept) {
        self.kept = Some(kept);
    }

    /// The server has answered, with success or an error; gives the number of commits begun so far.
    pub fn settle(mut self) -> u64 {
        self.settled = true;
        self.room.done.fetch_add(1, SeqCst);
        self.room.commits_begun()
    }

    /// The number of commits begun so far, this one among them: an epoch with so many shows what became of it.
    pub fn begun(&self) -> u64 {
        self.room.commits_begun()
    }
}

impl Drop for Commit<'_> {
    fn drop(&mut self) {
        self.room.occupants().remove(&self.session);
        if !self.settled {
            // The next gate must not close before this server process is known to have ended.
            self.room.note(self.process, self.kept.take());
        }
    }
}

/// A statement outside the room that commits by itself.
#[derive(Debug)]
pub struct Watch<'a> {
    room: &'a Room,
    process: ServerProcess,
    kept: Option<Kept>,
}

impl Watch<'_> {
    /// The server has answered.
    pub fn end(mut self) {
        self.kept = None;
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if let Some(kept) = self.kept.take() {
            self.room.note(self.process, Some(kept));
        }
    }
}

/// A transaction inside the room that has probably written nothing.
#[derive(Debug)]
pub struct Visit<'a> {
    room: &'a Room,
    door: Option<RwLockReadGuard<'a, ()>>,
    session: u64,
    process: ServerProcess,
}

impl<'a> Visit<'a> {
    /// It has written, or shall: it is a commit like others.
    pub fn into_commit(mut self) -> Option<Commit<'a>> {
        let door = self.door.take()?;
        self.room.begun.fetch_add(1, SeqCst);
        Some(Commit {
            room: self.room,
            kept: None,
            _door: door,
            session: self.session,
            process: self.process,
            settled: false,
        })
    }

    /// It has ended without having written.
    pub fn leave(mut self) {
        self.door = None;
        self.room.occupants().remove(&self.session);
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        if self.door.is_some() {
            // No answer came: it may have written, and may still commit.
            self.room.begun.fetch_add(1, SeqCst);
            self.room.occupants().remove(&self.session);
            self.room.note_unsettled(self.process);
        }
    }
}

/// The room while a gate has it alone.
#[derive(Debug)]
pub struct ClosedRoom<'a> {
    room: &'a Room,
    _door: RwLockWriteGuard<'a, ()>,
}

impl ClosedRoom<'_> {
    /// Commits so far; none is in flight. None when one without an answer may still happen.
    pub fn commits(&self) -> Option<u64> {
        if !self.room.unsettled().is_empty() {
            return None;
        }
        let begun = self.room.commits_begun();
        self.room.done.store(begun, SeqCst);
        Some(begun)
    }
}

#[cfg(test)]
mod interleavings;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::epoch::by_hand::process;

    #[tokio::test]
    async fn a_gate_closes_only_when_no_commit_is_in_flight() {
        let room = Room::default();
        let commit = room.enter(1, process(10), None).await;
        assert!(room.close(Duration::from_millis(5)).await.is_none());
        assert_eq!(room.occupants_now()[0].session, 1);
        assert_eq!(commit.settle(), 1);
        let closed = room.close(Duration::from_millis(5)).await.expect("empty");
        assert_eq!(closed.commits(), Some(1));
    }

    #[tokio::test]
    async fn a_visit_counts_only_when_it_has_written() {
        let room = Room::default();
        room.visit(1, process(10)).await.leave();
        assert_eq!((room.commits_begun(), room.unsettled()), (0, vec![]));
        room.visit(1, process(10)).await.into_commit().expect("inside").settle();
        assert_eq!((room.commits_begun(), room.commits_done()), (1, 1));
        drop(room.visit(1, process(11)).await);
        assert_eq!((room.commits_begun(), room.unsettled()), (2, vec![process(11)]));
        assert!(room.occupants_now().is_empty());
    }

    #[tokio::test]
    async fn a_commit_without_an_answer_keeps_the_gate_from_counting() {
        let room = Room::default();
        drop(room.enter(1, process(10), None).await);
        assert_eq!((room.commits_begun(), room.commits_done()), (1, 0));
        {
            let closed = room.close(Duration::from_millis(5)).await.expect("empty");
            assert_eq!(closed.commits(), None);
        }
        room.settle(&[process(10)]);
        let closed = room.close(Duration::from_millis(5)).await.expect("empty");
        assert_eq!((closed.commits(), room.commits_done()), (Some(1), 1));
    }

    /// A commit whose answer never came is among those that its session demands to see from then on, so that no epoch
    /// of before tells it that nothing has happened.
    #[tokio::test]
    async fn an_abandoned_commit_is_in_doubt_and_counts() {
        let room = Room::default();
        let commit = room.enter(1, process(10), None).await;
        assert_eq!(commit.begun(), 1);
        drop(commit);
        assert_eq!((room.commits_begun(), room.commits_done(), room.unsettled()), (1, 0, vec![process(10)]));
        let closed = room.close(Duration::from_millis(5)).await.expect("its place is free");
        assert_eq!(closed.commits(), None, "its fate is open");
        room.settle(&[process(10)]);
        assert_eq!(closed.commits(), Some(1));
    }

    /// What a commit keeps (a barrier, say) stands until it is answered; without an answer, until its process has
    /// ended.
    #[tokio::test]
    async fn what_a_commit_keeps_stands_until_its_fate_is_known() {
        let room = Room::default();
        let kept = std::sync::Arc::new(());
        let keep = || -> Kept { Box::new(kept.clone()) };
        let stands = || std::sync::Arc::strong_count(&kept) > 1;
        let mut commit = room.enter(1, process(10), None).await;
        commit.keep(keep());
        assert!(stands());
        commit.settle();
        assert!(!stands());
        let mut lost = room.visit(1, process(11)).await.into_commit().expect("inside");
        lost.keep(keep());
        drop(lost);
        room.settle(&[process(10)]);
        assert!(stands() && room.unsettled() == [process(11)]);
        room.settle(&[process(11)]);
        assert!(!stands() && room.unsettled().is_empty());
        room.watch(process(12), keep()).end();
        assert!(!stands() && room.unsettled().is_empty());
        drop(room.watch(process(13), keep()));
        assert!(stands() && room.unsettled() == [process(13)]);
        room.settle(&[process(13)]);
        assert!(!stands());
    }

    /// DDL waits for those who came before it and not for those who come after, and for nobody for ever.
    #[tokio::test]
    async fn those_who_are_inside_are_let_pass() {
        let room = Room::default();
        let never = Duration::from_secs(3600);
        room.let_pass(never).await;
        let before = room.enter(1, process(10), None).await;
        room.let_pass(Duration::from_millis(5)).await;
        let mut passing = std::pin::pin!(room.let_pass(never));
        assert!(tokio::time::timeout(Duration::from_millis(5), &mut passing).await.is_err(), "one is inside");
        before.settle();
        let again = room.enter(1, process(10), None).await;
        passing.await;
        again.settle();
    }

    /// A gate that gives up can name who is inside, and of a statement of its own its kind.
    #[tokio::test]
    async fn a_visit_that_becomes_a_commit_is_one_occupant() {
        let room = Room::default();
        let commit = room.visit(1, process(10)).await.into_commit().expect("inside");
        let statement = room.enter(2, process(11), Some(42)).await;
        let mut occupants = room.occupants_now();
        occupants.sort_by_key(|occupant| occupant.session);
        let known: Vec<_> = occupants.iter().map(|occupant| (occupant.session, occupant.statement)).collect();
        assert_eq!(known, [(1, None), (2, Some(42))]);
        commit.settle();
        statement.settle();
        assert!(room.occupants_now().is_empty());
        assert_eq!((room.commits_begun(), room.commits_done()), (2, 2));
    }
}
