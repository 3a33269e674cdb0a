//! The process above the hydrator: holds copies of its open files, and starts it again with them when it has died.
//!
//! ```text
//!                 died, or its heartbeat stops: SIGKILL
//!            ┌───────────────────────────────────────────────┐
//!            v                                               │
//!  start ─> hydrator lives ── it says that it is done ─> end │
//!            │                                               │
//!            └── too many deaths without progress ───────────┴─> all files closed (the source runs on) ─> cleanup ─> end
//! ```
//!
//! While the hydrator is away nobody answers the kernel's questions, but nobody closes the groups either: accesses
//! wait. This process does so little that it has no reason to die.

mod channel;
mod passing;

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use channel::{Channel, KeptFiles, Message, NAME_BYTES_MAX};
pub use passing::{DESCRIPTORS_MAX, receive, send};

use crate::CloneError;
use crate::fanotify::{Group, Journal, raise_descriptors_max};
use crate::fill::SharedBitmap;

/// The name under which the journal is kept; its heartbeats and its progress are what is watched.
pub const JOURNAL: &str = "journal";
/// Files with this end of their names are all that the cleanup is given.
pub const STATE_SUFFIX: &str = "state";
/// What the names of all parts of a clone begin with.
pub const CLONE_PREFIX: &str = "clone-";
/// The same of an image that another host reads.
pub const IMAGE_PREFIX: &str = "image-";
/// What the name of the bitmap of what such an image has saved ends with.
pub const SAVED_SUFFIX: &str = "saved";
/// What the name of a clone's bitmap ends with.
pub const BITMAP_SUFFIX: &str = "bitmap";
/// The name under which the source's group is kept.
pub const SOURCE_GROUP: &str = "source-group";
/// Files that are kept, at most: some for each clone. A hydrator that gives more fails.
pub const KEPT_MAX: usize = 4096;
/// Hydrators that die one after another before they have taken over what there is: then it is given up, since the next
/// one would, too.
pub const EARLY_DEATHS_MAX: u32 = 3;
/// Hydrators that have taken over and die one after another without having brought anything. They may be killed from
/// outside, and one that has just taken over has had no time; so these are more. While one hangs, the source waits: so
/// they are few.
pub const DEATHS_MAX: u32 = 6;
/// One that lived this long was well, also if there was nothing to bring. None that hangs lives so long.
const HEALTHY_PERIOD: Duration = Duration::from_secs(30);
/// A thread of the hydrator may show no sign of life for this long.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(2);
/// And it must have been looked at so often meanwhile: when the whole machine stood still, the hydrator had no chance
/// to beat either.
const STILL_LOOKS_MIN: u32 = 10;
/// So long may none of its threads have a heartbeat: at the beginning, and at the end. Those of the tests never have
/// one, and are counted.
const START_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 120 } else { 10 });
/// So long may a cleanup take: processes are killed and directories removed.
const BURIAL_TIMEOUT: Duration = Duration::from_secs(120);
/// A killed process that does not end within this waits in the kernel for a disk.
const KILLED_TIMEOUT: Duration = Duration::from_secs(3);
/// The source's last accesses are answered so long after its marks are gone.
const LET_GO_LINGER: Duration = Duration::from_millis(500);
/// How often the hydrator is looked at.
const LOOK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// How a keeper ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The hydrator had nothing left to do.
    Done,
    /// It died again and again; its clones are cleaned up.
    CleanedUp,
    /// And the cleanup failed, too: the clones' directories are left, unstartable.
    Left,
}

/// How a hydrator is run: its standard input is the channel, its standard error ours.
#[derive(Debug)]
pub struct Hydrator {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Its arguments when it shall only clear away what cannot become whole.
    pub cleanup_arguments: Vec<OsString>,
}

