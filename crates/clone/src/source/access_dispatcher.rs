//! Every access of the source passes here: allowed, held at the gate, or resolved with the followers.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use super::directories::Directories;
use super::follower::Following;
use super::pending_save::{PendingSave, Waiting};
use crate::fanotify::{Access, Event, Group, Verdict};
use crate::image::FileNumber;
use crate::{ByteRange, CloneError};

/// How often followers are asked again whether they have a range that they said they took.
const ROUNDS_MAX: u32 = 8;

/// More than this is never taken by the listener itself, which others wait for, and never at once. A truncation may be
/// of any length.
const PIECE_BYTES_MAX: u64 = 1 << 20;

/// Whether one who resolves an access may wait for a disk.
#[derive(Clone, Copy)]
pub(super) enum WaitMode<'a> {
    NoWait,
    /// He has waited already: he takes nothing, not even at once.
    Exhausted,
    /// He may, where others see for how long.
    Blocking(&'a PendingSave),
}

/// What the source's accesses had to wait for since it is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SourceMetrics {
    /// Accesses that the kernel asked about.
    pub accesses: u64,
    /// Those for which a follower had to take something first.
    pub saves: u64,
    /// Those of them that had to wait for a disk or a place in the queue.
    pub slow_saves: u64,
    /// How long the gate was closed at the last freeze.
    pub pause: Duration,
    /// The longest that an access waited since the last freeze began, from when it was read to its answer.
    pub wait_longest: Duration,
}

#[derive(Default)]
struct Counters {
    accesses: AtomicU64,
    saves: AtomicU64,
    slow_saves: AtomicU64,
    pause_us: AtomicU64,
    wait_longest_us: AtomicU64,
}

/// Whether the gate is closed, and who follows.
#[derive(Default)]
pub(super) struct Gate {
    /// Since when; none: open.
    pub(super) closed_since: Option<Instant>,
    pub(super) followings: Vec<Following>,
}

/// Files that raise nothing though their directory does: nobody needs anything of them.
#[derive(Default)]
struct IgnoreMarks {
    allowed: bool,
    files: IgnoredFiles,
}

/// Which files are ignored. A file that is gone may stay in it: another one with its inode is watched again for
/// nothing.
#[derive(Debug, Default, Clone)]
pub(super) struct IgnoredFiles {
    /// Any may be: a process that is dead has ignored them.
    unknown: bool,
    inodes: HashSet<(u64, u64)>,
}

impl IgnoredFiles {
    pub(super) fn may_hold(&self, inode: (u64, u64)) -> bool {
        self.unknown || self.inodes.contains(&inode)
    }
}

/// Shared by the listener, the workers and whoever freezes.
pub(super) struct AccessDispatcher {
    pub(super) group: Arc<Group>,
    pub(super) directories: Directories,
    gate: RwLock<Gate>,
    held: Mutex<Vec<Waiting>>,
    ignore_marks: Mutex<IgnoreMarks>,
    counters: Counters,
}

impl AccessDispatcher {
    pub(super) fn new(group: Arc<Group>, directories: Directories) -> AccessDispatcher {
        AccessDispatcher {
            group,
            directories,
            gate: RwLock::default(),
            held: Mutex::default(),
            ignore_marks: Mutex::default(),
            counters: Counters::default(),
        }
    }

    pub(super) fn gate(&self) -> RwLockReadGuard<'_, Gate> {
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn change_gate(&self) -> RwLockWriteGuard<'_, Gate> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new access was read.
    pub(super) fn count_access(&self) {
        self.counters.accesses.fetch_add(1, Ordering::Relaxed);
    }

