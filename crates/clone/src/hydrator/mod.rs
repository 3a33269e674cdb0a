//! The process in which clones are made and filled.
//!
//! ```text
//!  [server] ── order ──> [making] ── freeze ──> clone runs ──> [attending] ── whole ──> [ending]: finish
//!     │                                             ▲               └──────── failed ──> [ending]: discard
//!     └── watch, discard, limit, spare        [takeover], after a death: from what the keeper held
//! ```
//!
//! One thread serves the socket and speaks SQL; what may take long runs on threads of its own; each clone and the
//! source have a listener.

mod cleanup;
mod clone_job;
#[cfg(test)]
mod deaths;
mod descriptors;
mod ending;
mod filling;
mod images;
mod keeper_client;
mod making;
mod rate;
mod record;
mod removal;
mod server;
mod spare;
mod supervision;
mod takeover;
mod unfinished;

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::net::UnixListener;
use tokio::sync::{Notify, mpsc};
use tokio::task::{JoinError, JoinHandle};

use crate::CloneError;
use crate::fanotify::{Journal, raise_descriptors_max};
use crate::fill::Filling;
use crate::keeper::{BITMAP_SUFFIX, Channel, JOURNAL, KeptFiles, STATE_SUFFIX};
use crate::network::server::Sessions;
use crate::plan::Plan;
use crate::service::{Event, KEPT_LISTENER, Progress, Rendezvous, SpareWanted};
use crate::source::Source;
use clone_job::{CloneJob, Running, Stage};
use descriptors::{DescriptorReservation, Descriptors};
use images::Images;
use keeper_client::KeeperClient;
use making::{Notification, Order};
use record::kept_name;
use spare::{SPARE_KEPT, Spare};
use unfinished::Unfinished;

/// So long may going on after a death take: it opens hundreds of thousands of files where a source has so many.
const TAKEOVER_TIME_MAX: Duration = Duration::from_secs(300);
/// Clones that are over and can still be asked about, at most.
const OVER_MAX: usize = 64;
/// Parts of a clone that the keeper holds. In the order in which they are forgotten: without its state a clone is
/// unknown, and a limit that stayed would be that of the next one with its number.
const KEPT_PARTS: [&str; 5] = ["limit", STATE_SUFFIX, "group", BITMAP_SUFFIX, "version"];

/// All that this process has.
pub struct Hydrator {
    rendezvous: Rendezvous,
    keeper_client: KeeperClient,
    journal: Arc<Journal>,
    clones: Mutex<Vec<Arc<CloneJob>>>,
    /// What was given up and could not be removed, also by services before this one.
    left: Mutex<Vec<Unfinished>>,
    /// What of that is being removed.
    removing: Mutex<Vec<Unfinished>>,
    next_number: AtomicU64,
    orders: Mutex<VecDeque<Order>>,
    ordered: Notify,
    /// Watched from the first clone on.
    source: Mutex<Option<Arc<Source>>>,
    /// Held while it is being armed: a clone, a prepared directory and an image may want it at the same time, and the
    /// keeper holds one group.
    arming: tokio::sync::Mutex<()>,
    spare: Mutex<Spare>,
    descriptors: Descriptors,
    spare_changed: Notify,
    /// What is frozen for clones on other hosts.
    images: Arc<Images>,
    /// Who of them reads it.
    sessions: Arc<Sessions>,
    /// Work that nobody asks about and that must be done before the process ends.
    lingering: Arc<AtomicUsize>,
}

/// Serves until nothing is left to do: makes clones, fills them; with what an earlier hydrator's keeper holds it goes
/// on.
///
/// # Errors
/// [`CloneError`]: it cannot begin, or not go on where the one before died; what was begun is then to be cleaned up.
pub fn run(directory: PathBuf, channel: Channel) -> Result<(), CloneError> {
    raise_descriptors_max()?;
    let (keeper_client, kept) = KeeperClient::take_over(channel)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(CloneError::kernel("start the runtime"))?;
    runtime.block_on(serve(Rendezvous::at(directory), keeper_client, kept))
}

