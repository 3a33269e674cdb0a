//! One clone, from its plan to its end.
//!
//! ```text
//!   Preparing ──> Running ──> Finishing ──> Over: whole
//!       │            │            │
//!       └────────────┴────────────┴───────> Ending ──> Over: discarded
//! ```

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use onecopy_postgres::{InheritedDescriptor, Lsn};

use super::rate::{Rate, seconds_left};
use super::unfinished::Unfinished;
use crate::Origin;
use crate::fanotify::Group;
use crate::fill::{Background, DemandListener, FillProgress, Filling, Limiter};
use crate::free_space::Unwritten;
use crate::image::{FileNumber, Image};
use crate::network::RemoteHost;
use crate::network::client::RemoteOrigin;
use crate::network::protocol::SessionId;
use crate::plan::Plan;
use crate::service::{CloneState, Progress};
use crate::source::SourceFiles;
use crate::target::CloneLocation;

/// One clone.
#[derive(Debug)]
pub struct CloneJob {
    /// Which one, over all lives of the service.
    pub number: u64,
    /// What it shall be.
    pub plan: Plan,
    /// The host of its source; none: this one.
    pub elsewhere: Option<RemoteHost>,
    stage: Mutex<Stage>,
    rate: Mutex<Rate>,
    /// Its slot was not made: one of that name is somebody else's.
    lacks_slot: AtomicBool,
}

/// How far it is.
#[derive(Debug, Clone)]
pub enum Stage {
    /// Its directory is being made.
    Preparing,
    /// Its server can run.
    Running(Arc<Running>),
    /// All its content is there; it is made durable.
    Finishing(Arc<Running>),
    /// It is being removed.
    Ending,
    /// Nothing more is done with it; how far it was at the end.
    Over(CloneState, FillProgress),
}

/// What a clone has whose server can run.
#[derive(Debug)]
pub struct Running {
    /// Where it is.
    pub location: CloneLocation,
    /// PostgreSQL's major version.
    pub major_version: u32,
    /// It answers queries from here on.
    pub consistent_at: Lsn,
    /// The group that asks before its files are accessed.
    pub group: Arc<Group>,
    /// What its `PG_VERSION` points to.
    pub version: InheritedDescriptor,
    /// Its content.
    pub filling: Arc<Filling>,
    /// Where that comes from.
    pub origin: Content,
    /// How fast the background may go.
    pub limiter: Arc<Limiter>,
    /// The threads that work on it; none when they are stopped.
    pub threads: Mutex<Option<Threads>>,
}

/// Where a clone's content comes from.
#[derive(Debug, Clone)]
pub enum Content {
    /// The source's files.
    Local(Arc<SourceFiles>),
    /// Another host.
    Remote(Arc<RemoteOrigin>),
}

impl Content {
    /// The same for who reads it.
    pub fn origin(&self) -> Arc<dyn Origin> {
        match self {
            Content::Local(files) => Arc::<SourceFiles>::clone(files),
            Content::Remote(origin) => Arc::<RemoteOrigin>::clone(origin),
        }
    }

    /// A file is whole.
    pub fn release(&self, file: FileNumber) {
        match self {
            Content::Local(files) => files.release(file),
            // It learns from the bitmap.
            Content::Remote(_) => {}
        }
    }

    /// Which image on another host it is.
    pub fn session(&self) -> Option<SessionId> {
        match self {
            Content::Local(_) => None,
            Content::Remote(origin) => Some(origin.session()),
        }
    }

    /// Who reads waits no longer: the clone is given up.
    pub fn let_readers_go(&self, reason: &str) {
        if let Content::Remote(origin) = self {
            origin.let_readers_go(reason);
        }
    }

    /// Nothing of it is needed any more, because the clone is whole or given up; may wait for a network.
    pub fn end(&self, whole: bool) {
        if let Content::Remote(origin) = self {
            origin.end(whole);
        }
    }
}

/// The threads of one clone. The background ends first: the listener answers what it may wait for.
#[derive(Debug)]
pub struct Threads {
    /// Fills what nobody asks for; none while it is found out what is hot.
    pub background: Option<Background>,
    /// Answers the clone's accesses.
    pub _listener: DemandListener,
}

