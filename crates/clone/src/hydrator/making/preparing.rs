//! Everything that can be done before the freeze.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::mpsc;

use super::{Candidate, Notification, Order, RecoveryGroup, fail, notify, timed};
use crate::CloneError;
use crate::fanotify::Group;
use crate::free_space::SourceDisks;
use crate::hydrator::clone_job::CloneJob;
use crate::hydrator::record::{Record, RemoteImage, to_memory};
use crate::hydrator::removal::blocking;
use crate::hydrator::{Hydrator, failed, lock};
use crate::image::Image;
use crate::network::RemoteHost;
use crate::plan::{Plan, SourceServer};
use crate::recovery::{self, slot};
use crate::service::{Event, Rendezvous};
use crate::source::Source;
use crate::target::{CloneLocation, Marker, Skeleton};

pub use crate::keeper::SOURCE_GROUP as SOURCE_GROUP_KEPT;

/// Everything before the freeze: what can fail has mostly failed after this.
pub(super) async fn prepare(hydrator: &Arc<Hydrator>, order: Order) -> Vec<RecoveryGroup<Candidate>> {
    notify(&order.notifications, Event::Preparing, None);
    let mut alike: Vec<Vec<Arc<CloneJob>>> = Vec::new();
    for plan in order.plans {
        if let Err(error) = slot::check_free(&plan.source, &plan.slot).await {
            notify(&order.notifications, failed(Some(&plan.target), error), None);
            continue;
        }
        match admit(hydrator, plan, None) {
            Ok(clone) => match alike.iter_mut().find(|members| is_alike(&members[0].plan, &clone.plan)) {
                Some(members) => members.push(clone),
                None => alike.push(vec![clone]),
            },
            Err((target, error)) => notify(&order.notifications, failed(Some(&target), error), None),
        }
    }
    hydrator.write_targets();
    let mut groups = Vec::new();
    for members in alike {
        groups.extend(prepare_alike(hydrator, members, &order.notifications).await);
    }
    groups
}

/// Whether two clones of one source can share a recovery.
fn is_alike(one: &Plan, other: &Plan) -> bool {
    one.source == other.source && one.recovery == other.recovery
}

/// Takes a clone into the books, so that whatever happens to this process its remains are found.
pub(super) fn admit(
    hydrator: &Arc<Hydrator>,
    mut plan: Plan,
    elsewhere: Option<RemoteHost>,
) -> Result<Arc<CloneJob>, (PathBuf, CloneError)> {
    let target = plan.target.clone();
    let mut admit = || {
        plan.target = std::path::absolute(&plan.target).map_err(CloneError::file("resolve", &plan.target))?;
        plan.tablespaces =
            std::path::absolute(&plan.tablespaces).map_err(CloneError::file("resolve", &plan.tablespaces))?;
        let location = match &elsewhere {
            None => Rendezvous::of_source(&plan.source.data_directory)?,
            Some(_) => Rendezvous::of_target(&plan.target),
        };
        if location != hydrator.rendezvous {
            let reason = format!("it does not clone {}", plan.source.data_directory.display());
            return Err(hydrator.refuse(reason));
        }
        if hydrator.find(&plan.target).is_some_and(|clone| !clone.is_over()) {
            return Err(hydrator.refuse(format!("{} is being made already", plan.target.display())));
        }
        if lock(&hydrator.removing).iter().any(|left| left.target == plan.target) {
            let reason = format!("what was left at {} is being removed: try again", plan.target.display());
            return Err(hydrator.refuse(reason));
        }
        if elsewhere.is_none() && (hydrator.images.has_slot(&plan.slot) || hydrator.has_slot(&plan.slot)) {
            let reason = format!("another clone has the slot {:?}: take another one (--slot)", plan.slot);
            return Err(hydrator.refuse(reason));
        }
        // Before anything is written down about it: what lies there may be somebody else's, and must never be removed.
        CloneLocation::of(&plan)?.check_free()?;
        let number = hydrator.next_number.fetch_add(1, Ordering::Relaxed);
        // A successor must know that the slot is not this host's to drop, also when there is no image yet.
        let image = elsewhere.clone().map(|host| RemoteImage { host, session: None });
        let record = Record { number, plan: plan.clone(), elsewhere: image, made: None };
        hydrator.keep(number, "state", to_memory(&record)?);
        Ok(Arc::new(CloneJob::new(number, plan.clone(), elsewhere.clone())))
    };
    let clone = admit().map_err(|error| (target, error))?;
    hydrator.add(Arc::clone(&clone));
    Ok(clone)
}