/// Runs hydrators until one is done; `kept` is what the first one is given.
///
/// # Errors
/// No process or socket can be made.
pub fn run(hydrator: &Hydrator, kept: KeptFiles) -> io::Result<Ending> {
    let mut keeper = Keeper { kept };
    let mut deaths = Deaths::default();
    while !deaths.are_too_many() {
        let begin = Instant::now();
        let status = keeper.one_life(hydrator, &hydrator.arguments, Watch::Heartbeat)?;
        if status.success() {
            return Ok(Ending::Done);
        }
        deaths.count(begin.elapsed(), keeper.journal().as_ref());
        tracing::error!(%status, ?deaths, "the hydrator died");
    }
    // The source's group is closed, which lets its accesses through. Those of the clones are held by their postmasters
    // still: these wait to be killed, or to be let go if they are whole.
    keeper.kept.retain(|name, _| name.ends_with(STATE_SUFFIX) || name.starts_with(CLONE_PREFIX));
    let status = keeper.one_life(hydrator, &hydrator.cleanup_arguments, Watch::Clock(BURIAL_TIMEOUT))?;
    tracing::error!(%status, "gave up; the clones that were not whole are cleaned up");
    Ok(if status.success() { Ending::CleanedUp } else { Ending::Left })
}

/// Hydrators that died one after another.
#[derive(Debug, Default)]
struct Deaths {
    /// Since one has brought something, or lived for long.
    without_progress: u32,
    /// Since one has at least taken over.
    early: u32,
    /// [`Journal::progress`] and [`Journal::takeovers`] at the last one.
    progress: u64,
    takeovers: u64,
}

impl Deaths {
    /// One more, after a life of `lived`.
    fn count(&mut self, lived: Duration, journal: Option<&Journal>) {
        let (progress, takeovers) = journal.map_or((0, 0), |journal| (journal.progress(), journal.takeovers()));
        let has_taken_over = takeovers > self.takeovers;
        // One that hangs while it takes over may live for longer.
        let has_progressed = progress > self.progress || has_taken_over && lived >= HEALTHY_PERIOD;
        let is_early = !has_progressed && !has_taken_over;
        self.without_progress = if has_progressed { 0 } else { self.without_progress + 1 };
        self.early = if is_early { self.early + 1 } else { 0 };
        (self.progress, self.takeovers) = (progress, takeovers);
    }

    fn are_too_many(&self) -> bool {
        self.early >= EARLY_DEATHS_MAX || self.without_progress >= DEATHS_MAX
    }
}

/// What a process is killed for.
enum Watch {
    /// Its heartbeat has stopped.
    Heartbeat,
    /// It takes longer.
    Clock(Duration),
}

struct Keeper {
    kept: KeptFiles,
}

impl Keeper {
    fn journal(&self) -> Option<Journal> {
        Journal::open(self.kept.get(JOURNAL)?.try_clone().ok()?).ok()
    }

    /// Starts a process, gives it all files, takes what it gives, until it has ended.
    fn one_life(&mut self, hydrator: &Hydrator, arguments: &[OsString], watch: Watch) -> io::Result<ExitStatus> {
        let begin = Instant::now();
        let (channel, other) = Channel::pair()?;
        let mut command = Command::new(&hydrator.program);
        let mut child = command.args(arguments).stdin(Stdio::from(other)).stdout(Stdio::null()).spawn()?;
        // The dead have no heartbeat.
        if let Some(journal) = self.journal() {
            journal.clean();
        }
        // The command holds the other end, too: closed, so that this end notices the process's death.
        drop(command);
        let mut killed: Option<Instant> = None;
        if let Err(error) = channel.hand_over(&self.kept) {
            tracing::error!(%error, "the hydrator does not take what it is given");
            child.kill()?;
            killed = Some(Instant::now());
        }
        let mut heartbeat = HeartbeatWatch { beats: 0, since: begin, looks: 0 };
        loop {
            self.wait_for_messages(&channel)?;
            if let Err(error) = self.take_messages(&channel) {
                tracing::error!(%error, "the hydrator gives what cannot be kept");
                child.kill()?;
                killed.get_or_insert_with(Instant::now);
            }
            if let Some(status) = child.try_wait()? {
                // What it gave in its last moment.
                if let Err(error) = self.take_messages(&channel) {
                    tracing::error!(%error, "the hydrator has given what cannot be kept");
                }
                return Ok(status);
            }
            let expired = match watch {
                Watch::Heartbeat => heartbeat.has_stopped(self.journal().as_ref()),
                Watch::Clock(timeout) => begin.elapsed() > timeout,
            };
            if expired && killed.is_none() {
                tracing::error!(process = child.id(), "the process does not go on: killed");
                child.kill()?;
                killed = Some(Instant::now());
            }
            if killed.is_some_and(|since| since.elapsed() > KILLED_TIMEOUT) {
                if let Err(error) = self.let_source_go() {
                    tracing::error!(%error, "the source waits until the killed process ends");
                }
                // Tried again after as long.
                killed = Some(Instant::now());
            }
        }
    }

