//! What is left after the freeze, until each clone can be started.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use tokio::sync::mpsc;

use super::freezing::{Freeze, Frozen};
use super::{Notification, fail, notify, timed};
use crate::CloneError;
use crate::fanotify::{Group, GroupNumber, PinnedGroup};
use crate::fill::{DemandGroup, DemandListener, Filling, Limiter};
use crate::hydrator::Hydrator;
use crate::hydrator::clone_job::{CloneJob, Content, Running, Threads};
use crate::hydrator::record::{Record, RemoteImage, RunnableClone, to_memory};
use crate::hydrator::removal::blocking;
use crate::image::{FileIdentity, FileNumber, Image, ImageFile, SmallFile};
use crate::keeper::BITMAP_SUFFIX;
use crate::recovery::RecoveryPoint;
use crate::service::Event;
use crate::target::{CloneLocation, VersionGuard};

/// What is left after the freeze, until each clone can be started.
pub(super) async fn complete(hydrator: &Arc<Hydrator>, freeze: Freeze) {
    let pause_us = u64::try_from(freeze.pause.as_micros()).unwrap_or(u64::MAX);
    tracing::info!(pause_us, files = freeze.image.files.len(), "frozen");
    for (clone, notifications, error) in freeze.failed {
        fail(hydrator, clone, &notifications, &error).await;
    }
    for group in freeze.groups {
        for member in &group.members {
            notify(&member.notifications, Event::Frozen { pause_us }, None);
        }
        match timed("end the recovery", group.begun.end()).await {
            Ok(point) => {
                let point = Arc::new(point);
                for member in group.members {
                    complete_one(hydrator, member, &point, &freeze.image, &freeze.small).await;
                }
            }
            Err(error) => {
                for member in group.members {
                    hydrator.unfollow(&member.filling);
                    fail(hydrator, member.clone, &member.notifications, &error).await;
                }
            }
        }
    }
}

async fn complete_one(
    hydrator: &Arc<Hydrator>,
    member: Frozen,
    point: &Arc<RecoveryPoint>,
    image: &Arc<Image>,
    small: &Arc<Vec<SmallFile>>,
) {
    let Frozen { clone, notifications, location, filling, origin } = member;
    let parts = (location, Arc::clone(&filling), Content::Local(origin));
    match timed("make runnable", make_runnable(hydrator, &clone, parts, point, image, small)).await {
        Ok(running) => notify_ready(hydrator, clone, running, &notifications),
        Err(error) => {
            hydrator.unfollow(&filling);
            fail(hydrator, clone, &notifications, &error).await;
        }
    }
}

/// A clone can be started.
pub(super) fn notify_ready(
    hydrator: &Arc<Hydrator>,
    clone: Arc<CloneJob>,
    running: Arc<Running>,
    notifications: &mpsc::Sender<Notification>,
) {
    hydrator.journal.note_progress();
    let (target, slot) = (clone.plan.target.clone(), clone.plan.slot.clone());
    let event = Event::Ready { target, consistent_at: running.consistent_at, slot };
    notify(notifications, event, Some(Arc::clone(&running)));
    hydrator.fill_in_background(clone, running);
}

/// Small files, control file, guard, marks, listener: from here on its server can run.
pub(in crate::hydrator) async fn make_runnable(
    hydrator: &Arc<Hydrator>,
    clone: &Arc<CloneJob>,
    (location, filling, origin): (CloneLocation, Arc<Filling>, Content),
    point: &Arc<RecoveryPoint>,
    image: &Arc<Image>,
    small: &Arc<Vec<SmallFile>>,
) -> Result<Arc<Running>, CloneError> {
    let group = Arc::new(Group::new()?);
    // Its server will have to hold one, which whoever starts it makes: better refused now than then.
    drop(PinnedGroup::new(&group)?);
    let guard = VersionGuard::new(location.clone(), point.major_version);
    let version = guard.descriptor()?;
    let (work_place, work_filling, work_group) = (location.clone(), Arc::clone(&filling), Arc::clone(&group));
    let (work_point, work_small, work_image) = (Arc::clone(point), Arc::clone(small), Arc::clone(image));
    blocking(move || {
        work_small.iter().try_for_each(|file| work_place.write(&file.path, &file.content, file.mode))?;
        work_point.write(&work_place)?;
        guard.install()?;
        for number in 0..work_image.files.len() {
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            work_group.mark_file(work_filling.file(FileNumber(number)))?;
        }
        Ok(())
    })
    .await?;
    let elsewhere = clone.elsewhere.clone().map(|host| RemoteImage { host, session: origin.session() });
    let (number, plan, work_filling) = (clone.number, clone.plan.clone(), Arc::clone(&filling));
    let (work_point, work_image) = (Arc::clone(point), Arc::clone(image));
    let state = blocking(move || {
        let (major_version, consistent_at) = (work_point.major_version, work_point.consistent_at);
        let targets = identities(&work_filling)?;
        let made = RunnableClone { image: Image::clone(&work_image), targets, major_version, consistent_at };
        to_memory(&Record { number, plan, elsewhere, made: Some(made) })
    })
    .await?;
    let keep = |part: &str, file: BorrowedFd<'_>| hydrator.keep(clone.number, part, file);
    keep("group", group.as_fd());
    keep(BITMAP_SUFFIX, filling.bitmap().as_fd());
    keep("version", version.descriptor.as_fd());
    keep("state", state.as_fd());
    let limiter = Arc::new(Limiter::new(clone.plan.fill.limit_bytes_per_second));
    let listener = hydrator.listen(clone, &group, &filling, false)?;
    let running = Arc::new(Running {
        major_version: point.major_version,
        consistent_at: point.consistent_at,
        threads: Mutex::new(Some(Threads { background: None, _listener: listener })),
        location,
        group,
        version,
        filling,
        origin,
        limiter,
    });
    match clone.set_running(Arc::clone(&running)) {
        true => Ok(running),
        false => Err(hydrator.refuse("it was discarded meanwhile".to_owned())),
    }
}

/// Which files a filling fills: a successor must not fill others that have got their names.
fn identities(filling: &Filling) -> Result<Vec<FileIdentity>, CloneError> {
    let files = filling.image().files.iter().zip(0..);
    let identity = |(listed, number): (&ImageFile, u32)| {
        FileIdentity::of_descriptor(filling.file(FileNumber(number))).map_err(CloneError::file("examine", &listed.path))
    };
    files.map(identity).collect()
}

impl Hydrator {
    /// Starts to answer a clone's accesses.
    pub(in crate::hydrator) fn listen(
        &self,
        clone: &CloneJob,
        group: &Arc<Group>,
        filling: &Arc<Filling>,
        take_over: bool,
    ) -> Result<DemandListener, CloneError> {
        let demand = DemandGroup {
            group: Arc::clone(group),
            number: GroupNumber(u32::try_from(clone.number).unwrap_or(u32::MAX)),
            journal: Arc::clone(&self.journal),
            data_directory: clone.plan.target.clone(),
        };
        DemandListener::start(demand, Arc::clone(filling), take_over)
    }
}