impl Running {
    /// What whoever starts its postmaster needs: group and version.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.group.as_fd(), self.version.descriptor.as_fd()]
    }

    /// Whether the background has done what it could.
    pub fn background_is_finished(&self) -> bool {
        let threads = self.lock_threads();
        threads.as_ref().and_then(|threads| threads.background.as_ref()).is_some_and(Background::is_finished)
    }

    /// Stops its threads and waits for them.
    pub fn stop_threads(&self) {
        let threads = self.lock_threads().take();
        drop(threads);
    }

    /// Its threads.
    pub fn lock_threads(&self) -> MutexGuard<'_, Option<Threads>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CloneJob {
    /// One whose directory is being made.
    pub fn new(number: u64, plan: Plan, elsewhere: Option<RemoteHost>) -> CloneJob {
        let (stage, rate) = (Mutex::new(Stage::Preparing), Mutex::default());
        CloneJob { number, plan, elsewhere, stage, rate, lacks_slot: AtomicBool::new(false) }
    }

    /// Its slot is not there; one that is called so must not be dropped with it.
    pub fn note_no_slot(&self) {
        self.lacks_slot.store(true, Ordering::Release);
    }

    /// Whether a slot may be there that was made for it.
    pub fn may_have_slot(&self) -> bool {
        !self.lacks_slot.load(Ordering::Acquire)
    }

    /// What would have to be removed of it. On another host its slot is dropped there when the image's session is over.
    pub fn unfinished(&self) -> Unfinished {
        Unfinished::of(&self.plan, self.elsewhere.is_none() && self.may_have_slot())
    }

    /// How far it is.
    pub fn stage(&self) -> Stage {
        self.lock().clone()
    }

    /// What it has; none before its server can run and when nothing more is done with it.
    pub fn running(&self) -> Option<Arc<Running>> {
        match &*self.lock() {
            Stage::Running(running) | Stage::Finishing(running) => Some(Arc::clone(running)),
            Stage::Preparing | Stage::Ending | Stage::Over(..) => None,
        }
    }

    /// Whether nothing more is done with it.
    pub fn is_over(&self) -> bool {
        matches!(&*self.lock(), Stage::Over(..))
    }

    /// Preparing to Running; false when it was discarded meanwhile.
    pub fn set_running(&self, running: Arc<Running>) -> bool {
        let mut stage = self.lock();
        let may = matches!(&*stage, Stage::Preparing);
        if may {
            *stage = Stage::Running(running);
        }
        may
    }

    /// Running to Finishing; none when it is not running.
    pub fn begin_finish(&self) -> Option<Arc<Running>> {
        let mut stage = self.lock();
        let Stage::Running(running) = &*stage else { return None };
        let running = Arc::clone(running);
        *stage = Stage::Finishing(Arc::clone(&running));
        Some(running)
    }

    /// Finishing to Over, whole; false when it is being removed.
    pub fn end_finish(&self, last: FillProgress) -> bool {
        let mut stage = self.lock();
        let may = matches!(&*stage, Stage::Finishing(_));
        if may {
            *stage = Stage::Over(CloneState::Whole, last);
        }
        may
    }

    /// To Ending, by whoever then removes it; none when it is over, or somebody else removes it. Also tells what it
    /// had.
    pub fn begin_end(&self) -> Option<Option<Arc<Running>>> {
        let mut stage = self.lock();
        match std::mem::replace(&mut *stage, Stage::Ending) {
            Stage::Preparing => Some(None),
            Stage::Running(running) | Stage::Finishing(running) => Some(Some(running)),
            before @ (Stage::Ending | Stage::Over(..)) => {
                *stage = before;
                None
            }
        }
    }

    /// To Over.
    pub fn set_over(&self, state: CloneState, last: FillProgress) {
        *self.lock() = Stage::Over(state, last);
    }

    /// What it has yet to write; all of `image`, its source's, while it is being made. None when it is over, or being
    /// removed.
    pub fn unwritten(&self, image: &Image) -> Option<Unwritten> {
        match self.stage() {
            Stage::Preparing => Some(Unwritten::all(&self.plan, image)),
            Stage::Running(running) | Stage::Finishing(running) => {
                let filling = &running.filling;
                Some(Unwritten::of(&self.plan, filling.image(), |file, _| filling.missing_bytes(file)))
            }
            Stage::Ending | Stage::Over(..) => None,
        }
    }

    /// Whether it is this directory.
    pub fn is_at(&self, target: &Path) -> bool {
        self.plan.target == target
    }

    /// How far it is, for those who watch.
    pub fn progress(&self) -> Progress {
        let (state, fill) = match self.stage() {
            Stage::Preparing => (CloneState::Preparing, FillProgress::default()),
            Stage::Running(running) => (CloneState::Filling, running.filling.progress()),
            Stage::Finishing(running) => (CloneState::Finishing, running.filling.progress()),
            Stage::Ending => (CloneState::Finishing, FillProgress::default()),
            Stage::Over(state, last) => (state, last),
        };
        let mut rate = self.rate.lock().unwrap_or_else(PoisonError::into_inner);
        let rate_bytes_per_second = rate.note(Instant::now(), fill.filled_bytes);
        let missing_bytes = fill.total_bytes.saturating_sub(fill.filled_bytes);
        let seconds_left = match state {
            CloneState::Filling => seconds_left(missing_bytes, rate_bytes_per_second),
            CloneState::Whole => Some(0),
            _ => None,
        };
        Progress {
            target: self.plan.target.clone(),
            slot: self.plan.slot.clone(),
            state,
            total_bytes: fill.total_bytes,
            filled_bytes: fill.filled_bytes,
            rate_bytes_per_second,
            seconds_left,
            demand_faults: fill.demand_faults,
            files_left: fill.files_left,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::image::{FileIdentity, ImageFile};
    use crate::network::server::tests::SourceHost;

    #[test]
    fn all_of_a_clone_that_is_being_made_is_unwritten() {
        let directory = tempfile::tempdir().unwrap();
        let plan = SourceHost::new(&[1], 1, directory.path(), Duration::from_secs(1)).plan();
        let identity = FileIdentity { device: 1, inode: 1, born_nanoseconds: 0 };
        let file = ImageFile { path: "base/5/1".into(), size_bytes: 1 << 40, mode: 0o600, identity };
        let image = Image { files: vec![file], ..Image::default() };
        let clone = CloneJob::new(1, plan.clone(), None);
        assert_eq!(clone.unwritten(&image), Some(Unwritten::all(&plan, &image)));
        clone.set_over(CloneState::Whole, FillProgress::default());
        assert_eq!(clone.unwritten(&image), None);
    }
}
