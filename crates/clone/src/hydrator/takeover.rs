//! Going on where the hydrator before died: from what the keeper held.
//!
//! First what the source waits for, since its server does: then the clones' accesses, then all else.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use onecopy_postgres::{Directory, InheritedDescriptor};
use rustix::fs::{Mode, OFlags};

use super::clone_job::{CloneJob, Content, Running, Threads};
use super::images::{ImageRecord, ResumedImage};
use super::keeper_client::copy_of;
use super::making::{SOURCE_GROUP_KEPT, dialler};
use super::record::{Limit, Record, RemoteImage, RunnableClone, from_memory, kept_name};
use super::removal::blocking;
use super::spare::SPARE_KEPT;
use super::unfinished::{self, Unfinished};
use super::{Hydrator, cleanup, ending, lock};
use crate::CloneError;
use crate::fanotify::{Group, NoNotifyOpener, Verdict, descriptors_max};
use crate::fill::{FillProgress, Filling, Limiter, SharedBitmap};
use crate::free_space::SourceDisks;
use crate::image::{FileIdentity, FileNumber, Image};
use crate::keeper::{BITMAP_SUFFIX, KeptFiles};
use crate::network::client::RemoteOrigin;
use crate::plan::Plan;
use crate::service::CloneState;
use crate::source::{Follower, Source, SourceFiles};
use crate::target::{CloneLocation, VERSION_DESCRIPTOR_NUMBER};

/// A clone that can be gone on with.
struct Resumable {
    limit_bytes_per_second: Option<u64>,
    clone: Arc<CloneJob>,
    made: RunnableClone,
    filling: Arc<Filling>,
    origin: Content,
    group: Arc<Group>,
    version: OwnedFd,
}

/// Takes over all that was kept; without anything, removes what a service left behind that was killed as a whole.
///
/// # Errors
/// What was kept cannot be used at all.
pub async fn take_over(hydrator: &Arc<Hydrator>, kept: &KeptFiles) -> Result<(), CloneError> {
    hydrator.journal.clean();
    let records = Record::all(kept);
    // Before anything writes the list anew.
    let mut listed = unfinished::read_targets(&hydrator.rendezvous);
    listed.retain(|unfinished| !records.iter().any(|record| record.plan.target == unfinished.target));
    lock(&hydrator.left).clone_from(&listed);
    let (images, unusable) = reopen_images(kept).await;
    let numbers = records.iter().map(|record| record.number);
    let numbers = numbers.chain(images.iter().map(|image| image.record.number));
    let last = numbers.chain(unusable.iter().map(|record| record.number)).max().unwrap_or(0);
    hydrator.next_number.store(last + 1, Ordering::Relaxed);
    let (mut resumable, mut whole, mut lost) = (Vec::new(), Vec::new(), Vec::new());
    for Record { number, plan, elsewhere, made } in records {
        let host = elsewhere.as_ref().map(|elsewhere| elsewhere.host.clone());
        let clone = Arc::new(CloneJob::new(number, plan, host));
        hydrator.add(Arc::clone(&clone));
        match made {
            None => lost.push((clone, "its service died while it was being made".to_owned())),
            Some(made) => match reopen(Arc::clone(&clone), made, elsewhere, kept).await {
                Ok(parts) => resumable.push(parts),
                Err(error) if ending::is_whole(&clone.plan.target) => {
                    tracing::warn!(
                        target = %clone.plan.target.display(),
                        %error,
                        "whole, and not looked after any more"
                    );
                    whole.push(clone);
                }
                Err(error) => lost.push((clone, format!("its service died and could not go on with it: {error}"))),
            },
        }
    }
    take_over_source(hydrator, kept, followings(&resumable, &images)).await?;
    images.into_iter().for_each(|image| hydrator.images.resume(&hydrator.sessions, image));
    unusable.into_iter().for_each(|record| hydrator.images.give_up(hydrator, record));
    for parts in resumable {
        let clone = Arc::clone(&parts.clone);
        if let Err(error) = resume(hydrator, parts) {
            lost.push((clone, format!("its service died and could not go on with it: {error}")));
        }
    }
    for clone in whole {
        if let Err(error) = ending::let_go_of_whole(kept, clone.number).await {
            tracing::error!(target = %clone.plan.target.display(), %error, "its server may wait for ever: restart it");
        }
        clone.set_over(CloneState::Whole, FillProgress::default());
        hydrator.forget(&clone);
    }
    // In the background: a source that starts is waited for, and others want to be answered meanwhile.
    for (clone, reason) in lost {
        let (lingering, hydrator) = (hydrator.linger(), Arc::clone(hydrator));
        tokio::spawn(async move {
            ending::discard(hydrator, clone, reason).await;
            drop(lingering);
        });
    }
    if kept.contains_key(SPARE_KEPT) {
        // The prepared directory itself is made anew: which of its files are still as they were is not known.
        let wanted = copy_of(kept, SPARE_KEPT).and_then(from_memory)?;
        hydrator.set_spare(Some(wanted))?;
    }
    for unfinished in &mut listed {
        let is_anothers = |slot: &String| hydrator.has_slot(slot) || hydrator.images.has_slot(slot);
        unfinished.slot.take_if(|slot| is_anothers(slot));
    }
    hydrator.write_targets();
    if !listed.is_empty() {
        lock(&hydrator.removing).clone_from(&listed);
        let (lingering, hydrator) = (hydrator.linger(), Arc::clone(hydrator));
        tokio::spawn(async move {
            clean_up(&hydrator, listed).await;
            hydrator.write_targets();
            drop(lingering);
        });
    }
    Ok(())
}

