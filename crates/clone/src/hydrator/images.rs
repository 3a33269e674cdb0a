//! Images of the source for clones on other hosts: frozen as for clones here, kept aside until they are delivered.

mod kept;
mod wanted;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use onecopy_postgres::ConnectionParameters;

use super::filling::HOT_TIMEOUT;
use super::making::{OTHER_FREEZE_INTERVAL, OTHER_FREEZE_TIMEOUT};
use super::removal::blocking;
use super::{Hydrator, lock};
use crate::image::Image;
use crate::network::LEASE;
use crate::network::image_store::ImageStore;
use crate::network::manifest::Manifest;
use crate::network::protocol::{SessionId, shown};
use crate::network::server::{Checking, Ended, Finding, Frozen, ImageMaker, Making, Sessions, serve};
use crate::plan::{Plan, SourceServer};
use crate::recovery::slot::{self, SlotState};
use crate::recovery::{self, Begun};
use crate::service::Rendezvous;
use crate::source::Source;
use crate::{CloneError, warm};

pub use kept::{ImageRecord, ResumedImage, clean_up};

/// How often it is looked whether sessions are over.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Freezes that are tried when databases are made just then.
const FREEZES_MAX: u32 = 20;

/// What is followed for clones elsewhere.
pub struct Images {
    hydrator: Weak<Hydrator>,
    served: Mutex<HashMap<SessionId, Served>>,
    /// Names of slots that are taken.
    slots: Arc<Mutex<HashSet<String>>>,
}

/// The name of a slot of an image: from before it is looked whether the source has such a slot until ours is dropped,
/// no other image may have it. There are no more than sessions and slots that are just being dropped.
#[derive(Debug)]
struct SlotName {
    name: String,
    slots: Arc<Mutex<HashSet<String>>>,
}

impl Drop for SlotName {
    fn drop(&mut self) {
        lock(&self.slots).remove(&self.name);
    }
}

#[derive(Clone)]
struct Served {
    number: u64,
    image_store: Arc<ImageStore>,
    connection: ConnectionParameters,
    data_directory: PathBuf,
    slot: String,
    /// None only when a service went on with two images of one slot, which no service makes.
    slot_name: Option<Arc<SlotName>>,
    wal_keep_bytes_max: u64,
}

impl Images {
    /// None yet of this hydrator's source, and their sessions.
    pub fn of(hydrator: Weak<Hydrator>) -> (Arc<Images>, Arc<Sessions>) {
        let images = Arc::new(Images { hydrator, served: Mutex::default(), slots: Arc::default() });
        (Arc::clone(&images), Arc::new(Sessions::new(images, LEASE)))
    }

    /// Goes on with an image; its source is followed for it already.
    pub fn resume(&self, sessions: &Sessions, resumed: ResumedImage) {
        let ResumedImage { record: ImageRecord { number, session, plan, .. }, image_store } = resumed;
        tracing::warn!(?session, target = %plan.target.display(), "goes on with an image for a clone elsewhere");
        let slot_name = self.reserve(&plan.slot).map(Arc::new);
        lock(&self.served).insert(session, Served::new(number, Arc::clone(&image_store), plan, slot_name));
        sessions.resume(session, image_store);
    }

    /// Nobody will read this image: the clone learns it when it asks.
    pub fn give_up(&self, hydrator: &Arc<Hydrator>, record: ImageRecord) {
        let ImageRecord { number, plan, .. } = record;
        let slot_name = self.reserve(&plan.slot).map(Arc::new);
        self.release(hydrator, number, plan.source.connection, plan.slot, slot_name);
    }

    /// Whether an image for a clone elsewhere has this slot, or is to have it.
    pub fn has_slot(&self, name: &str) -> bool {
        lock(&self.slots).contains(name)
    }

    /// The name of a slot for one image; none while another one has it.
    fn reserve(&self, name: &str) -> Option<SlotName> {
        let is_new = lock(&self.slots).insert(name.to_owned());
        is_new.then(|| SlotName { name: name.to_owned(), slots: Arc::clone(&self.slots) })
    }

    /// Drops a slot, and forgets the image that had it. The name is free when that is done, not before.
    fn release(
        &self,
        hydrator: &Arc<Hydrator>,
        number: u64,
        connection: ConnectionParameters,
        slot: String,
        slot_name: Option<Arc<SlotName>>,
    ) {
        let (lingering, hydrator) = (hydrator.linger(), Arc::clone(hydrator));
        tokio::spawn(async move {
            slot::drop(&connection, &slot).await;
            kept::forget(&hydrator, number);
            drop((slot_name, lingering));
        });
    }