/// Removes what cannot become whole, with its servers and slots, and the service's directory.
///
/// # Errors
/// [`CloneError`]: something is left.
pub fn clean_up(directory: PathBuf, channel: Channel) -> Result<(), CloneError> {
    let (_, kept) = KeeperClient::take_over(channel)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(CloneError::kernel("start the runtime"))?;
    runtime.block_on(async {
        let rendezvous = Rendezvous::at(directory);
        let recorded: Vec<_> = record::Record::all(&kept).into_iter().map(|record| record.plan.target).collect();
        let mut listed = unfinished::read_targets(&rendezvous);
        listed.retain(|unfinished| !recorded.contains(&unfinished.target));
        let records = cleanup::clean_up_records(&rendezvous, &kept);
        let (_, mut leftovers) = tokio::join!(images::clean_up(&kept), records);
        leftovers.extend(cleanup::clean_up_targets(&rendezvous, listed).await);
        let (left, errors): (Vec<_>, Vec<_>) = leftovers.into_iter().unzip();
        if let Some(error) = errors.into_iter().next() {
            unfinished::write_targets(&rendezvous, &left);
            return Err(error);
        }
        rendezvous.remove()
    })
}

async fn serve(rendezvous: Rendezvous, keeper_client: KeeperClient, kept: KeptFiles) -> Result<(), CloneError> {
    let journal = match kept.contains_key(JOURNAL) {
        true => Journal::open(keeper_client::copy_of(&kept, JOURNAL)?)?,
        false => Journal::create()?,
    };
    keeper_client.keep(JOURNAL, &journal);
    let listener = std::os::unix::net::UnixListener::from(keeper_client::copy_of(&kept, KEPT_LISTENER)?);
    let listen = || {
        listener.set_nonblocking(true)?;
        UnixListener::from_std(listener)
    };
    let listener = listen().map_err(CloneError::file("listen at", rendezvous.socket()))?;
    let hydrator = Hydrator::new(rendezvous, keeper_client, journal);
    // Both may take longer than a thread may stand still.
    let beginning = Arc::clone(&hydrator);
    let begun = tokio::spawn(async move { takeover::take_over(&beginning, &kept).await });
    let begun = with_heartbeat(&hydrator.journal, begun, TAKEOVER_TIME_MAX).await;
    begun.map_err(|error| CloneError::kernel("begin")(std::io::Error::other(error)))??;
    hydrator.journal.note_takeover();
    let tasks = [
        tokio::spawn(making::make_orders(Arc::clone(&hydrator))),
        tokio::spawn(supervision::supervise(Arc::clone(&hydrator))),
        tokio::spawn(supervision::watch_slots(Arc::clone(&hydrator))),
        tokio::spawn(images::supervise(Arc::clone(&hydrator.sessions))),
        tokio::spawn(spare::provide(Arc::clone(&hydrator))),
    ];
    server::serve(&hydrator, listener).await;
    tasks.iter().for_each(JoinHandle::abort);
    drop(lock(&hydrator.source).take());
    if !lock(&hydrator.left).is_empty() {
        tracing::warn!("nothing more can be done: what is left is in the list for the next service");
        return Ok(());
    }
    tracing::info!("nothing is left to do");
    hydrator.rendezvous.remove()
}

/// Waits for work with a heartbeat, for `time_max` at most: what hangs then is the keeper's to end.
async fn with_heartbeat<T>(
    journal: &Arc<Journal>,
    mut work: JoinHandle<T>,
    time_max: Duration,
) -> Result<T, JoinError> {
    let (heartbeat, begin) = (journal.heartbeat_slot(), Instant::now());
    loop {
        if let Some(heartbeat) = heartbeat.as_ref().filter(|_| begin.elapsed() < time_max) {
            heartbeat.beat();
        }
        // Somebody waits for an answer: no longer than it takes.
        if let Ok(done) = tokio::time::timeout(server::LOOK_INTERVAL, &mut work).await {
            return done;
        }
    }
}