/// Removes what was left before. Until it is gone nobody gets its directories and slots.
async fn clean_up(hydrator: &Arc<Hydrator>, listed: Vec<Unfinished>) {
    let leftovers = cleanup::clean_up_targets(&hydrator.rendezvous, listed).await;
    let removed = std::mem::take(&mut *lock(&hydrator.removing));
    let mut left = lock(&hydrator.left);
    left.retain(|unfinished| !removed.iter().any(|removed| removed.target == unfinished.target));
    for (unfinished, error) in leftovers {
        let target = unfinished.target.display();
        tracing::error!(%target, %error, "left behind, and cannot be removed: the next service tries again");
        left.push(unfinished);
    }
}

async fn reopen(
    clone: Arc<CloneJob>,
    made: RunnableClone,
    elsewhere: Option<RemoteImage>,
    kept: &KeptFiles,
) -> Result<Resumable, CloneError> {
    let part = |part: &str| copy_of(kept, &kept_name(clone.number, part));
    let (group, bitmap, version) = (part("group")?, part(BITMAP_SUFFIX)?, part("version")?);
    // Kept when it was changed.
    let limit = part("limit").and_then(from_memory::<Limit>).map(|limit| limit.bytes_per_second);
    let limit_bytes_per_second = limit.unwrap_or(clone.plan.fill.limit_bytes_per_second);
    let plan = clone.plan.clone();
    let (made, filling, origin) = blocking(move || {
        let image = Arc::new(made.image.clone());
        let files = open_targets(&plan, &made)?;
        let origin = match elsewhere {
            None => Content::Local(Arc::new(SourceFiles::reopen(&plan.source.data_directory, &image, |_| true)?)),
            Some(RemoteImage { host, session }) => {
                let unknown = || std::io::Error::other("its image on the other host is not known; make it again");
                let session = session.ok_or_else(unknown).map_err(CloneError::kernel("go on"))?;
                let dialler = dialler(&host, &plan)?;
                Content::Remote(Arc::new(RemoteOrigin::resume(dialler, session, Arc::clone(&image))?))
            }
        };
        let filling = Filling::new(image, files, origin.origin(), SharedBitmap::open(bitmap)?)?;
        let filling = match &origin {
            Content::Local(_) => filling.beside(SourceDisks::of(&plan.source.data_directory)?),
            Content::Remote(_) => filling,
        };
        if let Content::Remote(origin) = &origin {
            origin.acknowledge(filling.bitmap())?;
        }
        for number in numbers(filling.image()).filter(|number| filling.is_file_filled(*number)) {
            origin.release(number);
        }
        Ok((made, Arc::new(filling), origin))
    })
    .await?;
    let group = Arc::new(Group::from_descriptor(group));
    Ok(Resumable { limit_bytes_per_second, clone, made, filling, origin, group, version })
}