    async fn freeze_for(&self, session: SessionId, plan: Plan) -> Result<Frozen, CloneError> {
        let hydrator = self.hydrator.upgrade().ok_or_else(going)?;
        // The path is the peer's: it may lead to a file system that hangs.
        let directory = plan.source.data_directory.clone();
        let rendezvous = blocking(move || Rendezvous::of_source(&directory)).await?;
        if rendezvous != *hydrator.rendezvous() {
            return Err(hydrator.refuse(format!("it does not clone {:?}", plan.source.data_directory)));
        }
        // Before anything is waited for: of two that come together one has the name, the other never asks the source.
        let slot_name = self.reserve(&plan.slot).filter(|_| !hydrator.has_slot(&plan.slot));
        let Some(slot_name) = slot_name else {
            let slot = shown(&plan.slot);
            return Err(hydrator.refuse(format!("the slot {slot} is that of another clone: take another one (--slot)")));
        };
        let taken = wanted::take(plan).await;
        let plan = taken.map_err(|error| hydrator.refuse(error.to_string()))?;
        let server = plan.source.clone();
        let directory = server.data_directory.clone();
        let files = blocking(move || Ok(Image::scan(&directory)?.image.files.len())).await?;
        let _reservation = hydrator.reserve_descriptors(&server.data_directory, files, 1)?;
        let number = hydrator.next_number.fetch_add(1, Ordering::Relaxed);
        let record = ImageRecord { number, session, plan: plan.clone(), image: None };
        record.keep(&hydrator, None).await?;
        let begun = recovery::begin(&server, std::slice::from_ref(&plan.slot), plan.recovery).await;
        let begun = begun.inspect_err(|_| kept::forget(&hydrator, number))?;
        match self.freeze_and_keep(&hydrator, record, begun).await {
            Ok(frozen) => {
                let image_store = Arc::clone(&frozen.image_store);
                let slot_name = Some(Arc::new(slot_name));
                lock(&self.served).insert(session, Served::new(number, image_store, plan, slot_name));
                Ok(frozen)
            }
            Err(error) => {
                // Also when the recovery's end has dropped it already.
                slot::drop(&server.connection, &plan.slot).await;
                kept::forget(&hydrator, number);
                Err(error)
            }
        }
    }

    /// What a successor needs is kept before anybody hears of the image.
    async fn freeze_and_keep(
        &self,
        hydrator: &Arc<Hydrator>,
        record: ImageRecord,
        begun: Begun,
    ) -> Result<Frozen, CloneError> {
        let frozen = self.follow(hydrator, &record.plan, begun).await?;
        let record = ImageRecord { image: Some(frozen.manifest.image.clone()), ..record };
        let kept = record.keep(hydrator, Some(&frozen.image_store)).await;
        kept.inspect_err(|_| unfollow(hydrator, &frozen.image_store))?;
        Ok(frozen)
    }

    async fn follow(&self, hydrator: &Arc<Hydrator>, plan: &Plan, begun: Begun) -> Result<Frozen, CloneError> {
        let (begin, mut attempts) = (Instant::now(), 0);
        let (image_store, small_files, pause) = loop {
            attempts += 1;
            let source = hydrator.watched(&plan.source).await?;
            source.adopt(&plan.source).await?;
            let directory = plan.source.data_directory.clone();
            match blocking(move || freeze_now(&source, &directory)).await {
                Err(CloneError::NewDirectory { .. }) if attempts < FREEZES_MAX => {}
                Err(CloneError::FreezeUnderWay) if begin.elapsed() < OTHER_FREEZE_TIMEOUT => {
                    tokio::time::sleep(OTHER_FREEZE_INTERVAL).await;
                    attempts -= 1;
                }
                frozen => break frozen?,
            }
        };
        let ended = begun.end().await;
        let recovery = ended.inspect_err(|_| unfollow(hydrator, &image_store))?;
        let pause_us = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
        tracing::info!(pause_us, target = %plan.target.display(), "frozen for a clone elsewhere");
        let manifest = Manifest { image: image_store.image().as_ref().clone(), recovery, pause_us };
        Ok(Frozen { manifest, small_files, image_store })
    }

    fn served(&self) -> Vec<(SessionId, Served)> {
        lock(&self.served).iter().map(|(session, served)| (*session, served.clone())).collect()
    }
}

impl Served {
    fn new(number: u64, image_store: Arc<ImageStore>, plan: Plan, slot_name: Option<Arc<SlotName>>) -> Served {
        let Plan { source, slot, wal_keep_bytes_max, .. } = plan;
        let SourceServer { connection, data_directory, .. } = source;
        Served { number, image_store, connection, data_directory, slot, slot_name, wal_keep_bytes_max }
    }
}

type FrozenNow = (Arc<ImageStore>, Vec<crate::image::SmallFile>, Duration);