impl Hydrator {
    /// One that has nothing to do yet.
    fn new(rendezvous: Rendezvous, keeper_client: KeeperClient, journal: Journal) -> Arc<Hydrator> {
        Arc::new_cyclic(|hydrator| {
            let (images, sessions) = Images::of(Weak::clone(hydrator));
            Hydrator {
                images,
                sessions,
                rendezvous,
                keeper_client,
                journal: Arc::new(journal),
                clones: Mutex::default(),
                left: Mutex::default(),
                removing: Mutex::default(),
                next_number: AtomicU64::new(1),
                orders: Mutex::default(),
                ordered: Notify::new(),
                source: Mutex::default(),
                arming: tokio::sync::Mutex::default(),
                spare: Mutex::default(),
                descriptors: Descriptors::default(),
                spare_changed: Notify::new(),
                lingering: Arc::default(),
            }
        })
    }

    /// Whether there is something that must not be left undone.
    fn is_busy(&self) -> bool {
        let clones = lock(&self.clones);
        !lock(&self.orders).is_empty()
            || clones.iter().any(|clone| !clone.is_over())
            || lock(&self.spare).is_wanted()
            || !self.sessions.is_empty()
            || self.lingering.load(Ordering::Acquire) > 0
    }

    /// Open files for `times` sets of a source's files; see [`Descriptors::reserve`].
    fn reserve_descriptors(
        &self,
        data_directory: &Path,
        files: usize,
        times: usize,
    ) -> Result<DescriptorReservation, CloneError> {
        self.descriptors.reserve(data_directory, files, times)
    }

    /// Something goes on until this is dropped.
    fn linger(&self) -> KeepAlive {
        self.lingering.fetch_add(1, Ordering::AcqRel);
        KeepAlive(Arc::clone(&self.lingering))
    }

    /// Wants clones of one freeze; their news come until each is ready or has failed.
    fn order(&self, plans: Vec<Plan>) -> mpsc::Receiver<Notification> {
        let (order, notifications) = Order::new(plans);
        lock(&self.orders).push_back(order);
        self.ordered.notify_one();
        notifications
    }

    fn add(&self, clone: Arc<CloneJob>) {
        let mut clones = lock(&self.clones);
        let over = clones.iter().filter(|clone| clone.is_over()).count();
        if over > OVER_MAX
            && let Some(oldest) = clones.iter().position(|clone| clone.is_over())
        {
            clones.remove(oldest);
        }
        // What was left there is gone, and its slot may be the new one's.
        lock(&self.left).retain_mut(|left| {
            left.slot.take_if(|slot| *slot == clone.plan.slot);
            left.target != clone.plan.target
        });
        // Who asks about a directory means what was made there last.
        clones.retain(|other| !(other.is_over() && other.plan.target == clone.plan.target));
        clones.push(clone);
    }

    fn clones(&self) -> Vec<Arc<CloneJob>> {
        lock(&self.clones).clone()
    }

    fn find(&self, target: &Path) -> Option<Arc<CloneJob>> {
        lock(&self.clones).iter().rev().find(|clone| clone.is_at(target)).cloned()
    }

    /// Whether a clone that is not over has this slot on the source, or is to have it, or it is being dropped.
    fn has_slot(&self, name: &str) -> bool {
        if lock(&self.removing).iter().any(|left| left.slot.as_deref() == Some(name)) {
            return true;
        }
        lock(&self.clones).iter().any(|clone| clone.elsewhere.is_none() && !clone.is_over() && clone.plan.slot == name)
    }

    fn progress(&self, target: &Path) -> Option<Progress> {
        self.find(target).map(|clone| clone.progress())
    }

    fn progress_of_all(&self) -> Vec<Progress> {
        self.clones().iter().map(|clone| clone.progress()).collect()
    }

    fn known(&self, target: &Path) -> Result<Arc<CloneJob>, CloneError> {
        self.find(target).ok_or_else(|| self.refuse(format!("{} is no clone of this service", target.display())))
    }

    fn running(&self, target: &Path) -> Result<Arc<Running>, CloneError> {
        let running = self.known(target)?.running();
        running.ok_or_else(|| self.refuse(format!("{} is not being filled", target.display())))
    }

    fn set_limit(&self, target: &Path, bytes_per_second: Option<u64>) -> Result<(), CloneError> {
        let clone = self.known(target)?;
        self.running(target)?.limiter.set_bytes_per_second(bytes_per_second);
        record::to_memory(&record::Limit { bytes_per_second }).map(|memory| self.keep(clone.number, "limit", &memory))
    }