/// The clone's files, so that our accesses raise nothing. In the place of one that its server has removed stands an
/// empty one without a name, which needs no content.
fn open_targets(plan: &Plan, made: &RunnableClone) -> Result<Vec<File>, CloneError> {
    let quiet = NoNotifyOpener::new()?;
    let directory = CloneLocation::of(plan)?.open()?;
    let mut files = Vec::with_capacity(made.image.files.len());
    for (listed, identity) in made.image.files.iter().zip(&made.targets) {
        let found = match quiet.open(&directory, &listed.path, true) {
            Err(CloneError::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => None,
            found => Some(found?),
        };
        let same = found.filter(|file| FileIdentity::of_descriptor(file).is_ok_and(|found| found == *identity));
        files.push(match same {
            Some(file) => file,
            None => nameless(&directory)?,
        });
    }
    Ok(files)
}

fn nameless(directory: &Directory) -> Result<File, CloneError> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(directory, ".", flags, Mode::RUSR | Mode::WUSR);
    opened.map(File::from).map_err(|error| CloneError::file("make a file in", directory.path())(error.into()))
}

fn numbers(image: &Image) -> impl Iterator<Item = FileNumber> + use<> {
    (0..u32::try_from(image.files.len()).unwrap_or(u32::MAX)).map(FileNumber)
}

/// Images that other hosts read: those that can be gone on with, and the others.
async fn reopen_images(kept: &KeptFiles) -> (Vec<ResumedImage>, Vec<ImageRecord>) {
    let (mut images, mut unusable) = (Vec::new(), Vec::new());
    for record in ImageRecord::all(kept) {
        match record.clone().reopen(kept).await {
            Ok(image) => images.push(image),
            Err(error) => {
                tracing::error!(
                    target = %record.plan.target.display(),
                    %error,
                    "an image for a clone elsewhere is lost"
                );
                unusable.push(record);
            }
        }
    }
    (images, unusable)
}

/// Who follows the source.
struct Followings {
    /// Its data directory; none when nobody does.
    data_directory: Option<PathBuf>,
    followers: Vec<(Arc<dyn Follower>, Arc<Image>)>,
}

fn followings(resumable: &[Resumable], images: &[ResumedImage]) -> Followings {
    let plans = resumable.iter().map(|parts| &parts.clone.plan);
    let mut plans = plans.chain(images.iter().map(|image| &image.record.plan));
    let clones = resumable.iter().map(|parts| (Arc::clone(&parts.filling) as _, Arc::clone(parts.filling.image())));
    let elsewhere =
        images.iter().map(|image| (Arc::clone(&image.image_store) as _, Arc::clone(image.image_store.image())));
    Followings {
        data_directory: plans.next().map(|plan| plan.source.data_directory.clone()),
        followers: clones.chain(elsewhere).collect(),
    }
}

/// Answers what the source waits for and goes on saving what it changes; with nobody to save it for, lets it go.
async fn take_over_source(hydrator: &Hydrator, kept: &KeptFiles, followings: Followings) -> Result<(), CloneError> {
    if !kept.contains_key(SOURCE_GROUP_KEPT) {
        return Ok(());
    }
    let group = Arc::new(Group::from_descriptor(copy_of(kept, SOURCE_GROUP_KEPT)?));
    let Followings { data_directory: Some(directory), followers } = followings else {
        let released = blocking(move || {
            group.flush()?;
            // Of what was read before; what was not is let through when the last copy is closed.
            group.sweep(i32::try_from(descriptors_max()).unwrap_or(i32::MAX), Verdict::Allow)
        });
        released.await?;
        hydrator.keeper_client.forget(SOURCE_GROUP_KEPT);
        return Ok(());
    };
    let (journal, clones) = (Arc::clone(&hydrator.journal), followers.len());
    let (source, resumed) = blocking(move || Source::resume(&directory, group, journal, followers)).await?;
    tracing::warn!(?resumed, clones, "went on after a death");
    *lock(&hydrator.source) = Some(source);
    Ok(())
}

/// Answers the clone's accesses again and fills on.
fn resume(hydrator: &Arc<Hydrator>, parts: Resumable) -> Result<(), CloneError> {
    let Resumable { limit_bytes_per_second, clone, made, filling, origin, group, version } = parts;
    tracing::warn!(target = %clone.plan.target.display(), "goes on with a clone");
    let listener = hydrator.listen(&clone, &group, &filling, true)?;
    let running = Arc::new(Running {
        location: CloneLocation::of(&clone.plan)?,
        major_version: made.major_version,
        consistent_at: made.consistent_at,
        version: InheritedDescriptor { descriptor: Arc::new(version), number: VERSION_DESCRIPTOR_NUMBER },
        limiter: Arc::new(Limiter::new(limit_bytes_per_second)),
        threads: Mutex::new(Some(Threads { background: None, _listener: listener })),
        group,
        filling,
        origin,
    });
    clone.set_running(Arc::clone(&running));
    hydrator.fill_in_background(clone, running);
    Ok(())
}