    /// A process that was killed and does not end has the source's group open, and nobody answers: the source would
    /// wait for the same disk. So the clones are given up, and it goes on.
    fn let_source_go(&mut self) -> Result<(), CloneError> {
        let Some(group) = self.kept.get(SOURCE_GROUP) else { return Ok(()) };
        let copy = |file: &OwnedFd| file.try_clone().map_err(CloneError::kernel("copy a descriptor"));
        let group = Group::from_descriptor(copy(group)?);
        tracing::error!("the killed process does not end: the source goes on without its clones");
        // First: whoever goes on with them must know what the source changes from here on. Of their files nothing is
        // asked, not even to be marked: their disk is what may hang.
        for (_, bitmap) in self.kept.iter().filter(|(name, _)| is_bitmap(name)) {
            SharedBitmap::open(copy(bitmap)?)?.give_up();
        }
        raise_descriptors_max()?;
        group.let_go(LET_GO_LINGER)?;
        self.kept.remove(SOURCE_GROUP);
        Ok(())
    }

    fn wait_for_messages(&self, channel: &Channel) -> io::Result<()> {
        let mut ready = [PollFd::new(channel.socket(), PollFlags::IN)];
        match poll(&mut ready, Some(&LOOK_INTERVAL)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // The other end is closed a moment before its process has ended: no reason to look without a pause.
        if ready[0].revents().contains(PollFlags::HUP) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn take_messages(&mut self, channel: &Channel) -> io::Result<()> {
        loop {
            match channel.receive(false) {
                Ok(Some(Message::Keep(name, file))) => {
                    self.kept.insert(name, file);
                    if self.kept.len() > KEPT_MAX {
                        return Err(io::Error::other("too many files"));
                    }
                }
                Ok(Some(Message::Forget(name))) => drop(self.kept.remove(&name)),
                Ok(Some(other)) => return Err(io::Error::other(format!("out of place: {other:?}"))),
                Ok(None) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // It died in the middle of something.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Whether it says of a clone, or of an image for one elsewhere, that it is given up.
fn is_bitmap(name: &str) -> bool {
    (name.starts_with(CLONE_PREFIX) && name.ends_with(BITMAP_SUFFIX))
        || (name.starts_with(IMAGE_PREFIX) && name.ends_with(SAVED_SUFFIX))
}

/// The heartbeat of one life that has been still for longest.
struct HeartbeatWatch {
    /// [`Journal::heartbeats`], as seen last.
    beats: u64,
    since: Instant,
    /// How often these beats were seen.
    looks: u32,
}

impl HeartbeatWatch {
    fn has_stopped(&mut self, journal: Option<&Journal>) -> bool {
        let beats = journal.map_or(0, Journal::heartbeats);
        if beats != self.beats {
            *self = HeartbeatWatch { beats, since: Instant::now(), looks: 0 };
        }
        self.looks = self.looks.saturating_add(1);
        self.looks >= STILL_LOOKS_MIN
            && self.since.elapsed() > if beats == 0 { START_TIMEOUT } else { HEARTBEAT_TIMEOUT }
    }
}

#[cfg(test)]
mod tests;