    /// Brings an access as far as it goes now: gives it back when it needs to wait, none when it is answered or
    /// held, or somebody else goes on with it.
    pub(super) fn resolve(&self, mut waiting: Waiting, wait_mode: WaitMode<'_>) -> Option<Waiting> {
        let range = wanted(&waiting.event);
        for round in 0.. {
            let lacking = {
                let gate = self.gate();
                if gate.closed_since.is_some() {
                    lock(&self.held).push(waiting);
                    return None;
                }
                let lacking = lacking(&gate.followings, &waiting, range);
                if lacking.is_empty() || (!waiting.saving && is_no_truncation(&waiting.event)) {
                    self.ignore_if_needless(&gate, &waiting);
                    self.allow(waiting);
                    return None;
                }
                lacking
            };
            if !waiting.saving {
                waiting.saving = true;
                self.counters.saves.fetch_add(1, Ordering::Relaxed);
            }
            for (file, following) in &lacking {
                if round == ROUNDS_MAX {
                    self.leave_out(following, "it says that it has taken a range and has not");
                    continue;
                }
                match wait_mode {
                    WaitMode::NoWait if self.take_now(following, *file, range) => {}
                    WaitMode::NoWait | WaitMode::Exhausted => {
                        self.counters.slow_saves.fetch_add(1, Ordering::Relaxed);
                        return Some(waiting);
                    }
                    WaitMode::Blocking(pending_save) => {
                        waiting = self.take_blocking(waiting, following, *file, range, pending_save)?
                    }
                }
            }
        }
        unreachable!("each round allows, or leaves followers out")
    }

    /// False when it needs to wait.
    fn take_now(&self, following: &Following, file: FileNumber, range: ByteRange) -> bool {
        if range.end - range.start > PIECE_BYTES_MAX {
            return false;
        }
        following.follower.take_now(file, range).unwrap_or_else(|error| {
            self.leave_out(following, &error.to_string());
            true
        })
    }

    /// Waits for the follower, piece by piece, so that whoever looks sees that it goes on; gives the access back, or
    /// none when that took too long and somebody else has it.
    fn take_blocking(
        &self,
        mut waiting: Waiting,
        following: &Following,
        file: FileNumber,
        range: ByteRange,
        pending_save: &PendingSave,
    ) -> Option<Waiting> {
        let mut rest = range;
        while rest.start < rest.end && !following.follower.has(file, rest) {
            let piece = ByteRange { start: rest.start, end: rest.end.min(rest.start.saturating_add(PIECE_BYTES_MAX)) };
            pending_save.begin(waiting, following.clone());
            let taken = following.follower.take(file, piece);
            waiting = pending_save.end()?;
            if let Err(error) = taken {
                self.leave_out(following, &error.to_string());
                break;
            }
            // One that says so and has not is asked again, not for ever.
            if !following.follower.has(file, piece) {
                break;
            }
            rest.start = piece.end;
        }
        Some(waiting)
    }

    /// Answers; with the gate held open by the caller, or for this process itself.
    pub(super) fn allow(&self, waiting: Waiting) {
        let Waiting { event, slot, since, .. } = waiting;
        if let Err(error) = self.group.answer(event.number, Verdict::Allow) {
            tracing::error!(process_id = event.process_id, %error, "an access of the source may wait for ever");
        }
        // Only now: an entry that is gone is an access that is answered.
        drop(slot);
        let waited_us = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.counters.wait_longest_us.fetch_max(waited_us, Ordering::Relaxed);
    }

    /// Waits for this follower no more.
    pub(super) fn leave_out(&self, following: &Following, reason: &str) {
        tracing::warn!(reason, "a clone cannot take the source's old content; the source goes on without it");
        following.follower.give_up(reason);
        self.unfollow(Arc::as_ptr(&following.follower).cast());
    }

    /// Waits for nobody any more.
    pub(super) fn leave_all_out(&self, reason: &str) {
        let followings = self.gate().followings.clone();
        for following in followings {
            self.leave_out(&following, reason);
        }
    }

    /// Removes a follower; the last one leaves all ignored.
    pub(super) fn unfollow(&self, follower: *const ()) {
        let mut gate = self.change_gate();
        gate.followings.retain(|following| !following.is(follower));
        if gate.followings.is_empty() && gate.closed_since.is_none() {
            self.directories.ignore(&self.group);
        }
    }

    /// From now on accesses wait. Those that were answered before may still be at work in the kernel, for moments.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: a directory stays ignored; nothing waits then.
    pub(super) fn close(&self) -> Result<(), CloneError> {
        let mut gate = self.change_gate();
        self.counters.wait_longest_us.store(0, Ordering::Relaxed);
        gate.closed_since = Some(Instant::now());
        self.directories.wake(&self.group).inspect_err(|_| gate.closed_since = None)
    }