/// What clones that share a recovery need; none when they have all failed.
async fn prepare_alike(
    hydrator: &Arc<Hydrator>,
    members: Vec<Arc<CloneJob>>,
    notifications: &mpsc::Sender<Notification>,
) -> Option<RecoveryGroup<Candidate>> {
    let Plan { source, recovery, .. } = &members[0].plan;
    let directory = source.data_directory.clone();
    let (wanted, promised): (Vec<_>, Vec<_>) =
        hydrator.clones().into_iter().partition(|clone| members.iter().any(|member| Arc::ptr_eq(member, clone)));
    let listed = blocking(move || {
        let image = Image::scan(&directory)?.image;
        let [wanted, promised] = [wanted, promised]
            .map(|clones| clones.iter().filter_map(|clone| clone.unwritten(&image)).collect::<Vec<_>>());
        SourceDisks::of(&directory)?.check(&wanted, &promised)?;
        Ok(Arc::new(image))
    });
    let listed = listed.await;
    let promised = listed.and_then(|image| {
        // Those of the source, and those of each clone.
        let times = 1 + members.len();
        let reservation = hydrator.reserve_descriptors(&source.data_directory, image.files.len(), times)?;
        Ok((image, reservation))
    });
    let (image, _reservation) = match promised {
        Ok(promised) => promised,
        Err(error) => {
            members.iter().for_each(|clone| clone.note_no_slot());
            return fail_all(hydrator, members, notifications, &error).await;
        }
    };
    let slots: Vec<String> = members.iter().map(|clone| clone.plan.slot.clone()).collect();
    // Adopted by a checkpoint, the source has a redo point that is near: nobody asks for another one beside it.
    let adoption = watch(hydrator, source);
    let (begun, skeletons) = tokio::join!(
        timed("begin the recovery", recovery::begin_around(source, &slots, *recovery, adoption)),
        timed("make directories", make_skeletons(hydrator, &image, &members)),
    );
    let begun = match begun {
        Ok(begun) => begun,
        Err(error) => {
            // What it had made it has dropped again.
            members.iter().for_each(|clone| clone.note_no_slot());
            return fail_all(hydrator, members, notifications, &error).await;
        }
    };
    let mut candidates = Vec::new();
    for (clone, skeleton) in members.into_iter().zip(skeletons) {
        match skeleton {
            Ok(skeleton) => {
                candidates.push(Candidate { clone, notifications: notifications.clone(), skeleton: Ok(skeleton) });
            }
            Err(error) => fail(hydrator, clone, notifications, &error).await,
        }
    }
    if candidates.is_empty() {
        begun.abandon().await;
        return None;
    }
    Some(RecoveryGroup { begun, members: candidates })
}

async fn fail_all(
    hydrator: &Arc<Hydrator>,
    members: Vec<Arc<CloneJob>>,
    notifications: &mpsc::Sender<Notification>,
    error: &CloneError,
) -> Option<RecoveryGroup<Candidate>> {
    for clone in members {
        fail(hydrator, clone, notifications, error).await;
    }
    None
}

/// Sees to it that the source is watched, and every file that it has open is armed.
async fn watch(hydrator: &Arc<Hydrator>, server: &SourceServer) -> Result<(), CloneError> {
    let source = hydrator.watched(server).await?;
    let opened = Arc::clone(&source);
    let (adoption, _) = tokio::join!(
        timed("adopt", source.adopt(server)),
        // What fails here fails again at the freeze, and says so.
        timed("open the source's files", blocking(move || opened.prepare())),
    );
    tracing::debug!(adoption = ?adoption?, "armed");
    Ok(())
}

impl Hydrator {
    /// The source, watched from now on if it was not before.
    pub(in crate::hydrator) async fn watched(&self, server: &SourceServer) -> Result<Arc<Source>, CloneError> {
        let _alone = self.arming.lock().await;
        if let Some(source) = self.source() {
            return Ok(source);
        }
        let (directory, journal) = (server.data_directory.clone(), Arc::clone(&self.journal));
        let group = Arc::new(Group::new()?);
        self.keeper_client.keep(SOURCE_GROUP_KEPT, &*group);
        let armed = blocking(move || Source::arm(&directory, group, journal)).await;
        match armed {
            Ok(source) => {
                *lock(&self.source) = Some(Arc::clone(&source));
                Ok(source)
            }
            Err(error) => {
                self.keeper_client.forget(SOURCE_GROUP_KEPT);
                Err(error)
            }
        }
    }
}

/// Directories in the source's shape, the prepared one first; one result a clone.
async fn make_skeletons(
    hydrator: &Arc<Hydrator>,
    image: &Arc<Image>,
    members: &[Arc<CloneJob>],
) -> Vec<Result<Skeleton, CloneError>> {
    let mut skeletons = Vec::new();
    for clone in members {
        let (plan, marker) = (clone.plan.clone(), Marker::of(&clone.plan, hydrator.rendezvous.directory()));
        let spare = hydrator.take_spare(&plan);
        let image = Arc::clone(image);
        let made = blocking(move || {
            let location = CloneLocation::of(&plan)?;
            if let Some(mut skeleton) = spare {
                let moved =
                    skeleton.move_to(&location.directory, &location.tablespaces).and_then(|()| marker.write(&location));
                match moved {
                    Ok(()) => return Ok(skeleton),
                    Err(error) => {
                        tracing::warn!(%error, "the prepared directory cannot be used");
                        crate::target::remove(skeleton.location())?;
                        crate::target::remove(&location)?;
                    }
                }
            }
            Skeleton::make(location, image, &marker)
        });
        skeletons.push(made.await);
    }
    skeletons
}