    async fn discard_at(self: &Arc<Self>, target: &Path, reason: &str) -> Result<(), CloneError> {
        let clone = self.known(target)?;
        match clone.stage() {
            Stage::Preparing => Err(self.refuse(format!("{} is still being made", target.display()))),
            Stage::Over(crate::service::CloneState::Whole, _) => {
                Err(self.refuse(format!("{} is whole: it is an ordinary server", target.display())))
            }
            _ => {
                ending::discard(Arc::clone(self), clone, reason.to_owned()).await;
                Ok(())
            }
        }
    }

    /// The source need not save anything for this clone any more.
    fn unfollow(&self, filling: &Arc<Filling>) {
        if let Some(source) = self.source() {
            source.unfollow(filling);
        }
    }

    fn source(&self) -> Option<Arc<Source>> {
        lock(&self.source).clone()
    }

    /// The keeper holds a part of a clone from now on.
    fn keep(&self, number: u64, part: &str, file: impl AsFd) {
        self.keeper_client.keep(&kept_name(number, part), file);
    }

    /// The keeper closes what it held of a clone.
    fn forget(&self, clone: &CloneJob) {
        KEPT_PARTS.iter().for_each(|part| self.keeper_client.forget(&kept_name(clone.number, part)));
    }

    /// Writes down where something lies that would have to be removed if keeper and hydrator were killed.
    fn write_targets(&self) {
        let clones = self.clones();
        let unfinished = clones.iter().filter(|clone| !clone.is_over());
        let mut targets: Vec<Unfinished> = unfinished.map(|clone| clone.unfinished()).collect();
        let prepared = |target: PathBuf| {
            let tablespaces = Some(spare::tablespaces_of(&target));
            Unfinished { target, tablespaces, source: None, slot: None }
        };
        targets.extend(lock(&self.spare).directory().map(prepared));
        targets.extend(lock(&self.left).iter().cloned());
        unfinished::write_targets(&self.rendezvous, &targets);
    }

    fn set_spare(&self, wanted: Option<SpareWanted>) -> Result<(), CloneError> {
        match &wanted {
            Some(wanted) => self.keeper_client.keep(SPARE_KEPT, record::to_memory(wanted)?),
            None => self.keeper_client.forget(SPARE_KEPT),
        }
        lock(&self.spare).set_wanted(wanted);
        self.spare_changed.notify_one();
        Ok(())
    }

    /// Gives a connection to the image protocol.
    async fn serve_image(&self, stream: tokio::net::UnixStream) -> std::io::Result<()> {
        images::serve_image(&self.sessions, stream).await
    }

    fn rendezvous(&self) -> &Rendezvous {
        &self.rendezvous
    }

    fn refuse(&self, reason: String) -> CloneError {
        CloneError::Service { directory: self.rendezvous.directory().to_owned(), reason }
    }
}

/// Keeps the process alive until it is dropped.
struct KeepAlive(Arc<AtomicUsize>);

impl Drop for KeepAlive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind these locks is whole between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is said to whoever ordered.
fn failed(target: Option<&Path>, reason: impl ToString) -> Event {
    Event::Failed { target: target.map(Path::to_owned), reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source on a file system that does not answer must not stay closed for ever.
    ///
    /// Spec: A3
    #[tokio::test(flavor = "multi_thread")]
    async fn going_on_has_a_heartbeat_until_it_hangs() {
        let journal = Arc::new(Journal::create().expect("a journal"));
        let time_max = server::LOOK_INTERVAL * 3;
        let watched = Arc::clone(&journal);
        let hangs = tokio::spawn(async move {
            with_heartbeat(&watched, tokio::spawn(std::future::pending::<()>()), time_max).await
        });
        tokio::time::sleep(server::LOOK_INTERVAL).await;
        let first = journal.heartbeats();
        tokio::time::sleep(time_max * 2).await;
        let last = journal.heartbeats();
        assert!(first > 0 && last > first, "it has none: {first} {last}");
        tokio::time::sleep(time_max).await;
        assert_eq!(journal.heartbeats(), last, "who hangs lives");
        hangs.abort();
        let done = with_heartbeat(&journal, tokio::spawn(async { 7 }), time_max).await;
        assert_eq!(done.expect("it ends"), 7);
    }
}