    /// Whether an access of this process waits at the closed gate.
    pub(super) fn holds(&self, process_id: u32) -> bool {
        lock(&self.held).iter().any(|waiting| waiting.event.process_id == process_id)
    }

    /// Lets everything go on; gives how long the gate was closed, if it was, and what waited and must be resolved.
    pub(super) fn open(&self) -> (Option<Duration>, Vec<Waiting>) {
        let mut gate = self.change_gate();
        let pause = gate.closed_since.take().map(|since| since.elapsed());
        if let Some(pause) = pause {
            let pause_us = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
            self.counters.pause_us.store(pause_us, Ordering::Relaxed);
        }
        if gate.followings.is_empty() {
            self.directories.ignore(&self.group);
        }
        (pause, std::mem::take(&mut *lock(&self.held)))
    }

    /// No more ignore marks on single files until [`AccessDispatcher::allow_ignore_marks`]; gives those that are
    /// ignored now, to be watched again.
    pub(super) fn forbid_ignore_marks(&self) -> IgnoredFiles {
        let mut ignore_marks = lock(&self.ignore_marks);
        ignore_marks.allowed = false;
        ignore_marks.files.clone()
    }

    /// All that [`AccessDispatcher::forbid_ignore_marks`] gave and that still is needed is watched again.
    pub(super) fn forget_ignore_marks(&self) {
        lock(&self.ignore_marks).files = IgnoredFiles::default();
    }

    /// Files may be ignored again.
    pub(super) fn allow_ignore_marks(&self) {
        lock(&self.ignore_marks).allowed = true;
    }

    /// A process that is dead has ignored files.
    pub(super) fn inherit_ignore_marks(&self) {
        lock(&self.ignore_marks).files.unknown = true;
    }

    /// A hot file of which nobody needs anything more would cost every access a question.
    fn ignore_if_needless(&self, gate: &Gate, waiting: &Waiting) {
        let needed = gate.followings.iter().any(|following| {
            following.table.find(waiting.identity).is_some_and(|file| !following.follower.has_all_of(file))
        });
        if needed {
            return;
        }
        let mut ignore_marks = lock(&self.ignore_marks);
        // A freeze that begins watches the ignored ones again: none may be added behind its back.
        if !ignore_marks.allowed {
            return;
        }
        ignore_marks.files.inodes.insert(waiting.identity.device_and_inode());
        if let Err(error) = self.group.ignore_file(&waiting.event.descriptor) {
            tracing::warn!(%error, "a file that nobody needs goes on to raise events");
        }
    }

    pub(super) fn metrics(&self) -> SourceMetrics {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SourceMetrics {
            accesses: count(&self.counters.accesses),
            saves: count(&self.counters.saves),
            slow_saves: count(&self.counters.slow_saves),
            pause: Duration::from_micros(count(&self.counters.pause_us)),
            wait_longest: Duration::from_micros(count(&self.counters.wait_longest_us)),
        }
    }
}

/// Followers that must take something before this access, each with what it calls the file.
fn lacking(followings: &[Following], waiting: &Waiting, range: ByteRange) -> Vec<(FileNumber, Following)> {
    let lacking = followings.iter().filter_map(|following| {
        let file = following.table.find(waiting.identity)?;
        following.follower.note_access(file);
        (!following.follower.has(file, range)).then(|| (file, following.clone()))
    });
    lacking.collect()
}

/// What an access may change: a truncation everything from the new end on.
pub(super) fn changed(access: Access) -> ByteRange {
    match access {
        Access::Range(range) => range,
        Access::Truncation { size_bytes } => ByteRange { start: size_bytes, end: u64::MAX },
    }
}

fn wanted(event: &Event) -> ByteRange {
    changed(event.access)
}

/// A read or write of no bytes looks like a truncation, and changes nothing.
fn is_no_truncation(event: &Event) -> bool {
    matches!(event.access, Access::Truncation { .. }) && Event::truncates(event.process_id) == Some(false)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
