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

/// Commits of one database.
#[derive(Debug, Default)]
pub struct Room {
    door: RwLock<()>,
    begun: AtomicU64,
    done: AtomicU64,
    /// How many found the room closed, or about to be.
    held: AtomicU64,
    occupants: Mutex<HashMap<u64, Occupant>>,
    /// Server processes whose commit was sent and never answered: it may still happen.
    unsettled: Mutex<Vec<u32>>,
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

    /// Enters with a commit of `session` that server process `process_id` will run.
    pub async fn enter(&self, session: u64, process_id: u32, statement: Option<u64>) -> Commit<'_> {
        let guard = self.enter_door().await;
        self.begun.fetch_add(1, SeqCst);
        self.occupants().insert(session, Occupant { session, since: Instant::now(), statement });
        Commit { room: self, _door: guard, session, process_id, settled: false }
    }

    /// Enters with a transaction that has probably written nothing: it counts only once it is known to have.
    pub async fn visit(&self, session: u64, process_id: u32) -> Visit<'_> {
        let guard = self.enter_door().await;
        self.occupants().insert(session, Occupant { session, since: Instant::now(), statement: None });
        Visit { room: self, door: Some(guard), session, process_id }
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
    pub fn note_unsettled(&self, process_id: u32) {
        self.unsettled.lock().expect("no code panics while it holds this lock").push(process_id);
    }

    /// Server processes whose commits may still happen.
    pub fn unsettled(&self) -> Vec<u32> {
        self.unsettled.lock().expect("no code panics while it holds this lock").clone()
    }

    /// Notes that `process_ids` have ended.
    pub fn settle(&self, process_ids: &[u32]) {
        self.unsettled
            .lock()
            .expect("no code panics while it holds this lock")
            .retain(|process_id| !process_ids.contains(process_id));
    }

    fn occupants(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Occupant>> {
        self.occupants.lock().expect("no code panics while it holds this lock")
    }
}

/// A commit inside the room.
#[derive(Debug)]
pub struct Commit<'a> {
    room: &'a Room,
    _door: RwLockReadGuard<'a, ()>,
    session: u64,
    process_id: u32,
    settled: bool,
}

impl Commit<'_> {
    /// The server has answered, with success or an error; gives the number of commits begun so far.
    pub fn settle(mut self) -> u64 {
        self.settled = true;
        self.room.done.fetch_add(1, SeqCst);
        self.room.commits_begun()
    }

    /// No answer came: it may still happen, and the room takes note of that. Gives the number of commits begun so far:
    /// an epoch with so many shows what became of it.
    pub fn abandon(self) -> u64 {
        self.room.commits_begun()
    }
}

impl Drop for Commit<'_> {
    fn drop(&mut self) {
        self.room.occupants().remove(&self.session);
        if !self.settled {
            // The next gate must not close before this server process is known to have ended.
            self.room.note_unsettled(self.process_id);
        }
    }
}

/// A transaction inside the room that has probably written nothing.
#[derive(Debug)]
pub struct Visit<'a> {
    room: &'a Room,
    door: Option<RwLockReadGuard<'a, ()>>,
    session: u64,
    process_id: u32,
}

impl<'a> Visit<'a> {
    /// It has written, or shall: it is a commit like others.
    pub fn into_commit(mut self) -> Option<Commit<'a>> {
        let door = self.door.take()?;
        self.room.begun.fetch_add(1, SeqCst);
        Some(Commit {
            room: self.room,
            _door: door,
            session: self.session,
            process_id: self.process_id,
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
            self.room.note_unsettled(self.process_id);
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

    #[tokio::test]
    async fn a_gate_closes_only_when_no_commit_is_in_flight() {
        let room = Room::default();
        let commit = room.enter(1, 10, None).await;
        assert!(room.close(Duration::from_millis(5)).await.is_none());
        assert_eq!(room.occupants_now()[0].session, 1);
        assert_eq!(commit.settle(), 1);
        let closed = room.close(Duration::from_millis(5)).await.expect("empty");
        assert_eq!(closed.commits(), Some(1));
    }

    #[tokio::test]
    async fn a_visit_counts_only_when_it_has_written() {
        let room = Room::default();
        room.visit(1, 10).await.leave();
        assert_eq!((room.commits_begun(), room.unsettled()), (0, vec![]));
        room.visit(1, 10).await.into_commit().expect("inside").settle();
        assert_eq!((room.commits_begun(), room.commits_done()), (1, 1));
        drop(room.visit(1, 11).await);
        assert_eq!((room.commits_begun(), room.unsettled()), (2, vec![11]));
        assert!(room.occupants_now().is_empty());
    }

    #[tokio::test]
    async fn a_commit_without_an_answer_keeps_the_gate_from_counting() {
        let room = Room::default();
        drop(room.enter(1, 10, None).await);
        assert_eq!((room.commits_begun(), room.commits_done()), (1, 0));
        {
            let closed = room.close(Duration::from_millis(5)).await.expect("empty");
            assert_eq!(closed.commits(), None);
        }
        room.settle(&[10]);
        let closed = room.close(Duration::from_millis(5)).await.expect("empty");
        assert_eq!((closed.commits(), room.commits_done()), (Some(1), 1));
    }

    /// A commit whose answer never came is among those that its session demands to see from then on, so that no epoch
    /// of before tells it that nothing has happened.
    #[tokio::test]
    async fn an_abandoned_commit_is_in_doubt_and_counts() {
        let room = Room::default();
        assert_eq!(room.enter(1, 10, None).await.abandon(), 1);
        assert_eq!((room.commits_begun(), room.commits_done(), room.unsettled()), (1, 0, vec![10]));
        let closed = room.close(Duration::from_millis(5)).await.expect("its place is free");
        assert_eq!(closed.commits(), None, "its fate is open");
        room.settle(&[10]);
        assert_eq!(closed.commits(), Some(1));
    }

    /// A gate that gives up can name who is inside, and of a statement of its own its kind.
    #[tokio::test]
    async fn a_visit_that_becomes_a_commit_is_one_occupant() {
        let room = Room::default();
        let commit = room.visit(1, 10).await.into_commit().expect("inside");
        let statement = room.enter(2, 11, Some(42)).await;
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