fn freeze_now(source: &Arc<Source>, data_directory: &Path) -> Result<FrozenNow, CloneError> {
    source.prepare()?;
    let mut freezing = source.close_gate()?;
    let beside = data_directory.parent().unwrap_or(data_directory);
    let origin = Arc::new(freezing.files());
    let image_store = Arc::new(ImageStore::create(Arc::clone(freezing.image()), origin, beside)?);
    freezing.follow(Arc::clone(&image_store) as _)?;
    let small_files = freezing.small_files().to_vec();
    // Who followed in time is none the worse for a gate that opened by itself.
    let pause = freezing.open_gate().unwrap_or(crate::source::GATE_CLOSED_MAX);
    Ok((image_store, small_files, pause))
}

fn unfollow(hydrator: &Hydrator, image_store: &Arc<ImageStore>) {
    if let Some(source) = hydrator.source() {
        source.unfollow(image_store);
    }
}

fn going() -> CloneError {
    CloneError::kernel("go on")(std::io::Error::other("the service is ending"))
}

impl ImageMaker for Images {
    fn freeze(&self, session: SessionId, plan: Plan) -> Making<'_> {
        Box::pin(self.freeze_for(session, plan))
    }

    fn ended(&self, session: SessionId, how: Ended) {
        let Some(served) = lock(&self.served).remove(&session) else { return };
        let Some(hydrator) = self.hydrator.upgrade() else { return };
        unfollow(&hydrator, &served.image_store);
        match how {
            Ended::Whole => kept::forget(&hydrator, served.number),
            _ => self.release(&hydrator, served.number, served.connection, served.slot, served.slot_name),
        }
    }

    fn hot(&self, session: SessionId) -> Finding<'_> {
        let served = lock(&self.served).get(&session).cloned();
        Box::pin(async move {
            let Some(served) = served else { return Vec::new() };
            let hot = warm::hot_ranges(&served.connection, served.image_store.image(), &served.data_directory);
            tokio::time::timeout(HOT_TIMEOUT, hot).await.unwrap_or_default()
        })
    }

    fn cannot_catch_up(&self) -> Checking<'_> {
        Box::pin(self.useless())
    }
}

impl Images {
    /// Clones for which the source does not keep its log any more, and why.
    async fn useless(&self) -> Vec<(SessionId, String)> {
        let mut useless = Vec::new();
        for (session, served) in self.served() {
            // While the source is down nothing is known, and nothing is lost.
            let Ok(client) = served.connection.connect().await else { continue };
            match slot::watch(&client, &served.slot, served.wal_keep_bytes_max).await {
                Ok(SlotState::Keeping { .. }) => {}
                Ok(SlotState::Useless { reason }) => useless.push((session, reason)),
                Err(error) => tracing::debug!(slot = served.slot, %error, "a replication slot cannot be looked at"),
            }
        }
        useless
    }
}

/// Ends sessions that nobody reads, that cannot be kept, whose clone cannot catch up.
pub async fn supervise(sessions: Arc<Sessions>) {
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        sessions.expire();
        sessions.end_useless().await;
    }
}

/// Serves one connection.
pub async fn serve_image(sessions: &Arc<Sessions>, stream: tokio::net::UnixStream) -> std::io::Result<()> {
    serve(stream, Arc::clone(sessions)).await.map_err(|error| {
        tracing::warn!(%error, "a connection of a clone elsewhere ended");
        std::io::Error::other(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec: C3
    #[test]
    fn k23_of_two_images_with_one_slot_only_the_first_has_it_until_it_is_dropped() {
        let (images, _sessions) = Images::of(Weak::new());
        let first = images.reserve("onecopy_shop").expect("nobody has it");
        assert!(images.has_slot("onecopy_shop") && images.reserve("onecopy_shop").is_none());
        let other = images.reserve("onecopy_other").expect("another name");
        // Who was refused gives nothing back.
        assert!(images.has_slot("onecopy_shop"));
        // As a session holds it, and whoever drops its slot.
        let (served, releasing) = (Arc::new(first), Arc::new(other));
        let still = Arc::clone(&served);
        drop(served);
        assert!(images.reserve("onecopy_shop").is_none());
        drop((still, releasing));
        assert!(!images.has_slot("onecopy_shop") && !images.has_slot("onecopy_other"));
        assert!(images.reserve("onecopy_shop").is_some());
    }

    /// Spec: C3
    #[test]
    fn k23_of_many_that_come_at_once_one_has_the_slot() {
        let (images, _sessions) = Images::of(Weak::new());
        let taken = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| images.reserve("x"))).collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect::<Vec<SlotName>>()
        });
        assert_eq!(taken.len(), 1);
    }
}
